"""Whether parameters still lie in their flat buffer. One that was moved comes back with the values that it has now.

`model.to(...)`, `share_memory()`, `vector_to_parameters` and `p.data = ...` give a parameter other memory. The
optimizer would go on with what is in the buffer, and the model with the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.parallel.zero.live import LiveBucket, alone


class Residence:
    """The addresses of the parameters of some buckets."""

    def __init__(self, buckets: Sequence[LiveBucket]) -> None:
        has_memory = (bucket for bucket in buckets if type(bucket.values) is Tensor)
        self._places = [(bucket, position) for bucket in has_memory for position in range(len(bucket.parameters))]
        self._note()

    def forget(self) -> None:
        """Look at every parameter the next time: one has taken the place of another."""
        self._addresses = []

    def _note(self) -> None:
        self._parameters = [bucket.parameters[position] for bucket, position in self._places]
        self._addresses = [*map(Tensor.data_ptr, self._parameters)]
        self._sizes = [*map(Tensor.numel, self._parameters)]

    def _is_as_noted(self) -> bool:
        """Whether no parameter was moved, cut or transposed."""
        found = self._parameters
        return (
            [*map(Tensor.data_ptr, found)] == self._addresses
            and [*map(Tensor.numel, found)] == self._sizes
            and all(map(Tensor.is_contiguous, found))
        )

    def find(self, name: str) -> tuple[LiveBucket, int]:
        """The bucket of a parameter, and its place there."""
        return next((bucket, position) for bucket, position in self._places if bucket.plan.slots[position].name == name)

    def admit(self, bucket: LiveBucket, position: int, parameter: Tensor) -> nn.Parameter:
        """The parameter, unless it does not fit the place that it is to have."""
        slot, dtype = bucket.plan.slots[position], bucket.values.dtype
        is_fit = tuple(parameter.shape) == slot.shape and parameter.dtype == dtype and not parameter.is_meta
        if not is_fit or type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
            raise UsageError(
                f"'{slot.name}' has become a {_words(parameter.dtype, tuple(parameter.shape))} on {parameter.device}; "
                f"its engine trains a {_words(dtype, slot.shape)}: change it back, or make a new engine of "
                "engine.module. The dtype of a model in training is set by bf16 or fp16 in the configuration"
            )
        if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
            raise UsageError(
                f"'{slot.name}' was replaced by one that needs no gradient, and its engine trains it: let it require "
                "one, or make a new engine of engine.module"
            )
        return parameter

    def restore(self) -> bool:
        """Bring every parameter back that was moved, or say which cannot be; returns whether one has new values."""
        if self._is_as_noted():
            return False
        has_new = False
        for bucket, position in self._places:
            parameter, slot = bucket.parameters[position], bucket.plan.slots[position]
            place = bucket.values[slot.start : slot.stop].view(slot.shape)
            is_same = parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape
            if not is_same or not parameter.is_contiguous():
                self.admit(bucket, position, parameter)
                if parameter.is_shared():
                    warn_once(
                        f"'{slot.name}' was put into shared memory, perhaps on its way to another process, and others "
                        "may be. They are trained in the memory of their engine: what is shared stays as it is now",
                        key="parameters in shared memory",
                    )
                value = parameter.detach().to(place.device, copy=True)  # it may be a part of the buffer, transposed
                has_new |= not torch.equal(value, place)
                place.copy_(value)
                parameter.data = alone(place)
        self._note()
        return has_new


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} tensor of shape {list(shape)}"
