"""Memory of the device whose content is in host memory for a while, so that somebody else can have the device.

A storage is emptied, and later filled again with the bits that it had: every view of it is good again then, and nobody
has to know. While it is away it cannot be computed with, and torch itself would read whatever memory it meets: what
may be asked to do so calls `check_here` first. Memory that others may know under an address, as that of parameters
which are whole, is not emptied but given up, so that it lives for as long as anybody, such as a graph, needs it. Who
decides what leaves is `engine/states_away.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mizzen.accelerator.protocol import Accelerator
from mizzen.errors import UsageError
from mizzen.offload.tier import DeviceCopy, HostTier

WAY_OUT = "call engine.reload_states() first"


def is_away(tensor: Tensor) -> bool:
    """Whether the memory of a tensor has left the device."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def check_here(tensor: Tensor, what: str) -> None:
    """Refuse to compute with memory that has left the device."""
    if is_away(tensor):
        raise away_refusal(what)


def away_refusal(what: str) -> UsageError:
    """The error for whoever needs what is away."""
    return UsageError(f"{what} is away in host memory, where engine.offload_states() has put it: {WAY_OUT}")


class HostCopies:
    """Copies in host memory of storages that were emptied.

    Locked memory stays until `close`: to lock it again for each turn would take longer than the copies.
    """

    def __init__(self, accelerator: Accelerator, *, pin: bool) -> None:
        self.pin = pin
        self._device = accelerator.device().type
        self._tier = HostTier(accelerator, pin=pin)
        self._held: list[tuple[Tensor, Tensor]] = []
        """(all bytes of a storage that is empty, their copy)."""
        self._places: dict[int, Tensor] = {}
        """The memory of other copies, by its address."""

    def copy(self, title: str, tensors: Sequence[Tensor], *, non_blocking: bool = False) -> list[Tensor]:
        """Copies of tensors in host memory, or a tensor itself where it is not on the device.

        With `non_blocking` they have their content once the device has done its work until now.
        """
        seen, found = self._copied(title, tensors, non_blocking=non_blocking)
        self._places |= {place.untyped_storage().data_ptr(): place for _, place in found}
        return seen

    def take(self, title: str, tensors: Sequence[Tensor], *, non_blocking: bool = False) -> None:
        """Empty the memory of tensors, once it is copied."""
        found = self._copied(title, tensors, non_blocking=non_blocking)[1]
        for content, _ in found:
            content.untyped_storage().resize_(0)
        self._held += found

    def _copied(
        self, title: str, tensors: Sequence[Tensor], *, non_blocking: bool
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """For each tensor its content in host memory; (all bytes of a storage, their copy) for each storage of them."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        copies: list[DeviceCopy] = []
        addresses = [0 if tensor.is_meta else tensor.untyped_storage().data_ptr() for tensor in tensors]
        for address, tensor in zip(addresses, tensors, strict=True):
            if address not in found and self._is_movable(tensor):
                content = _bytes_of(tensor)
                place = self._tier.place(f"{title} {len(found)}", content)
                found[address] = content, place
                copies.append(self._tier.copy_out(place, content))
        self._wait(copies, non_blocking=non_blocking)  # whoever has this memory next writes to it after the copy
        pairs = zip(addresses, tensors, strict=True)
        seen = [_same_view(found[address][1], tensor) if address in found else tensor for address, tensor in pairs]
        return seen, list(found.values())

    @staticmethod
    def _wait(copies: Sequence[DeviceCopy], *, non_blocking: bool) -> None:
        """Let later work of the device wait, and the host too unless told not to."""
        for copy in copies:
            copy.wait_on_stream()
            if not non_blocking:
                copy.wait()

    def _is_movable(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device, in memory that torch may give back and take again."""
        storage = tensor.untyped_storage()
        return tensor.device.type == self._device and storage.nbytes() > 0 and storage.resizable()

    def bring(self, copies: Sequence[Tensor], *, non_blocking: bool = False) -> list[Tensor]:
        """What `copy` gave, in new memory of the device; what lay in one storage does so again."""
        device = self._tier.accelerator.device()
        addresses = [copy.untyped_storage().data_ptr() for copy in copies]
        here = dict.fromkeys(address for address in addresses if address in self._places)
        # All memory first: a device without room leaves everything as it is, for another try.
        found = {address: torch.empty_like(self._places[address], device=device) for address in here}
        moves = [self._tier.copy_in(new, self._places.pop(address)) for address, new in found.items()]
        self._wait(moves, non_blocking=non_blocking)
        pairs = zip(addresses, copies, strict=True)
        return [_same_view(found[address], copy) if address in found else copy for address, copy in pairs]

    def bring_back(self, *, non_blocking: bool = False) -> None:
        """Give every storage that was emptied its memory again, with the bits that it had."""
        copies = []
        while self._held:
            content, place = self._held[-1]
            content.untyped_storage().resize_(place.numel())
            copies.append(self._tier.copy_in(content, place))
            self._held.pop()  # not before: a device without room may have some for another try
        self._wait(copies, non_blocking=non_blocking)
        if not self.pin:
            self.close()

    def close(self) -> None:
        """Give the host memory back; what is away in it is lost."""
        self._tier.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _same_view(place: Tensor, tensor: Tensor) -> Tensor:
    """What of a copy a tensor is of the storage that was copied."""
    return place.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
