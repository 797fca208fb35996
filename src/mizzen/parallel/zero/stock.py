"""Memory for what is put together anew in every step.

A GPU's allocator keeps what was freed. A CPU's gives large blocks back to the system, and then every page of the next
one costs a fault: a fifth of the time of a copy and more. So blocks on a CPU are kept here.
"""

import torch
from torch import Tensor


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
            block = torch.empty(numel, dtype=dtype, device=self.device)
        self._lent[block.data_ptr()] = block
        return block[:numel]

    def give(self, tensor: Tensor) -> None:
        """Nobody needs it any more. What was not taken from here is left alone."""
        block = self._lent.pop(tensor.data_ptr(), None)
        if block is not None:
            self._free.append(block)

    def clear(self) -> None:
        """Keep nothing."""
        self._free.clear()
        self._lent.clear()
