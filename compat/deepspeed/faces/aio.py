"""Handles that read and write tensors of the host or of a device in files, now or while a program goes on."""

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.errors import FileError, UsageError
from mizzen.offload.direct_files import ALIGNMENT, DirectFile, aligned
from mizzen.offload.tier import host_memory
from mizzen.offload.transfers import BlockTransfer, Transfers

MOST_THREADS: Final = 16
"""Handles are made with queues of 128 by default; each place in a queue would be a thread here."""


class aio_handle:  # noqa: N801  (a name that scripts call)
    """Reads and writes tensors with threads of its own; `wait` ends all that was started since the last one."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if min(block_size, queue_depth, intra_op_parallelism) < 1:
            raise UsageError(f"aio_handle({block_size}, {queue_depth}, ..., {intra_op_parallelism}): use 1 or more")
        self._block, self._depth, self._parallelism = block_size, queue_depth, intra_op_parallelism
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._transfers = Transfers(min(queue_depth * intra_op_parallelism, MOST_THREADS), name="aio_handle")
        self._started: list[tuple[BlockTransfer, Callable[[], None]]] = []
        self._locked: dict[int, Tensor] = {}

    def get_block_size(self) -> int:
        """Bytes of one read or write, as given."""
        return self._block

    def get_queue_depth(self) -> int:
        """Reads and writes at once, as given."""
        return self._depth

    def get_single_submit(self) -> bool:
        """As given; it has no effect here."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As given; it has no effect here."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads for one tensor, as given."""
        return self._parallelism

    get_thread_count = get_intra_op_parallelism

    def get_alignment(self) -> int:
        """What place and length are best a multiple of."""
        return ALIGNMENT

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of the host with the dtype of another, in whole pages of its own, until it is freed."""
        found = host_memory(num_elem * example_tensor.element_size()).view(example_tensor.dtype)
        self._locked[found.data_ptr()] = found
        return found

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Let go of a tensor that `new_cpu_locked_tensor` has made; False when it has not."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Read into a tensor, and return 0."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write a tensor, and return 0."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    def pread(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Read into a tensor: 1 when it is done, or 0 when it has begun."""
        path = os.fspath(filename)
        if validate and file_offset + _bytes(buffer) > os.path.getsize(path):
            raise FileError(f"read {path}: it ends before byte {file_offset + _bytes(buffer):,}")
        return self._begin(buffer, path, file_offset, write=False, later=async_op)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, async_op: bool, file_offset: int = 0) -> int:
        """Write a tensor: 1 when it is done, or 0 when it has begun. Validated, it is read again and compared."""
        done = self._begin(buffer, os.fspath(filename), file_offset, write=True, later=async_op and not validate)
        if validate:
            self._compare(buffer, os.fspath(filename), file_offset)
        return 0 if async_op else done

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Read into a tensor, and return 1."""
        return self._begin(buffer, os.fspath(filename), file_offset, write=False, later=False)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor, and return 1."""
        return self._begin(buffer, os.fspath(filename), file_offset, write=True, later=False)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to read into a tensor, and return 0; it must not be used before `wait`."""
        return self._begin(buffer, os.fspath(filename), file_offset, write=False, later=True)

    def async_pwrite(
        self, buffer: Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Begin to write a tensor to a file, or to one that is open, and return 0; do not change it before `wait`."""
        number = filename if isinstance(filename, int) else fd
        path = os.readlink(f"/proc/self/fd/{number}") if number is not None else os.fspath(str(filename))
        return self._begin(buffer, path, file_offset, write=True, later=True)

    def wait(self) -> int:
        """Wait for all that was begun, raise the first thing that went wrong, and return how many there were."""
        started, self._started = self._started, []
        for transfer, _ in started:
            transfer.wait_for_end()
        for transfer, end in started:
            end()
            transfer.wait()
        return len(started)

    def _begin(self, buffer: Tensor, path: str, offset: int, *, write: bool, later: bool) -> int:
        if not buffer.is_contiguous():
            raise UsageError(f"{path}: a tensor that is not in one piece cannot be read or written")
        host = buffer.detach() if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        if write and host.device != buffer.device:
            host.copy_(buffer)
        file = DirectFile(path, write=write, mode=0o644)
        memory, block = _memory(host), aligned(self._block)

        def run(number: int) -> None:
            first = number * block
            part = memory[first : first + block]
            (file.write_from if write else file.read_into)(part, offset + first)

        transfer = self._transfers.start(-(-memory.nbytes // block), run)

        def end() -> None:
            file.close()
            if not write and host.device != buffer.device:
                buffer.copy_(host)

        if later:
            self._started.append((transfer, end))
            return 0
        transfer.wait_for_end()
        end()
        transfer.wait()
        return 1

    def _compare(self, buffer: Tensor, path: str, offset: int) -> None:
        found = torch.empty_like(buffer)
        self.sync_pread(found, path, offset)
        if not torch.equal(found.reshape(-1).view(torch.uint8), buffer.detach().reshape(-1).view(torch.uint8)):
            raise FileError(f"write {path}: what is in the file is not what was written")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _memory(host: Tensor) -> memoryview:
    if not host.numel():
        return memoryview(bytearray())
    whole: Any = host.reshape(-1).view(torch.uint8).numpy()
    return memoryview(whole)


class AsyncIo:
    """What `AsyncIOBuilder().load()` gives."""

    aio_handle = aio_handle

    def aio_read(
        self,
        buffer: Tensor,
        filename: str,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        """Read into a tensor with a handle for this one time, and return 0."""
        return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)

    def aio_write(
        self,
        buffer: Tensor,
        filename: str,
        block_size: int,
        queue_depth: int,
        single_submit: bool,
        overlap_events: bool,
        validate: bool,
    ) -> int:
        """Write a tensor with a handle for this one time, and return 0."""
        return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)

    def deepspeed_memcpy(self, dest: Tensor, src: Tensor) -> int:
        """Copy a tensor of the host into another, and return 0."""
        dest.copy_(src)
        return 0
