"""Whether parameters still lie in their flat buffer. One that was moved comes back with the values that it has now.

`model.to(...)`, `share_memory()`, `vector_to_parameters` and `p.data = ...` give a parameter other memory. The
optimizer would go on with what is in the buffer, and the model with the other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.parallel.zero.gradients import Gradients
from mizzen.parallel.zero.live import LiveBucket, alone


class ParameterAddresses:
    """The addresses of the parameters of some buckets."""

    def __init__(
        self, buckets: Sequence[LiveBucket], parameters: dict[str, nn.Parameter], gradients: Gradients
    ) -> None:
        self.parameters = parameters
        self.gradients = gradients
        self.has_new_values = False
        """Whether one that was moved, or that has replaced another, has brought new values."""
        has_memory = (bucket for bucket in buckets if type(bucket.values) is Tensor)
        self._places = [(bucket, position) for bucket in has_memory for position in range(len(bucket.parameters))]
        self.note()

    def note(self) -> None:
        """Take the parameters to be where they should be."""
        self._watched = [bucket.parameters[position] for bucket, position in self._places]
        self._addresses = [*map(Tensor.data_ptr, self._watched)]
        self._sizes = [*map(Tensor.numel, self._watched)]

    def _is_as_noted(self) -> bool:
        """Whether no parameter was moved, cut or transposed."""
        found = self._watched
        return (
            [*map(Tensor.data_ptr, found)] == self._addresses
            and [*map(Tensor.numel, found)] == self._sizes
            and all(map(Tensor.is_contiguous, found))
        )

    def replace(self, name: str, parameter: Tensor) -> nn.Parameter:
        """Train another parameter in the place of one that is no longer in the model, from the next `restore` on."""
        named = {bucket.plan.slots[position].name: (bucket, position) for bucket, position in self._places}
        bucket, position = named[name]
        self._check(bucket, position, parameter)
        if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
            raise UsageError(
                f"'{name}' was replaced by one that needs no gradient, and its engine trains it: let it require one, "
                "or make a new engine of engine.module"
            )
        old = bucket.parameters[position]
        self.gradients.exchange(bucket, position, parameter)
        old.data = old.data.clone()
        self.parameters[name] = parameter
        self._addresses = []  # look at every parameter the next time
        return parameter

    def _check(self, bucket: LiveBucket, position: int, parameter: Tensor) -> None:
        """Refuse a parameter that does not fit the place that it is to have."""
        slot, dtype = bucket.plan.slots[position], bucket.values.dtype
        is_fit = tuple(parameter.shape) == slot.shape and parameter.dtype == dtype and not parameter.is_meta
        if not is_fit or type(parameter.data) is not Tensor or parameter.layout is not torch.strided:
            raise UsageError(
                f"'{slot.name}' has become a {_words(parameter.dtype, tuple(parameter.shape))} on {parameter.device}; "
                f"its engine trains a {_words(dtype, slot.shape)}: change it back, or make a new engine of "
                "engine.module. The dtype of a model in training is set by bf16 or fp16 in the configuration"
            )

    def restore(self) -> None:
        """Bring every parameter back that was moved, or say which cannot be."""
        if self._is_as_noted():
            return
        for bucket, position in self._places:
            parameter, slot = bucket.parameters[position], bucket.plan.slots[position]
            place = bucket.values[slot.start : slot.stop].view(slot.shape)
            is_same = parameter.data_ptr() == place.data_ptr() and parameter.shape == place.shape
            if not is_same or not parameter.is_contiguous():
                self._check(bucket, position, parameter)
                if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
                    warn_once(
                        f"'{slot.name}' was put into shared memory, perhaps on its way to another process, and others "
                        "may be. They are trained in the memory of their engine: what is shared stays as it is now",
                        key="parameters in shared memory",
                    )
                value = parameter.detach().to(place.device, copy=True)  # it may be a part of the buffer, transposed
                self.has_new_values |= not torch.equal(value, place)
                place.copy_(value)
                parameter.data = alone(place)
        self.note()


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} tensor of shape {list(shape)}"
