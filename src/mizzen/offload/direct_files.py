"""A file that is read and written at any place past the system's page cache (O_DIRECT), in any thread.

What is not aligned, and all of a file where the filesystem refuses O_DIRECT, goes through the page cache; that is said
once for a folder. A call that the system cuts short is continued; whatever cannot be is a `FileError` with file, place
and cause. Which bytes lie where is the business of those who call, and so is waiting for what was started elsewhere.
"""

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Final

from mizzen.errors import FileError
from mizzen.files import perform
from mizzen.log import warn_once

ALIGNMENT: Final = 4096
"""Place, length and address of what goes past the page cache are multiples of this; disks of 512 take it, too."""
REFUSALS: Final = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What systems say where they know no O_DIRECT."""
O_DIRECT: Final = vars(os).get("O_DIRECT", 0)
"""The flag of open(2); 0 on systems that have none."""


def aligned(count: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def address(view: memoryview) -> int:
    """Where a memory lies. A read-only one has no address that Python would tell, and counts as not aligned."""
    return 1 if view.readonly or not view.nbytes else ctypes.addressof(ctypes.c_char.from_buffer(view))


class DirectFile:
    """One file, open for reading and writing. Threads may read and write different places of it at once."""

    def __init__(
        self, path: str | Path, *, direct: bool = True, create: bool = True, write: bool = True, mode: int = 0o600
    ) -> None:
        self.path = Path(path)
        self.size = 0
        """The bytes that the file is known to have; `check` compares."""
        self._mode = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self._opening = threading.Lock()
        self._cached = self._direct = -1
        created = os.O_CREAT if create and write else 0
        if direct:
            self._direct = self._open_direct(created, mode)
        if self._direct < 0:
            self._cached = perform("open", self.path, os.open, self.path, self._mode | created, mode)

    @property
    def is_direct(self) -> bool:
        """Whether what is aligned goes past the page cache."""
        return self._direct >= 0

    def _open_direct(self, created: int, mode: int) -> int:
        if not O_DIRECT:
            self._say_refusal("this system has no O_DIRECT")
            return -1
        try:
            return perform("open", self.path, os.open, self.path, self._mode | created | O_DIRECT, mode)
        except FileError as error:
            if error.errno not in REFUSALS:
                raise
            self._say_refusal(str(error))
            return -1

    def _say_refusal(self, why: str) -> None:
        warn_once(
            f"{self.path.parent} takes no direct reads and writes ({why}): they go through the page cache, which costs "
            "memory and time",
            key=f"O_DIRECT {self.path.parent}",
        )

    def allocate(self, size: int) -> None:
        """Let the file have so many bytes at least, with room on the disk for all of them."""
        if size > self.size:
            self.check()  # a file that was cut off must not grow as if nothing were missing
            more = size - self.size
            perform("allocate", self.path, os.posix_fallocate, self._any(), self.size, more, needed=more)
            self.size = size

    def check(self) -> None:
        """Raise where somebody has removed the file or cut it off: what was written to it may be lost."""
        expected = self.size  # before the question: another thread may let the file grow meanwhile
        status = perform("stat", self.path, os.fstat, self._any())
        if not status.st_nlink:
            raise FileError(f"stat {self.path}: it was removed while it was in use; what it held cannot be relied on")
        if status.st_size < expected:
            raise FileError(
                f"stat {self.path}: it ends at byte {status.st_size:,}, not at {expected:,}: somebody has cut it off"
            )

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a memory with the bytes from a place on; that there are fewer is an error."""
        while view.nbytes:
            count = self._transfer("read", view, offset)
            if not count:
                raise FileError(
                    f"read {self.path} at byte {offset:,}: the file ends there, before {view.nbytes:,} more bytes"
                )
            view, offset = view[count:], offset + count

    def write_from(self, view: memoryview, offset: int) -> None:
        """Write all of a memory at a place."""
        while view.nbytes:
            count = self._transfer("write", view, offset)
            if not count:
                raise FileError(
                    f"write {self.path} at byte {offset:,}: the system took none of {view.nbytes:,} bytes, without a "
                    "reason"
                )
            view, offset = view[count:], offset + count

    def leave_cache(self) -> None:
        """Wait until all that was written is on the disk, and let the page cache forget the file."""
        perform("fsync", self.path, os.fsync, self._any())
        os.posix_fadvise(self._any(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _transfer(self, operation: str, view: memoryview, offset: int) -> int:
        """One call to the system; how many bytes it has read or written."""
        direct = self._direct
        if direct >= 0 and not (address(view) | offset | view.nbytes) % ALIGNMENT:
            try:
                return self._call(operation, direct, view, offset)
            except FileError as error:
                if error.errno not in REFUSALS:
                    raise
                # Some filesystems take the flag when a file is opened and refuse each call.
                self._say_refusal(str(error))
                self._direct = -1  # calls under way still have the descriptor, which stays open beside the other
                self._refused = direct
        return self._call(operation, self._through_cache(), view, offset)

    def _call(self, operation: str, descriptor: int, view: memoryview, offset: int) -> int:
        if operation == "read":
            return perform("read", self.path, os.preadv, descriptor, [view], offset, offset=offset)
        return perform("write", self.path, os.pwritev, descriptor, [view], offset, needed=view.nbytes, offset=offset)

    def _through_cache(self) -> int:
        if self._cached < 0:
            with self._opening:
                if self._cached < 0:
                    self._cached = perform("open", self.path, os.open, self.path, self._mode)
        return self._cached

    def _any(self) -> int:
        return self._direct if self._direct >= 0 else self._through_cache()

    _refused = -1
    """The descriptor of a direct file whose calls are refused."""

    def close(self) -> None:
        """Let it go; a second time does nothing."""
        descriptors = {self._direct, self._cached, self._refused} - {-1}
        self._direct = self._cached = self._refused = -1
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
