"""Which hosts a job uses, and which devices and cores of each: the hostfile, the filters, Slurm's lists, numactl.

Parsing is pure. Only `find_devices`, `count_devices`, `numa_nodes` and `physical` look at this machine.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

from mizzen.accelerator.registry import get_accelerator
from mizzen.environment import Switches
from mizzen.errors import UsageError
from mizzen.wording import and_more

NAME: Final = re.compile(
    r"(?=[A-Za-z0-9])[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*(?<=[A-Za-z0-9])"
)
USER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
LONGEST: Final = 253
"""Letters of a host's name."""
LOCAL: Final = "localhost"
SLOTS: Final = re.compile(r"slots=(\d+)", re.ASCII)
IGNORED: Final = re.compile(r"max[-_]slots=\d+", re.ASCII)
"""What Open MPI's own hostfiles add to a line."""
ROOT: Final = Path("/")
MOST: Final = 9_999
"""Slots that a host may have; a larger number is a slip of the hand."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and the numbers of the devices that are used there: one rank for each."""

    name: str
    slots: tuple[int, ...]
    user: str = ""
    """Whom to log in as there; empty leaves that to ssh."""

    @property
    def login(self) -> str:
        """The host as ssh is told of it: `user@name`, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def is_ipv6(self) -> bool:
        """Whether it is named by an address with colons, which some programs take for something else."""
        return ":" in self.name

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.is_ipv6 else self.name
        return f"{name}:{','.join(map(str, self.slots))}"


Hosts = tuple[Host, ...]


def parse_hostfile(text: str, path: str) -> Hosts:
    """The hosts of a file whose lines are `name slots=N` or `user@name slots=N`; `#` starts a comment."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _parse_line(words, where)
        if host.name in hosts:
            raise UsageError(f"{where}: host {host.name!r} is there twice: give it one line with all its slots")
        hosts[host.name] = host
    if not hosts:
        raise UsageError(f"{path}: no host in it: write one `name slots=N` per line, or leave the file out")
    return tuple(hosts.values())


def is_number(word: str) -> bool:
    """Whether a word is a whole number that a device, a rank or a host may have."""
    return word.isascii() and word.isdigit() and len(word) <= 9


def _parse_line(words: Sequence[str], where: str) -> Host:
    word, *rest = words
    user, at, given = word.rpartition("@")
    name = _host_name(given)
    if name is None:
        raise UsageError(
            f"{where}: {given!r} is no host name: letters, digits, '_' and '-', in parts of at most 63 with one '.' "
            "between two of them, make one, and so does an IPv6 address"
        )
    if at and not USER.fullmatch(user):
        raise UsageError(f"{where}: {user!r} is no name of a user: write user@host, or leave the user to ssh")
    counts = [match for word in rest if (match := SLOTS.fullmatch(word))]
    others = [word for word in rest if not SLOTS.fullmatch(word) and not IGNORED.fullmatch(word)]
    if len(counts) != 1 or others:
        raise UsageError(f"{where}: {' '.join(words)!r} is not `name slots=N`")
    count = int(counts[0][1]) if is_number(counts[0][1]) else MOST + 1
    if count > MOST:
        raise UsageError(f"{where}: slots of {name} are above {MOST:,}: write how many devices the host has")
    if count < 1:
        raise UsageError(f"{where}: slots={count}: a host without slots has no part in a job; leave the line out")
    return Host(name, tuple(range(count)), user)


def _host_name(word: str) -> str | None:
    """A name, or an IPv6 address with or without brackets, as it is known from here on."""
    if NAME.fullmatch(word) and len(word) <= LONGEST:
        return word
    inside = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    try:
        return str(ipaddress.IPv6Address(inside)) if "%" not in inside else None
    except ValueError:
        return None


def select(hosts: Hosts, include: str = "", exclude: str = "") -> Hosts:
    """The hosts and slots that a filter leaves: `host[:slot,slot]@host`, in the order of the hosts."""
    if include and exclude:
        raise UsageError(f"--include {include!r} and --exclude {exclude!r} together: say which, or say which not")
    if not include and not exclude:
        return hosts
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = _parse_filter(option, text, hosts)
    if include:
        left = (replace(host, slots=named[host.name]) for host in hosts if host.name in named)
    else:
        kept = {host.name: set(host.slots).difference(named.get(host.name, ())) for host in hosts}
        left = (replace(host, slots=tuple(slot for slot in host.slots if slot in kept[host.name])) for host in hosts)
    chosen = tuple(host for host in left if host.slots)
    if not chosen:
        raise UsageError(f"{option} {text!r} leaves no slot of {_names(hosts)}")
    return chosen


def _parse_filter(option: str, text: str, hosts: Hosts) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, slots = _split(part.strip())
        if name not in known:
            raise UsageError(f"{option} {text!r}: unknown host {name!r}; known: {_names(hosts)}")
        wanted = _slots(option, text, slots) if colon else known[name].slots
        for slot in wanted:
            if slot not in known[name].slots:
                raise UsageError(f"{option} {text!r}: {name} has no slot {slot}; it has {and_more(known[name].slots)}")
        named.setdefault(name, set()).update(wanted)
    return {name: tuple(sorted(slots)) for name, slots in named.items()}


def _split(word: str) -> tuple[str, str, str]:
    """A host's name, and its slots after a colon; an IPv6 address with slots stands in brackets, as in [::1]:0,2."""
    address, bracket, rest = word.partition("]")
    if bracket and (name := _host_name(address + bracket)):
        return name, rest[:1], rest[1:]
    if word.count(":") > 1 and (name := _host_name(word)):
        return name, "", ""
    return word.partition(":")


def _slots(option: str, text: str, slots: str) -> list[int]:
    words = slots.split(",")
    for word in words:
        if not is_number(word.strip()):
            raise UsageError(f"{option} {text!r}: {word!r} is no slot number: write host:0,2@host")
    return [int(word) for word in words]


def limit(hosts: Hosts, nodes: int | None = None, devices: int | None = None) -> Hosts:
    """The first so many hosts, and of each the first so many slots."""
    if nodes is not None and nodes > len(hosts):
        raise UsageError(f"--num_nodes {nodes}: there are {len(hosts)} hosts, {_names(hosts)}")
    chosen = hosts[:nodes]
    for host in chosen:
        if devices is not None and devices > len(host.slots):
            raise UsageError(f"--num_gpus {devices}: {host.name} has {len(host.slots)} slots")
    return tuple(replace(host, slots=host.slots[:devices]) for host in chosen)


def visible(variable: str, value: str) -> tuple[int, ...]:
    """The device numbers of a variable such as CUDA_VISIBLE_DEVICES."""
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not words:
        raise UsageError(f"{variable} is empty, which hides every device: unset it, or name devices as in 0,1")
    if not all(map(is_number, words)):
        raise UsageError(f"{variable}={value}: only numbers can be given out to ranks: write 0,1 instead of names")
    return tuple(dict.fromkeys(int(word) for word in words))


def expand(names: str) -> tuple[str, ...]:
    """The names behind Slurm's `gpu[03-05,9],login1`."""
    ranges = re.findall(r"\[([^\[\]]*)\]", names)
    if len(ranges) != names.count("[") or len(ranges) != names.count("]") or not all(map(_is_range, ranges)):
        raise UsageError(f"Slurm's list of nodes {names!r} cannot be read: write it as in gpu[03-05,9],login1")
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names)
    return tuple(name for part in parts for name in _expand(part.strip()))


def _is_range(text: str) -> bool:
    """Whether this is what stands between brackets: numbers, and pairs of them in order."""
    pairs = [part.partition("-") for part in text.split(",")]
    return all(
        is_number(first) and (not dash or (is_number(last) and int(first) <= int(last))) for first, dash, last in pairs
    )


def _expand(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [[piece] if place % 2 == 0 else list(_range(piece)) for place, piece in enumerate(pieces)]
    yield from ("".join(choice) for choice in product(*choices))


def _range(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            yield part
        else:
            yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def in_allocation(env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of the Slurm allocation that this process is in; none outside of one."""
    return expand(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or "")


def _names(hosts: Hosts) -> str:
    return and_more((host.name for host in hosts), 16)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device that Linux lists."""

    name: str
    variable: str
    """The variable that shows only some of them to a process."""
    files: str
    prefixes: tuple[str, ...]
    """Variables that go along with a job."""


KINDS: Final = (
    DeviceKind("cuda", "CUDA_VISIBLE_DEVICES", "dev/nvidia[0-9]*", ("NCCL_", "CUDA_")),
    DeviceKind(
        "cuda", "HIP_VISIBLE_DEVICES", "sys/class/kfd/kfd/topology/nodes/*/gpu_id", ("RCCL_", "HSA_", "MIOPEN_")
    ),
    DeviceKind("xpu", "ZE_AFFINITY_MASK", "nothing", ("CCL_", "FI_", "I_MPI_", "ZE_")),
)


def find_devices(env: Mapping[str, str], root: Path = ROOT) -> DeviceKind | None:
    """The kind that this host has, or that the environment names; None means the processor."""
    asked = Switches.read(env).accelerator
    for kind in KINDS:
        if asked == kind.name == "xpu" or (asked in (None, kind.name) and _device_files(kind, root)):
            return kind
    return None


def count_devices(env: Mapping[str, str], root: Path = ROOT) -> int:
    """How many ranks this host is for; torch is asked where the kernel does not list the devices."""
    kind = find_devices(env, root)
    if kind is not None and (found := _device_files(kind, root)):
        return len(found)
    return get_accelerator().device_count()


def _device_files(kind: DeviceKind, root: Path) -> list[Path]:
    found = root.glob(kind.files)
    return sorted(path for path in found if path.name != "gpu_id" or path.read_text().strip() not in ("", "0"))


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of a host, and the cores that are near to it; one without cores is fast memory."""

    number: int
    cores: tuple[int, ...]


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers of `1,3-5,7`: ranges ascend and do not overlap."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        words = (first, last) if dash else (first, first)
        if not all(word.isascii() and word.isdigit() for word in words):
            raise UsageError(f"--bind_core_list {text!r}: {part!r} is no core and no range: write 0,2-5,7")
        low, high = int(words[0]), int(words[1])
        if high < low or (found and low <= found[-1]):
            raise UsageError(f"--bind_core_list {text!r}: {part!r} is out of order: ranges ascend and do not overlap")
        found += range(low, high + 1)
    return tuple(found)


def shares(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Equal parts, in order; what is left over stays unused."""
    each = len(cores) // ranks
    if each < 1:
        raise UsageError(f"--bind_cores_to_rank: {len(cores)} cores for {ranks} ranks: start fewer, or name more cores")
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def check_affinity(env: Mapping[str, str]) -> None:
    """Refuse to bind threads that another setting binds already."""
    if "KMP_AFFINITY" in env:
        raise UsageError("--bind_cores_to_rank while KMP_AFFINITY is set: both would bind the same threads; unset it")


def numactl(cores: Sequence[int], near: Sequence[NumaNode]) -> tuple[str, ...]:
    """The words before a rank's command: its cores, and the memory of the one NUMA node that holds them all."""
    home = [node.number for node in near if node.cores and set(cores) <= set(node.cores)]
    memory = ("-m", str(home[0])) if len(home) == 1 and len([node for node in near if node.cores]) > 1 else ()
    return ("numactl", "-C", ",".join(map(str, cores)), *memory)


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """The NUMA nodes of this host."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        text = (folder / "cpulist").read_text().strip()
        found.append(NumaNode(int(folder.name.removeprefix("node")), _core_numbers(text)))
    return tuple(sorted(found, key=lambda node: node.number))


def physical(allowed: Sequence[int], root: Path = ROOT) -> tuple[int, ...]:
    """The cores among these that are not the second thread of another one."""
    seen: dict[str, int] = {}
    for core in sorted(allowed):
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        seen.setdefault(path.read_text().strip() if path.exists() else str(core), core)
    return tuple(sorted(seen.values()))


def _core_numbers(text: str) -> tuple[int, ...]:
    parts = [part.partition("-") for part in text.split(",") if part]
    return tuple(core for first, _, last in parts for core in range(int(first), int(last or first) + 1))
