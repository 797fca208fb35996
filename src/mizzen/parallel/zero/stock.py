"""Memory for what is put together anew in every step, and the sums of gradients in it.

A GPU's allocator keeps what was freed. A CPU's gives large blocks back to the system, and then every page of the next
one costs a fault: a fifth of the time of a copy and more. So blocks on a CPU are kept here.
"""

import ctypes
import mmap

import torch
from torch import Tensor

from mizzen.offload.away import check_here
from mizzen.offload.tier import HUGE_PAGE


def new_block(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor without content; a large one on a CPU in huge pages where the system has them.

    A product with a matrix of a megabyte looks up hundreds of small pages, which takes a hundredth of its time.
    """
    block = torch.empty(numel, dtype=dtype, device=device)
    if type(block) is Tensor and device.type == "cpu" and "MADV_HUGEPAGE" in vars(mmap):
        begin = -(-block.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        length = (block.data_ptr() + block.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
        if length > 0:  # whether the system takes the advice makes no difference to what is computed
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE))
    return block


class Stock:
    """Flat tensors without content, to be taken and given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_kept = device.type == "cpu"
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of so many elements: a free block of about that size, or a new one in place of a smaller one."""
        if not self.is_kept or not numel:
            return torch.empty(numel, dtype=dtype, device=self.device)
        alike = sorted((block for block in self._free if block.dtype == dtype), key=Tensor.numel)
        block = next((block for block in alike if numel <= block.numel() <= 2 * numel), None)
        smaller = [block for block in alike if block.numel() < numel]
        gone = block if block is not None or not smaller else smaller[-1]
        self._free = [one for one in self._free if one is not gone]
        if block is None:
            block = new_block(numel, dtype, self.device)
        self._lent[block.data_ptr()] = block
        return block[:numel]

    def give(self, tensor: Tensor) -> None:
        """Nobody needs it any more. What was not taken from here is left alone."""
        block = self._lent.pop(tensor.data_ptr(), None)
        if block is not None:
            self._free.append(block)

    def drop_free(self) -> None:
        """Let go of blocks that nobody has taken."""
        self._free.clear()

    def note_addresses(self) -> None:
        """Blocks that were taken have come to other addresses."""
        self._lent = {block.data_ptr(): block for block in self._lent.values()}

    def clear(self) -> None:
        """Keep nothing."""
        self._free.clear()
        self._lent.clear()


class Sums:
    """Sums of gradients in one flat tensor. There is none before the first gradient comes."""

    def __init__(self, stock: Stock, count: int, dtype: torch.dtype, *, padding: int = 0) -> None:
        self.stock = stock
        self.count = count
        self.dtype = dtype
        self.padding = padding
        """Zeros behind the sums."""
        self.tensor: Tensor | None = None
        """Where they are; None before the first."""

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come since the last step, and there is no memory for one."""
        return self.tensor is None

    def place(self) -> Tensor:
        """Where the sums are to be, padding included; what is there has no meaning while there are none."""
        if self.tensor is None:
            self.tensor = self.stock.take(self.count + self.padding, self.dtype)
            if self.padding:
                self.tensor[self.count :] = 0
        check_here(self.tensor, "the gradient of this step so far")
        return self.tensor

    def read(self) -> Tensor:
        """The sums, padding included; zeros where none has come."""
        return self.place().zero_() if self.is_empty else self.place()

    def forget(self) -> None:
        """No gradient has ever come."""
        if self.tensor is not None:
            self.stock.give(self.tensor)
        self.tensor = None
