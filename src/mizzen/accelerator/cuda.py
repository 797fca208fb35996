"""NVIDIA GPUs, and AMD GPUs under ROCm, which torch drives through the same module. The only file that names it."""

import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from mizzen.accelerator.device import TorchDevice, is_float8, module_of, selection
from mizzen.accelerator.protocol import DeviceInfo
from mizzen.errors import DeviceError
from mizzen.wording import byte_size

PROC: Final = Path("/proc/driver/nvidia/version")
GET_TORCH: Final = "install a build for your driver from https://pytorch.org/get-started/locally"
FLOAT8_OPEN: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
FLOAT8_AMD: Final = frozenset({torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


class Cuda(TorchDevice):
    """Torch's `cuda`. Detection counts devices through the driver's management library.

    [Note: no context before it is wanted]
    `torch.cuda.is_available()` asks the runtime, which initialises the driver in this process: a later fork is then
    broken. `torch.cuda.device_count()` asks NVML (amdsmi under ROCm), which does not, understands indices and UUIDs in
    CUDA_VISIBLE_DEVICES, and falls back to the runtime only where that library is missing. So we count, and nobody has
    to set PYTORCH_NVML_BASED_CUDA_CHECK. A driver that is too old for this torch shows at first use, by torch's own
    message.
    """

    def __init__(self) -> None:
        rocm = torch.version.hip is not None
        nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        super().__init__(
            name="cuda",
            comm_backend="nccl" if nccl else "gloo",  # builds for Windows have no NCCL
            visible_devices="HIP_VISIBLE_DEVICES" if rocm else "CUDA_VISIBLE_DEVICES",
            export_prefixes=("NCCL_", "RCCL_", "HSA_", "MIOPEN_") if rocm else ("NCCL_",),
            lock_pages=lock_pages,
        )

    def unavailable(self) -> str | None:
        """Tell a torch without CUDA from a host without a GPU and from a GPU that is hidden."""
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA and ROCm: {GET_TORCH}"
        if self.device_count() > 0:
            return None
        if hidden := selection(self.visible_devices):
            return f"torch sees no GPU{hidden}: unset that variable, or name devices that this host has"
        tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
        return (
            f"torch {torch.__version__} sees no GPU: check that {tool} lists one; in a container, pass the GPUs to it"
        )

    def supports(self, dtype: torch.dtype) -> bool:
        """Ask the hardware where torch would emulate (bf16) or has no plain arithmetic (float8); else try."""
        if dtype not in self._supported and dtype is torch.bfloat16:
            self._supported[dtype] = bool(torch.cuda.is_bf16_supported(including_emulation=False))
        if dtype not in self._supported and is_float8(dtype):
            self._supported[dtype] = dtype in _float8(*_architecture(self.device()))
        return super().supports(dtype)

    def describe(self, index: int | None = None) -> DeviceInfo:
        """The device, its compute capability, and the versions of what drives it."""
        device = self.device(index)
        return DeviceInfo(torch.cuda.get_device_name(device), *_architecture(device), _versions())


def lock_pages(tensor: torch.Tensor) -> Callable[[], None]:
    """Tell the driver of the memory of a host tensor, for every device of this process; returns what unlocks it."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()  # type: ignore[no-untyped-call]
    size = tensor.numel() * tensor.element_size()
    if error := int(runtime.cudaHostRegister(address, size, 0)):
        raise DeviceError(
            f"{byte_size(size)} of host memory cannot be page-locked (CUDA error {error}): raise `ulimit -l`, or "
            "set pin_memory to false in the offload sections"
        )
    return partial(runtime.cudaHostUnregister, address)


def _architecture(device: torch.device) -> tuple[str, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return properties.gcnArchName if torch.version.hip else f"sm_{capability[0]}{capability[1]}", capability


def _float8(architecture: str, capability: tuple[int, int]) -> frozenset[torch.dtype]:
    """The eight-bit types that the matrix units take."""
    if torch.version.hip:
        rows = {"gfx94": FLOAT8_AMD, "gfx95": FLOAT8_OPEN}
        return rows.get(architecture[:5], frozenset())
    return FLOAT8_OPEN if capability >= (8, 9) else frozenset()


def _versions() -> dict[str, str]:
    versions = {"ROCm": torch.version.hip or ""} if torch.version.hip else {"CUDA": torch.version.cuda or ""}
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(str(part) for part in module_of("cuda").nccl.version())
    if driver := driver_version():
        versions["driver"] = driver
    return versions


def driver_version(proc: Path = PROC) -> str:
    """The version of NVIDIA's kernel driver; empty where neither the kernel nor `nvidia-smi` tells it."""
    if proc.exists() and (found := re.search(r"Kernel Module.*?(\d+\.[\d.]+)", proc.read_text())):
        return found[1]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return ""
    return answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else ""
