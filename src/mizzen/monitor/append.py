"""A file that grows by whole lines: a killed run keeps every line that was written, and a resumed one goes on below.

Nothing is held back in the process. What must survive a crash of the machine belongs to `files.py`.
"""

import os
from pathlib import Path


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
