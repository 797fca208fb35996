"""What this machine has for training, what it lacks, and how to get it: the values behind `mizzen report`.

Every probe gives findings, or one finding that names why it could not. Nothing is installed, compiled or left behind;
printing is the command line's business. How fast the network is, `bench.py` measures.
"""

import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mizzen.accelerator import host
from mizzen.accelerator.registry import get_accelerator, survey
from mizzen.wording import byte_size

State = Literal["ok", "absent", "problem"]
STYLES: Final[dict[State, str]] = {"ok": "", "absent": "dim", "problem": "yellow"}
DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}
GPU_NODES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
SHARED_MEMORY: Final = Path("/dev/shm")
INFINIBAND: Final = Path("/sys/class/infiniband")
NETWORK_REMEDY: Final = (
    "make the host's own name resolve, or name an interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "
    "NCCL_DEBUG=INFO says more"
)
GIB: Final = 2**30
SMALLEST_SHARED_MEMORY: Final = 512 * 2**20
FEWEST_OPEN_FILES: Final = 1024
PROBE_ERRORS: Final = (OSError, RuntimeError, ImportError, ValueError, AttributeError, AssertionError, psutil.Error)
"""What a missing file, library, driver or permission raises; torch asserts on what it was built without."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `absent` is an optional thing that is not here; a `problem` will be felt."""

    name: str
    value: str
    state: State = "ok"
    remedy: str = ""
    """What to do about it; empty when there is nothing to do."""
    amount: int | None = None
    """The value as a plain number (bytes, files, cores), for programs."""


@dataclass(frozen=True, slots=True)
class Package:
    """Something optional: the names it is published under, what it is for, and how to get it."""

    distributions: tuple[str, ...]
    purpose: str
    remedy: str


PACKAGES: Final = (
    Package(("tensorboard",), "the tensorboard monitor writes with it", "pip install 'mizzen[tensorboard]'"),
    Package(("wandb",), "the wandb monitor writes with it", "pip install 'mizzen[wandb]'"),
    Package(("comet-ml",), "the comet monitor writes with it", "pip install 'mizzen[comet]'"),
    Package(("mpi4py",), "jobs that mpirun starts are discovered with it", "pip install 'mizzen[mpi]'"),
    Package(("transformers",), "its models and Trainer", "pip install 'mizzen[clients]'"),
    Package(("accelerate",), "its loop, and the Trainer of transformers", "pip install 'mizzen[clients]'"),
    Package(("peft",), "its adapters", "pip install 'mizzen[all-clients]'"),
    Package(("lightning", "pytorch-lightning"), "its Trainer", "pip install 'mizzen[all-clients]'"),
    Package(("torchao",), "training in float8", "pip install torchao"),
    Package(
        ("triton", "pytorch-triton", "triton-rocm", "triton-windows"), "fused kernels; GPU builds of torch have it", ""
    ),
)


@dataclass(frozen=True, slots=True)
class Chapter:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    chapters: tuple[Chapter, ...]

    def problems(self) -> tuple[Finding, ...]:
        """Findings that will be felt in training."""
        return tuple(each for chapter in self.chapters for each in chapter.findings if each.state == "problem")

    def remedies(self) -> tuple[Finding, ...]:
        """Findings for which there is something to do."""
        return tuple(each for chapter in self.chapters for each in chapter.findings if each.remedy)

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Chapter -> name -> finding, made of what JSON knows."""
        return {
            chapter.title: {(values := asdict(each)).pop("name"): values for each in chapter.findings}
            for chapter in self.chapters
        }


def collect() -> Report:
    """Ask everything. It takes a second or two: devices are opened and a collective is run on one rank."""
    chapters: dict[str, list[Finding]] = {}
    for title, probe in PROBES:
        chapters.setdefault(title, []).extend(_ask(probe))
    return Report(tuple(Chapter(title, tuple(findings)) for title, findings in chapters.items()))


def render(report: Report) -> RenderableType:
    """A table for every chapter, then what to do."""
    parts: list[RenderableType] = []
    for chapter in report.chapters:
        parts += [_table(chapter.title, [(each.name, each.value, each.state) for each in chapter.findings]), Text()]
    if report.remedies():
        parts.append(_table("what to do", _steps(report.remedies())))
    return Group(*parts)


def _steps(findings: tuple[Finding, ...]) -> list[tuple[str, str, State]]:
    """One row for each remedy, with all that it cures; what will be felt comes first."""
    cures: dict[tuple[State, str], list[str]] = {}
    for finding in sorted(findings, key=lambda each: each.state != "problem"):
        cures.setdefault((finding.state, finding.remedy), []).append(finding.name)
    return [(", ".join(names), remedy, state) for (state, remedy), names in cures.items()]


def _table(title: str, rows: list[tuple[str, str, State]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(min_width=22, overflow="fold")
    table.add_column(overflow="fold")
    for name, value, state in rows:
        table.add_row(Text(name), Text(value, style=STYLES[state]))
    return table


def _ask(probe: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """All findings of a probe; what it raises becomes the last of them."""
    found: list[Finding] = []
    try:
        found.extend(probe())
    except PROBE_ERRORS as error:
        name = probe.__name__.strip("_").replace("_", " ")
        found.append(Finding(name, f"unknown: {type(error).__name__}: {error}", "problem"))
    return found


def _versions() -> Iterator[Finding]:
    yield Finding("mizzen", _version("mizzen") or "a source tree, not installed")
    yield Finding("python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("system", platform.platform())
    yield Finding("torch", str(torch.__version__))
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    yield Finding("torch is built for", ", ".join(f"{name} {v}" for name, v in built.items() if v) or "the host only")


def _accelerators() -> Iterator[Finding]:
    for name, reason in survey().items():
        if reason is None:
            yield Finding(name, "can be used")
        elif name == "cuda" and any(node.exists() for node in GPU_NODES):
            yield Finding(name, f"a GPU is in this machine, but {reason}", "problem", reason)
        else:
            yield Finding(name, reason, "absent")


def _devices() -> Iterator[Finding]:
    accelerator = get_accelerator()
    count = accelerator.device_count()
    yield Finding("in use", f"{accelerator.name}: {count} ranks fit on this host", amount=count)
    for index in range(1 if accelerator.shares_host_memory else count):
        info, memory = accelerator.describe(index), accelerator.capacity(index)
        what = ", ".join(part for part in (info.name, info.architecture) if part)
        yield Finding(
            f"device {index}",
            f"{what}, {byte_size(memory.total)}, {byte_size(memory.available)} free",
            amount=memory.total,
        )
    for name, version in accelerator.describe().versions.items():
        yield Finding(name, version)
    yield Finding("computes in", ", ".join(name for name, dtype in DTYPES.items() if accelerator.supports(dtype)))


def _communication() -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding(
            "torch.distributed", "not in this torch", "problem", "install a torch built with USE_DISTRIBUTED=1"
        )
        return
    yield _collective("gloo", torch.device("cpu"))
    built = {
        "nccl": torch.distributed.is_nccl_available(),
        "xccl": torch.distributed.is_xccl_available(),
        "ucc": torch.distributed.is_ucc_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    yield Finding("others in this torch", ", ".join(name for name, here in built.items() if here) or "none")


def _communication_of_the_device() -> Iterator[Finding]:
    accelerator = get_accelerator()
    if torch.distributed.is_available() and accelerator.comm_backend != "gloo":
        yield _collective(accelerator.comm_backend, accelerator.device())


def _collective(backend: str, device: torch.device) -> Finding:
    """Sum a tensor over a group of one rank: the libraries load, the interface exists, the device takes part."""
    if torch.distributed.is_initialized():
        return Finding(backend, "not tried: this process has a process group already")
    try:
        torch.distributed.init_process_group(
            backend,
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
            device_id=None if device.type == "cpu" else device,
        )
        tensor = torch.full((4,), 3.0, device=device)
        torch.distributed.all_reduce(tensor)
        right = tensor.tolist() == [3.0] * 4
    except PROBE_ERRORS as error:
        return Finding(backend, f"does not work: {str(error).splitlines()[0]}", "problem", NETWORK_REMEDY)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return Finding(backend, "works") if right else Finding(backend, f"wrong sum: {tensor}", "problem", NETWORK_REMEDY)


def _packages() -> Iterator[Finding]:
    for package in PACKAGES:
        version = next(filter(None, map(_version, package.distributions)), None)
        if version:
            yield Finding(package.distributions[0], version)
        else:
            yield Finding(package.distributions[0], f"not here; {package.purpose}", "absent", package.remedy)


def _processor() -> Iterator[Finding]:
    usable, physical, logical = host.cores(), psutil.cpu_count(logical=False), psutil.cpu_count()
    text = f"{usable} for this process, of {physical or 'unknown'} physical and {logical or 'unknown'} logical"
    yield Finding("cores", text, amount=usable)
    yield Finding("NUMA nodes", str(host.numa_nodes()), amount=host.numa_nodes())


def _memory() -> Iterator[Finding]:
    memory, machine = host.capacity(), psutil.virtual_memory().total
    limit = f" (a container's limit; the machine has {byte_size(machine)})" if memory.total < machine else ""
    yield Finding(
        "memory", f"{byte_size(memory.total)}, {byte_size(memory.available)} free{limit}", amount=memory.total
    )


def _shared_memory() -> Iterator[Finding]:
    if not SHARED_MEMORY.exists():
        yield Finding("shared memory", f"no {SHARED_MEMORY} on this system", "absent")
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{byte_size(usage.total)}, {byte_size(usage.free)} free"
    if usage.free < SMALLEST_SHARED_MEMORY:
        remedy = (
            f"NCCL and data loader workers need {byte_size(SMALLEST_SHARED_MEMORY)} or more: docker run --shm-size=8g "
            f"or --ipc=host; mount -o remount,size=8G {SHARED_MEMORY}"
        )
        yield Finding("shared memory", text, "problem", remedy, usage.total)
    else:
        yield Finding("shared memory", text, amount=usage.total)


def _temporary_folder() -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
    free = shutil.disk_usage(folder).free
    few = free < GIB
    remedy = "free some, or set TMPDIR to a folder with space" if few else ""
    yield Finding("temporary folder", f"{folder}, {byte_size(free)} free", "problem" if few else "ok", remedy, free)


def _open_files() -> Iterator[Finding]:
    import resource  # absent on Windows, where the probe then says so

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("open files", "unlimited")
    elif soft < FEWEST_OPEN_FILES:
        remedy = "ranks and data loader workers hold many: ulimit -n 65536"
        yield Finding("open files", f"at most {soft}", "problem", remedy, soft)
    else:
        yield Finding("open files", f"at most {soft}", amount=soft)


def _locked_memory() -> Iterator[Finding]:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(each.name for each in INFINIBAND.iterdir()) if INFINIBAND.exists() else []
    yield Finding("InfiniBand", ", ".join(adapters) or "none", "ok" if adapters else "absent")
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "unlimited")
    elif adapters:
        remedy = "InfiniBand registers the memory that it sends: ulimit -l unlimited; docker run --ulimit memlock=-1"
        yield Finding("locked memory", f"at most {byte_size(soft)}", "problem", remedy, soft)
    else:
        yield Finding("locked memory", f"at most {byte_size(soft)}", amount=soft)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


PROBES: Final[tuple[tuple[str, Callable[[], Iterator[Finding]]], ...]] = (
    ("versions", _versions),
    ("accelerators", _accelerators),
    ("devices", _devices),
    ("communication", _communication),
    ("communication", _communication_of_the_device),
    ("optional packages", _packages),
    ("host", _processor),
    ("host", _memory),
    ("host", _shared_memory),
    ("host", _temporary_folder),
    ("limits", _open_files),
    ("limits", _locked_memory),
)
"""Every chapter and what fills it, in the order of the report."""
