"""The code on docs/accelerators.md is run and used."""

import re
from pathlib import Path

import pytest
import torch

from mizzen.accelerator import create_accelerator, get_accelerator
from mizzen.errors import DeviceError

PAGE = (Path(__file__).parents[3] / "docs" / "accelerators.md").read_text()


def run(containing):
    """Run the one python block with that text; its names."""
    [block] = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if containing in each]
    names = {"__name__": "example"}
    exec(compile(block, "docs/accelerators.md", "exec"), names)
    return names


def test_a_class_of_ones_own_is_registered_found_and_used():
    names = run("SmallHost")
    found = get_accelerator()
    assert isinstance(found, names["SmallHost"])
    assert found.capacity().total <= 2 * 2**30
    assert torch.ones(2, device=found.device()).sum() == 2


def test_a_row_of_facts_is_registered_refused_without_the_extension_and_used_with_it(install):
    run('"npu"')
    with pytest.raises(DeviceError, match="'npu' was asked for, but torch .* knows no such device type"):
        create_accelerator("npu")
    install("npu", count=8)
    found = get_accelerator()
    assert (found.name, found.comm_backend, found.device_count()) == ("npu", "hccl", 8)
    assert found.visible_devices == "ASCEND_RT_VISIBLE_DEVICES"


def test_the_timer_of_the_page_measures():
    assert run("Timer(")["seconds"] >= 0


def test_the_page_names_every_accelerator_and_the_entry_point_group():
    assert all(f"| `{name}` |" in PAGE for name in ("cuda", "xpu", "mps", "cpu"))
    assert '"mizzen.accelerators"' in PAGE
