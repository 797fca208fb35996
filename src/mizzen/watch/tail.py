"""A file that grows by lines, read as it grows."""

import stat
from pathlib import Path
from typing import BinaryIO, Final

CHUNK: Final = 1 << 20
"""Bytes of one read, and so the longest line that is ever taken."""
KNOWN: Final = 64
"""Bytes before the place of reading that must still be there for a file to count as the same one."""


class Tail:
    """Remembers how far it has read. A last line without its end waits for it.

    A file that was emptied, or replaced by one that does not begin with what was read, is read from its start; a copy
    that was refreshed (as rsync does, by a new file under the old name) is read on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size = 0
        self._known = b""
        self._is_skipping = False

    @property
    def left(self) -> int:
        """Bytes that were there at the last look and are not read yet."""
        return max(0, self.size - self.offset)

    def read(self) -> list[bytes]:
        """The next whole lines, a chunk of them at most; none when there is nothing new."""
        try:
            found = self.path.stat()
            self.size = found.st_size
            if self.size == self.offset or not stat.S_ISREG(found.st_mode):  # a pipe would keep us waiting
                return []
            with self.path.open("rb") as file:
                if not self._is_same(file):
                    return []
                file.seek(self.offset)
                data = file.read(CHUNK)
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) < CHUNK:
                return []
            end, lines = len(data), []  # a line that no writer of ours makes: passed over, to its end
            self._is_skipping = True
        else:
            lines = data[:end].split(b"\n")[:-1]
            if self._is_skipping:
                lines, self._is_skipping = lines[1:], False
        self.offset += end
        self._known = (self._known + data[:end])[-KNOWN:]
        return lines

    def _is_same(self, file: BinaryIO) -> bool:
        """Whether the file still holds what was read last; otherwise it is read from its start, at the next look."""
        file.seek(self.offset - len(self._known))
        if file.read(len(self._known)) == self._known:
            return True
        self.offset, self._known, self._is_skipping = 0, b"", False
        return False
