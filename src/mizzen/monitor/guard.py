"""What keeps an output that fails from ending the training: a full disk, a lost network, a closed terminal."""

from types import TracebackType
from typing import Self

from mizzen.errors import MissingExtra
from mizzen.log import get_logger


class Guard:
    """Around every use of one output. The first error there closes the guard, with a warning that names the output.

    Device values are read before it is entered: an error of the device is not one of the output. A package that is not
    installed is the user's to mend, so that error passes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, MissingExtra):
            return False
        self.is_open = False
        get_logger().warning(
            f"{self.name}: {type(error).__name__}: {error}; nothing more is written there, and training goes on"
        )
        return True
