import logging
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from mizzen.accelerator import (
    create_accelerator,
    get_accelerator,
    register_accelerator,
    set_accelerator,
    survey,
)
from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.device import TorchDevice
from mizzen.errors import DeviceError, UsageError


class Absent(Cpu):
    def unavailable(self):
        return "it is at the repair shop: fetch it"


def broken():
    raise OSError("libvendor.so.1: cannot open shared object file")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, mizzen.accelerator; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_the_same_object_is_given_everywhere():
    assert get_accelerator() is get_accelerator()


def test_set_accelerator_replaces_it_and_none_lets_it_be_found_again():
    mine = Cpu()
    set_accelerator(mine)
    assert get_accelerator() is mine
    set_accelerator(None)
    assert get_accelerator() is not mine


@pytest.mark.parametrize("thing", [3, "cpu", Cpu, object()], ids=["a number", "a name", "a class", "an object"])
def test_only_an_accelerator_can_be_set(thing):
    with pytest.raises(UsageError, match="is no accelerator, it has no .*create_accelerator"):
        set_accelerator(thing)
    assert get_accelerator() is not thing


@pytest.mark.parametrize("variable", ["MIZZEN_ACCELERATOR", "DS_ACCELERATOR"])
def test_the_environment_names_the_accelerator(monkeypatch, variable):
    register_accelerator("other", Cpu)
    monkeypatch.setenv(variable, "cpu")
    assert get_accelerator().name == "cpu"
    set_accelerator(None)
    monkeypatch.setenv(variable, "absent")
    register_accelerator("absent", Absent)
    with pytest.raises(DeviceError, match=r"'absent' was asked for, but it is at the repair shop.*MIZZEN_ACCELERATOR"):
        get_accelerator()


def test_an_unknown_name_lists_those_that_exist():
    register_accelerator("mine", Cpu)
    with pytest.raises(DeviceError, match="'cudda' is unknown; available names: cpu, cuda, mine, mps, xpu"):
        create_accelerator("cudda")


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch has a GPU")
def test_cuda_without_a_build_for_it_says_so_and_what_to_do():
    with pytest.raises(DeviceError, match=r"is built without CUDA and ROCm: install a build .*pytorch\.org"):
        create_accelerator("cuda")


def test_what_is_registered_is_tried_first_and_what_is_absent_is_passed_over():
    register_accelerator("absent", Absent)
    register_accelerator("mine", lambda: mine)
    mine = Cpu()
    assert get_accelerator() is mine


def test_a_registered_name_replaces_ours():
    mine = Cpu()
    register_accelerator("cpu", lambda: mine)
    assert create_accelerator("cpu") is mine


def test_a_broken_one_is_passed_over_with_a_warning_but_not_when_it_was_asked_for(caplog):
    register_accelerator("vendor", broken)
    with caplog.at_level(logging.WARNING, logger="mizzen"):
        logging.getLogger("mizzen").addHandler(caplog.handler)
        try:
            assert get_accelerator().unavailable() is None
        finally:
            logging.getLogger("mizzen").removeHandler(caplog.handler)
    assert "'vendor' cannot be asked" in caplog.text and "libvendor.so.1" in caplog.text
    with pytest.raises(DeviceError, match=r"'vendor' was asked for, but it does not start: OSError: libvendor\.so\.1"):
        create_accelerator("vendor")


def test_an_installed_package_announces_its_accelerator(monkeypatch):
    entry = metadata.EntryPoint("announced", "mizzen.accelerator.cpu:Cpu [extra]", "mizzen.accelerators")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == "mizzen.accelerators" else [])
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "announced")
    assert isinstance(get_accelerator(), Cpu)


def test_a_device_that_only_torch_knows_is_preferred_to_the_host(monkeypatch, install):
    install("mtia", count=3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    monkeypatch.setattr(torch.distributed, "get_default_backend_for_device", lambda name: f"{name}-collectives")
    for name in ("cuda", "xpu", "mps"):
        register_accelerator(name, Absent)
    found = get_accelerator()
    assert isinstance(found, TorchDevice) and found.name == "mtia"
    assert found.comm_backend == "mtia-collectives" and found.device_count() == 3


def test_the_survey_has_every_name_with_its_reason():
    register_accelerator("absent", Absent)
    register_accelerator("vendor", broken)
    found = survey()
    assert found["cpu"] is None
    assert found["absent"] == "it is at the repair shop: fetch it"
    assert "libvendor.so.1" in found["vendor"]
    assert {"cuda", "xpu", "mps"} <= found.keys()
