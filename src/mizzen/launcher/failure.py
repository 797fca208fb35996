"""How a rank ended, in numbers and in words. Pure."""

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SECONDARY: Final = re.compile(
    r"CommError|Connection (?:closed|reset) by peer|Broken pipe|DistNetworkError|DistBackendError|ncclRemoteError"
)
"""What the last line of a rank says that died because another one did."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank that was not meant to end so."""

    rank: int
    host: str
    status: int
    """As Python gives it: an exit code, or minus the number of a signal."""
    trace: str = ""
    resident: int = 0
    """Bytes of memory that it was last seen with."""
    cause: str = ""
    """What is known beside the status: a hang, with who is where."""
    number: int = 1
    """Which failure of the job this is, counted from 1."""

    @property
    def code(self) -> int:
        """The exit code of the launcher."""
        return 128 - self.status if self.status < 0 else self.status

    @property
    def is_secondary(self) -> bool:
        """Whether another rank is likely to have failed first."""
        last = self.trace.rstrip().splitlines()[-1:]
        return self.status > 0 and any(SECONDARY.search(line) for line in last)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self._end()}"

    def _end(self) -> str:
        if self.cause:
            return self.cause
        if self.status >= 0:
            return f"ended with exit code {self.status}"
        name = signal.Signals(-self.status).name if -self.status in signal.valid_signals() else f"signal {-self.status}"
        said = f"was ended by signal {-self.status} ({name})"
        if self.status == -signal.SIGKILL:
            size = f"; it was last seen with {self.resident / 2**30:.2f} GiB resident" if self.resident else ""
            said += f": most often the kernel, because the host was out of memory{size}"
        if self.status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT):
            said += ": a crash in compiled code"
        return said


def first_of(failures: Iterable[Failure]) -> Failure:
    """Which of several failures is the cause: not one that only tells of another, and a signal before an error."""
    return min(failures, key=lambda failure: (failure.is_secondary, failure.status > 0, failure.rank))
