"""Which cores a rank is bound to, as the words of numactl. Only `domains` and `physical` read the kernel's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mizzen.errors import UsageError

ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Domain:
    """A memory domain of a host, and the cores that are near to it; one without cores is fast memory."""

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
    """Refuse a second hand on the same wheel."""
    if "KMP_AFFINITY" in env:
        raise UsageError("--bind_cores_to_rank while KMP_AFFINITY is set: both would bind the same threads; unset it")


def numactl(cores: Sequence[int], near: Sequence[Domain]) -> tuple[str, ...]:
    """The words before a rank's command: its cores, and the memory of the one domain that holds them all."""
    home = [domain.number for domain in near if domain.cores and set(cores) <= set(domain.cores)]
    memory = ("-m", str(home[0])) if len(home) == 1 and len([domain for domain in near if domain.cores]) > 1 else ()
    return ("numactl", "-C", ",".join(map(str, cores)), *memory)


def domains(root: Path = ROOT) -> tuple[Domain, ...]:
    """The memory domains of this host."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        text = (folder / "cpulist").read_text().strip()
        found.append(Domain(int(folder.name.removeprefix("node")), _numbers(text)))
    return tuple(sorted(found, key=lambda domain: domain.number))


def physical(allowed: Sequence[int], root: Path = ROOT) -> tuple[int, ...]:
    """The cores among these that are not the second thread of another one."""
    seen: dict[str, int] = {}
    for core in sorted(allowed):
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        seen.setdefault(path.read_text().strip() if path.exists() else str(core), core)
    return tuple(sorted(seen.values()))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.partition("-") for part in text.split(",") if part]
    return tuple(core for first, _, last in parts for core in range(int(first), int(last or first) + 1))
