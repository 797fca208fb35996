"""Cores and memory near them, as the words of numactl: mizzen's launcher binds ranks in this way."""

import shutil
from collections.abc import Sequence

from mizzen.environment import environ
from mizzen.errors import UsageError
from mizzen.launcher.hosts import check_affinity, numa_nodes, numactl, parse_cores, physical, shares


def get_numa_cores() -> list[list[int]]:
    """The cores of each domain of memory; none where the kernel does not say."""
    return [list(domain.cores) for domain in numa_nodes()]


def check_for_numactl_pkg() -> bool:
    """Whether numactl is installed."""
    return shutil.which("numactl") is not None


def parse_range(rng: str) -> range:
    """One number, or two with a dash between them."""
    first, _, last = rng.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        raise UsageError(f"{rng!r} is no range: give a number, or two with a dash between them") from None
    if not found:
        raise UsageError(f"{rng!r} is no range: its end is before its start")
    return found


def parse_range_list(range_str: str) -> list[int]:
    """Ranges with commas between them, each beginning behind the one before."""
    found: list[int] = []
    for word in range_str.split(","):
        numbers = parse_range(word)
        if found and numbers[0] <= found[-1]:
            raise UsageError(f"{range_str!r}: {word!r} begins before the range in front of it ends")
        found += numbers
    return found


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[list[str], int]:
    """(the words in front of a rank's program, the number of its cores)."""
    check_affinity(environ())
    cores: Sequence[int] = parse_cores(bind_core_list) if bind_core_list is not None else _all_cores()
    mine = shares(cores, num_local_procs)[local_rank]
    return list(numactl(mine, numa_nodes())), len(mine)


def _all_cores() -> tuple[int, ...]:
    return physical(sorted({core for cores in get_numa_cores() for core in cores}))
