"""The examples for clients, started as their first lines say; the drop-in is on the path of that job alone."""

import os
import re
import sys

import pytest

from clients.launching import HERE, ROOT, run

EXAMPLES = ROOT / "examples" / "clients"
RUN = (sys.executable, "-m", "mizzen.cli", "run", "--drop-in", "--no_local_rank", "--num_gpus", "2")
SEARCH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "MIZZEN_ACCELERATOR": "cpu"}


def losses(written: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss.*?(\d+\.\d+)$", written, re.MULTILINE)]


@pytest.mark.parametrize("name", ["trainer.py", "accelerate_loop.py", "sft.py"])
def test_an_example_runs_and_learns(tmp_path, name):
    written = run([*RUN, EXAMPLES / name, tmp_path / "made"], tmp_path, **SEARCH)
    assert losses(written)[-1] < {"trainer.py": 1.0, "accelerate_loop.py": 100.0, "sft.py": 2.2}[name], written[-3000:]
    assert any((tmp_path / "made").iterdir())


@pytest.mark.parametrize(("name", "saved"), [("fabric_loop.py", "."), ("lightning_trainer.py", "last.ckpt")])
def test_an_example_of_lightning_with_its_check_set_aside(tmp_path, name, saved):
    driver = HERE / "drive_lightning_examples.py"
    written = run([*RUN, driver, EXAMPLES / name, tmp_path / "made"], tmp_path, **SEARCH)
    found = losses(written)
    assert len(found) == 3 and found[-1] < found[0], written[-3000:]
    assert (tmp_path / "made" / saved / "checkpoint").is_dir()


def test_adapters_on_a_frozen_model(tmp_path):
    lora = ROOT / "examples" / "lora.py"
    words = (sys.executable, "-m", "mizzen.cli", "run", "--num_gpus", "2", lora)
    written = run([*words, "--steps", 20, "--output", tmp_path / "saved"], tmp_path, **SEARCH)
    trained, everything = (int(found.replace(",", "")) for found in re.findall(r"[\d,]{4,}", written)[:2])
    assert trained < everything and losses(written)[-1] < 5, written[-3000:]
    size = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*.safetensors"))
    assert 4 * trained < size < 4 * everything + 8 * trained, "masters and states of what is trained, and no more"


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "trainer.py", "accelerate_loop.py", "sft.py", "fabric_loop.py", "lightning_trainer.py",
    }  # fmt: skip
