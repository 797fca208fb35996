"""Numbers and lists as people read them: byte sizes, durations, counts, names with "and N more".

Messages, reports and pages take their words from here, so that the same thing reads alike everywhere.
"""

from collections.abc import Iterable, Sequence


def byte_size(size: float) -> str:
    """A size in the largest unit that leaves a number of at least 1: `512 B`, `1.5 GiB`, `-20.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def gib(size: float | None) -> str:
    """A size in GiB whatever it is, for columns and lines that are compared; `unknown` for None."""
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """A time in the largest unit that leaves a number of at least 1: `42 s`, `1.5 min`, `3.0 h`, `2.1 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 host`, `2 hosts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def and_more(items: Iterable[object], most: int = 8, *, separator: str = ", ") -> str:
    """The first `most` items, and how many there are beside: `a, b and 3 more`. Empty where there are none."""
    texts = [str(item) for item in items]
    shown = separator.join(texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"


def rank_in_role(rank: int, role: str) -> str:
    """A rank by number, and who it is where that is known: `rank 3 (stage 1 of 2, tensor rank 1)`."""
    return f"rank {rank} ({role})" if role else f"rank {rank}"


def rank_list(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks by number: `rank 2`, or `ranks 0, 1, 2 and 12 more`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {and_more(ranks, most)}"
