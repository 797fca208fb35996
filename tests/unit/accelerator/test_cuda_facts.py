"""What the CUDA class decides without a GPU; what it does with one is in tests/device."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from mizzen.accelerator import cuda
from mizzen.accelerator.cuda import Cuda
from mizzen.accelerator.device import is_float8


def properties(**facts):
    return lambda device: SimpleNamespace(**{"major": 9, "minor": 0, "gcnArchName": "", **facts})


@pytest.fixture
def built(monkeypatch, install):
    """`built(count=2)`: a torch for CUDA 13.0 without NCCL, on a host with that many GPUs."""

    def make(count, hip=None):
        monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(cuda, "driver_version", lambda: "")
        return install("cuda", count=count)

    return make


def test_no_gpu_and_a_hidden_gpu_are_told_apart(built, monkeypatch):
    built(count=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "check that nvidia-smi lists one" in Cuda().unavailable()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "with CUDA_VISIBLE_DEVICES='-1': unset that variable" in Cuda().unavailable()


def test_detection_counts_and_asks_nothing_else(built, monkeypatch):
    module = built(count=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("this initialises the driver"))
    assert Cuda().unavailable() is None
    assert module.calls == []


def test_rocm_has_its_own_variable_and_network_prefixes(built, monkeypatch):
    built(count=0, hip="7.1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    found = Cuda()
    assert (found.name, found.visible_devices) == ("cuda", "HIP_VISIBLE_DEVICES")
    assert "RCCL_" in found.export_prefixes
    assert "HIP_VISIBLE_DEVICES=''" in found.unavailable()


@pytest.mark.parametrize(("nccl", "backend"), [(True, "nccl"), (False, "gloo")])
def test_the_backend_is_what_this_torch_has(monkeypatch, nccl, backend):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert Cuda().comm_backend == backend


@pytest.mark.parametrize(
    ("hip", "facts", "supported"),
    [
        (None, {"major": 8, "minor": 0}, set()),
        (None, {"major": 8, "minor": 9}, {torch.float8_e4m3fn, torch.float8_e5m2}),
        (None, {"major": 12, "minor": 0}, {torch.float8_e4m3fn, torch.float8_e5m2}),
        ("7.1", {"gcnArchName": "gfx90a:sramecc+"}, set()),
        ("7.1", {"gcnArchName": "gfx942:sramecc+"}, {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}),
        ("7.1", {"gcnArchName": "gfx950"}, {torch.float8_e4m3fn, torch.float8_e5m2}),
    ],
)
def test_float8_is_where_the_matrix_units_take_it(built, monkeypatch, hip, facts, supported):
    built(count=1, hip=hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(**facts))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    assert {dtype for dtype in dtypes if Cuda().supports(dtype)} == supported


def test_bf16_is_asked_without_emulation(built, monkeypatch):
    built(count=1)
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: bool(asked.append(including_emulation))
    )
    gpu = Cuda()
    assert [gpu.supports(torch.bfloat16) for _ in range(2)] == [False, False]
    assert asked == [False]


def test_it_says_what_it_is(built, monkeypatch):
    built(count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(cuda, "driver_version", lambda: "580.65.06")
    info = Cuda().describe()
    assert (info.name, info.architecture, info.capability) == ("NVIDIA H200", "sm_90", (9, 0))
    assert info.versions == {"CUDA": "13.0", "driver": "580.65.06"}


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.183.01  Release Build\nGCC version: 12.3.0",
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path, text):
    file = tmp_path / "version"
    file.write_text(text)
    assert cuda.driver_version(file) == "535.183.01"


@pytest.mark.parametrize(("code", "output", "expected"), [(0, "535.1\n535.1\n", "535.1"), (9, "failed", "")])
def test_without_that_file_nvidia_smi_is_asked(tmp_path, monkeypatch, code, output, expected):
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code, stdout=output))
    assert cuda.driver_version(tmp_path / "absent") == expected


def test_without_either_the_driver_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert cuda.driver_version(tmp_path / "absent") == ""


def test_what_a_float8_is():
    assert is_float8(torch.float8_e4m3fn) and is_float8(torch.float8_e5m2fnuz)
    assert not is_float8(torch.float16) and not is_float8(torch.uint8)
