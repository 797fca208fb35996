"""What a host has to give to ranks, without loading torch where the kernel can tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mizzen.accelerator.registry import get_accelerator
from mizzen.environment import Switches

ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Devices:
    """A kind of device that Linux lists."""

    name: str
    variable: str
    """The variable that shows only some of them to a process."""
    files: str
    prefixes: tuple[str, ...]
    """Variables that go along with a job."""


KINDS: Final = (
    Devices("cuda", "CUDA_VISIBLE_DEVICES", "dev/nvidia[0-9]*", ("NCCL_", "CUDA_")),
    Devices("cuda", "HIP_VISIBLE_DEVICES", "sys/class/kfd/kfd/topology/nodes/*/gpu_id", ("RCCL_", "HSA_", "MIOPEN_")),
    Devices("xpu", "ZE_AFFINITY_MASK", "nothing", ("CCL_", "FI_", "I_MPI_", "ZE_")),
)


def find_devices(env: Mapping[str, str], root: Path = ROOT) -> Devices | None:
    """The kind that this host has, or that the environment names; None means the processor."""
    asked = Switches.read(env).accelerator
    for kind in KINDS:
        if asked == kind.name == "xpu" or (asked in (None, kind.name) and _numbers(kind, root)):
            return kind
    return None


def count_devices(env: Mapping[str, str], root: Path = ROOT) -> int:
    """How many ranks this host is for; torch is asked where the kernel does not list the devices."""
    kind = find_devices(env, root)
    if kind is not None and (found := _numbers(kind, root)):
        return len(found)
    return get_accelerator().device_count()


def _numbers(kind: Devices, root: Path) -> list[Path]:
    files = [
        path for path in root.glob(kind.files) if path.name != "gpu_id" or path.read_text().strip() not in ("", "0")
    ]
    return sorted(files)
