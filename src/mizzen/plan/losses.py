"""Losses of micro-batches: found in what a model returns, added up over a step; and how a batch is given to a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.errors import UsageError
from mizzen.model.inputs import change_tensors

LOSS: Final = "loss"
MANY_KINDS: Final = "some losses of this step came as (sum, count) and others as one number: return one kind"
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Tally:
    """What one rank adds up over the micro-batches of a step."""

    loss: Tensor | None = None
    """The sum of its losses, or of the numerators of `(sum, count)`."""
    count: Tensor | float = 0.0
    """The number of losses, or the sum of the counts."""
    is_counted: bool = False
    """Whether the losses came as `(sum, count)`, by whose count the gradient then still has to be divided."""

    def plus(self, loss: Tensor, count: Tensor | float, *, is_counted: bool = False) -> "Tally":
        """With one more micro-batch. Nothing here waits for the device."""
        loss = loss.detach().float()
        if self.loss is None:
            return Tally(loss, count, is_counted)
        if is_counted != self.is_counted:
            raise UsageError(MANY_KINDS)
        return Tally(self.loss + loss, self.count + count, is_counted)


@dataclass(slots=True)
class Evaluation:
    """What came out of the micro-batches of an evaluation on one rank: nothing on ranks that do not have the output."""

    tally: Tally = Tally()
    losses: list[Tensor] = field(default_factory=list)
    """The mean loss of each."""
    outputs: list[Any] = field(default_factory=list)
    """What the model, or the loss function, returned for each."""

    def add(self, loss: Tensor, count: Tensor | None) -> None:
        """Take in the loss of one micro-batch, which may be a sum with its count."""
        self.tally = self.tally.plus(loss, 1.0 if count is None else count, is_counted=count is not None)
        self.losses.append((loss if count is None else loss / count).detach())


@dataclass(frozen=True, slots=True)
class Role:
    """Which ranks have losses: all of them, or those of the last stage of a pipeline."""

    loss_ranks: int
    """The number of ranks that have losses."""
    has_losses: bool = True
    """Whether this rank is one of them."""


def pull(source: Iterator[Any], count: int) -> list[Any]:
    """The next micro-batches of a source, or as many as there are."""
    found: list[Any] = []
    for _ in range(count):
        try:
            found.append(next(source))
        except StopIteration:
            break
    return found


def call(function: Callable[..., Any], batch: Any) -> Any:
    """A dict is passed as keywords, a tuple or list as arguments, anything else as the one argument."""
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, tuple | list):
        return function(*batch)
    return function(batch)


def loss_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """The loss in what a model returned, with its count where it came as `(sum, count)`."""
    found = output
    if isinstance(output, Mapping):
        found = output.get(LOSS)
    elif not isinstance(output, Tensor | tuple | list):
        found = getattr(output, LOSS, None)
    if isinstance(found, tuple | list) and len(found) == 2 and all(_is_number(value) for value in found):
        return found[0], torch.as_tensor(found[1])
    if isinstance(found, Tensor) and found.numel() == 1:
        return found.reshape(()), None
    raise UsageError(
        f"no loss in the model's output, a {type(output).__name__}: return a scalar, an object with .loss, a dict with "
        "'loss', or (sum, count); or give train_batch a loss_fn(output, target)"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device, in the structure that it has."""
    return change_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
