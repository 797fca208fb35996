"""What every output of a run shares: files that grow by lines, a guard around failures, optional packages.

Nothing is held back in the process. What must survive a crash of the machine belongs to `files.py`.
"""

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from mizzen.errors import MissingExtra
from mizzen.log import get_logger


class LineFile:
    """An open file, and its folder made if absent. `header` is the first line of a new one."""

    def __init__(self, path: str | Path, *, header: str | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        if size and not _ends_a_line(path):
            self._write(b"\n")  # a run that died on a full disk has left half a line; it stays alone on its own
        if not size and header is not None:
            self.append(header)

    def append(self, line: str) -> None:
        """Write one line, in one call to the system wherever it takes it whole."""
        self._write(f"{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class OutputGuard:
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


def require(package: str, *, extra: str, purpose: str) -> ModuleType:
    """The module of an optional package; `purpose` is the key that asked for it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # it is there and lacks something of its own, which its own error names
        raise MissingExtra(package, extra=extra, purpose=purpose) from error
