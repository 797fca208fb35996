"""The way to the kernels: none on a CPU, and an error that says what is missing on a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from mizzen.errors import DeviceError
from mizzen.kernels.gpu import gpu_code


def test_a_cpu_has_none():
    assert gpu_code(torch.zeros(1)) is None
    assert gpu_code(torch.zeros(1, device="meta")) is None


def test_a_gpu_without_triton_is_an_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "mizzen.kernels.triton_code", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # what Python takes for a package that is not there
    with pytest.raises(DeviceError, match="need Triton on a GPU.*pip install triton, or leave them out"):
        gpu_code(SimpleNamespace(device=torch.device("cuda", 0)))
