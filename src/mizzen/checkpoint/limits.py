"""What values out of a checkpoint may cost: small files must not become large trees, nor small trees long waits.

[Note: values that share]
A list that holds another one twice, which holds another one twice, is small in memory and in a pickle. Walked, or
written as JSON, which knows no sharing, it has no end. Who walks such values counts what comes again.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

REPEATED: Final = 1_000_000
"""How many values that come again may be written again, all together."""
TEXT: Final = 16
"""So many characters of a text, or bytes, count as one value."""
EQUAL_HASHES: Final = 100
"""How many keys of one dict or set may have the same hash."""


class TooCostly(Exception):
    """A value that would take far more time or memory than its size; who reads it says where it is."""


class Repeats:
    """Counts what is visited again in one walk, with all that is in it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, int]] = {}
        self._left = REPEATED
        self._walked = 0

    def enter(self, value: object) -> int:
        """Begin with a value that holds others or is long; what is returned goes to `leave`."""
        _, size = self._known.get(id(value), (value, 0))
        self._left -= size
        if self._left < 0:
            raise TooCostly(f"values in it are shared: written out they are more than {REPEATED:,} values again")
        return self._walked

    def leave(self, value: object, entered: int) -> None:
        """The value is done with, and all that is in it."""
        self._walked += size_of(value)
        self._known[id(value)] = (value, self._walked - entered)  # the value is kept, so that its number stays its own


def size_of(value: object) -> int:
    """How many values a value counts for, without what is in those that it holds."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) // TEXT
    return 1 + (len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0)


def refuse_equal_hashes(keys: Iterable[Any]) -> None:
    """Raise where keys of a dict or set have one hash: to put a million of those into it takes days."""
    count = max(Counter(map(hash, keys)).values(), default=0)
    if count > EQUAL_HASHES:
        raise TooCostly(f"{count} keys of one dict or set have the same hash; at most {EQUAL_HASHES} are read")
