"""Threads that read and write: a transfer is cut into blocks, of which as many are under way as there are threads.

`os.preadv` and `os.pwritev` let go of the interpreter's lock, so that blocks of one transfer, and one transfer and the
next, overlap with each other and with whatever the rest of the process does. What a block does is the business of those
who start it.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from mizzen.errors import UsageError

MOST_THREADS: Final = 64
"""Threads that wait for a disk cost memory and turns of the interpreter; more of them have not been seen to help."""


class BlockTransfer:
    """Blocks that are read or written together. It is over when each of them is done, or one has failed."""

    def __init__(self, count: int, work: Callable[[int], None], after: "BlockTransfer | None" = None) -> None:
        self._count, self._work, self._after = count, work, after
        self._next = self._finished = 0
        self._error: BaseException | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    def wait_for_end(self) -> None:
        """Wait until nothing of it is under way any more, however it ends."""
        self._over.wait()

    def wait(self) -> None:
        """Wait until nothing of it is under way any more, and raise what has gone wrong with one of its blocks."""
        self.wait_for_end()
        if self._error is not None:
            raise self._error

    def _may_begin(self) -> bool:
        """Whether what it comes after is over, under the lock of the queue. It shares the fate of what has failed."""
        if self._after is not None:
            if not self._after.is_over:
                return False
            if self._after._error is not None:
                self._fail(self._after._error)
                self._finish(0)
            self._after = None
        return True

    def _claim(self) -> int | None:
        """The next block, under the lock of the queue; None when all are given out."""
        if self._next == self._count:
            return None
        self._next += 1
        return self._next - 1

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and give out no more blocks, under the lock of the queue."""
        self._error = self._error or error
        self._finished += self._count - self._next
        self._next = self._count

    def _finish(self, count: int = 1) -> None:
        """Count blocks that are through, under the lock of the queue. What they used may be let go after the last."""
        self._finished += count
        if self._finished == self._count:
            self._work = _nothing
            self._over.set()


def _nothing(_: int) -> None: ...


class _Queue:
    """What the threads share; the pool itself they must not keep alive."""

    def __init__(self) -> None:
        self.waiting: deque[BlockTransfer] = deque()
        self.changed = threading.Condition()
        self.is_closed = False
        self.threads: list[threading.Thread] = []

    def serve(self) -> None:
        while True:
            with self.changed:
                claimed = self._claim()
                while claimed is None:
                    if self.is_closed:
                        return
                    self.changed.wait()
                    claimed = self._claim()
            transfer, block = claimed
            error: BaseException | None = None
            try:
                transfer._work(block)
            except BaseException as caught:  # noqa: BLE001  # whoever waits for the transfer gets it
                error = caught
            with self.changed:
                if error is not None:
                    transfer._fail(error)
                transfer._finish()
                if transfer.is_over and self.waiting:
                    self.changed.notify_all()  # what comes after it may begin
            del transfer, claimed, error

    def _claim(self) -> tuple[BlockTransfer, int] | None:
        """The next block of the first transfer that may begin; those that have none left leave the queue."""
        for place, transfer in enumerate(self.waiting):
            if transfer._may_begin():
                block = transfer._claim()
                if block is not None:
                    return transfer, block
                del self.waiting[place]
                self.changed.notify_all()  # others may have waited for one that has failed
                return self._claim()
        return None

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            for transfer in self.waiting:
                transfer._fail(UsageError("the threads that read and write were stopped before this transfer was over"))
                transfer._finish(0)
            self.waiting.clear()
            self.changed.notify_all()
        if threading.current_thread() in self.threads:
            return  # the collector of garbage came here in one of them, and the others may wait for it
        for thread in self.threads:
            thread.join()
        self.threads.clear()


class Transfers:
    """A pool of threads, which start with the first transfer. Transfers begin in the order in which they were given."""

    def __init__(self, threads: int, *, name: str = "mizzen-io") -> None:
        if threads < 1:
            raise UsageError(f"{threads} threads cannot read or write: use at least 1")
        self.threads = min(threads, MOST_THREADS)
        self._name = name
        self._queue = _Queue()
        self.close = weakref.finalize(self, self._queue.close)
        """Let blocks that are under way end, fail what has not begun, and stop the threads; again does nothing."""

    def start(self, count: int, work: Callable[[int], None], *, after: BlockTransfer | None = None) -> BlockTransfer:
        """Call `work(0)` to `work(count - 1)` in the threads, in any order; what they raise, `wait` raises.

        Given `after`, none of them is called before that transfer is over, and none at all if it fails.
        """
        transfer = BlockTransfer(count, work, after) if count else BlockTransfer(1, _nothing, after)
        queue = self._queue
        with queue.changed:
            if queue.is_closed:
                raise UsageError("the threads that read and write were stopped: nothing can be started any more")
            if not queue.threads:
                self._start_threads()
            queue.waiting.append(transfer)
            queue.changed.notify(min(max(count, 1), self.threads))
        return transfer

    def _start_threads(self) -> None:
        for number in range(self.threads):
            thread = threading.Thread(target=self._queue.serve, name=f"{self._name}-{number}", daemon=True)
            self._queue.threads.append(thread)
            thread.start()
