"""Large copies from the device that leave the way free for others: little of them is under way at a time.

A device makes its copies of one direction one after the other, and goes on with those of one stream for as long as
there are any: whoever reads a number from the device meanwhile, such as a loss, waits for all of them. So what has time
is cut into pieces, and a thread starts a few of them at a time, and more when these are over: in between others have
their turn. Who needs a copy at once lets all that is left of it start.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import RLock, current_thread
from typing import Final, Protocol

import torch
from torch import Tensor

from mizzen.accelerator.protocol import Accelerator, Event, Stream

PIECE: Final = 1 << 28
"""Bytes that are copied at once: some milliseconds of most links. Smaller ones would come to wait for the interpreter,
which is busy with the forward and backward of the model."""
TOGETHER: Final = 3
"""Pieces that are started together."""
NAP: Final = 2e-4
"""Seconds until the thread looks again."""
THREAD: Final = "mizzen-copies"


class CopyUnderWay(Protocol):
    """A copy on its way."""

    @property
    def is_over(self) -> bool:
        """Whether the bytes have arrived."""

    def wait(self) -> None:
        """Let the host wait."""

    def wait_on_stream(self, stream: Stream | None = None) -> None:
        """Let later work of a stream wait."""


class PacedCopy:
    """A copy that a `Pacer` makes piece by piece."""

    def __init__(self, pacer: "Pacer", into: Tensor, source: Tensor, ready: Event) -> None:
        self._pacer = pacer
        self._pieces = deque(_pieces(into, source))
        self._ready = ready
        self._last: CopyUnderWay | None = None

    @property
    def is_started(self) -> bool:
        """Whether all pieces are on their way."""
        return not self._pieces

    @property
    def is_over(self) -> bool:
        """Whether all bytes have arrived."""
        return self.is_started and self._started.is_over

    def wait(self) -> None:
        """Let all of it start, and the host wait for it."""
        self._pacer.start(self)
        self._started.wait()

    def wait_on_stream(self, stream: Stream | None = None) -> None:
        """Let all of it start, and later work of a stream wait, the current one unless another is given."""
        self._pacer.start(self)
        self._started.wait_on_stream(stream)

    @property
    def _started(self) -> CopyUnderWay:
        if self._last is None:
            raise AssertionError("no piece of the copy was started")
        return self._last

    def start_piece(self, stream: Stream, copy: Callable[[Tensor, Tensor], CopyUnderWay]) -> CopyUnderWay:
        """Start the next piece, under the lock of the pacer. All pieces are in one stream: the last is over last."""
        if self._last is None:
            stream.wait_event(self._ready)
        self._last = copy(*self._pieces[0])
        self._pieces.popleft()
        return self._last


class Pacer:
    """Makes copies of one direction in their order, by a thread that begins with the first."""

    def __init__(
        self, accelerator: Accelerator, stream: Stream, copy: Callable[[Tensor, Tensor], CopyUnderWay]
    ) -> None:
        self._accelerator = accelerator
        self._stream = stream
        self._copy = copy
        self._waiting: deque[PacedCopy] = deque()
        self._held_back: deque[PacedCopy] = deque()
        """Those that begin later, after all that wait."""
        self._lock = RLock()
        self._thread: ThreadPoolExecutor | None = None

    def add(self, into: Tensor, source: Tensor) -> PacedCopy:
        """Copy a tensor, after the work that the current stream has now."""
        copy = PacedCopy(self, into, source, self._accelerator.current_stream().record_event())
        with self._lock:
            self._waiting.append(copy)
        self._wake()
        return copy

    def hold_back(self, into: Tensor, source: Tensor, *, is_first: bool = False) -> PacedCopy:
        """Copy a tensor once `begin` is called; what is to be the first comes before all that are held back yet."""
        copy = PacedCopy(self, into, source, self._accelerator.current_stream().record_event())
        with self._lock:
            if is_first:
                self._held_back.appendleft(copy)
            else:
                self._held_back.append(copy)
        return copy

    def begin(self) -> None:
        """Copy what was held back, after the work that the current stream has now."""
        with self._lock:
            if not self._held_back:
                return
            self._stream.wait_event(self._accelerator.current_stream().record_event())
            self._release()
        self._wake()

    def start(self, copy: PacedCopy | None = None) -> None:
        """Let a copy start now, with those before it; all of them, if none is given."""
        with self._lock:
            if copy is None or copy in self._held_back:
                self._release()
            while self._waiting if copy is None else not copy.is_started:
                self._start_piece()

    def _release(self) -> None:
        self._waiting.extend(self._held_back)
        self._held_back.clear()

    def _wake(self) -> None:
        if self._thread is None:
            index = self._accelerator.current_device()
            self._thread = ThreadPoolExecutor(1, THREAD, self._accelerator.set_device, (index,))
        self._thread.submit(self._work)

    def _start_piece(self) -> CopyUnderWay | None:
        with self._lock:
            if not self._waiting:
                return None
            first = self._waiting[0]
            started = first.start_piece(self._stream, self._copy)
            if first.is_started:
                self._waiting.popleft()
            return started

    def _work(self) -> None:
        """Start what waits, in the thread; what fails is raised to those who need the copy."""
        while started := [piece for _ in range(TOGETHER) if (piece := self._start_piece()) is not None]:
            while not started[-1].is_over:
                time.sleep(NAP)

    def close(self) -> None:
        """Let all that waits start, and end the thread."""
        self.start()
        thread, self._thread = self._thread, None
        if thread is not None:  # the collector of garbage may come here in the thread itself
            thread.shutdown(wait=not current_thread().name.startswith(THREAD))


def _pieces(into: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if not (into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype):
        yield into, source
        return
    size = max(1, PIECE // into.element_size())
    yield from zip(torch.split(into.view(-1), size), torch.split(source.view(-1), size), strict=True)
