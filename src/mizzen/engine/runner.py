"""Forward and backward of micro-batches on a model that is whole on this rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mizzen.comm.mesh import Mesh
from mizzen.engine.model_changes import ModelChanges
from mizzen.engine.phases import Phases
from mizzen.engine.randomness import RandomStream
from mizzen.engine.vote import Role, Tally
from mizzen.errors import CommError, PlanError, UsageError
from mizzen.log import get_logger
from mizzen.model.inputs import change_tensors
from mizzen.plan.parts import Parts
from mizzen.precision.arithmetic import Arithmetic

LOSS: Final = "loss"
LossFunction = Callable[[Any, Any], Any]


class Runner(Protocol):
    """How micro-batches run. The engine calls forward and backward for an open loop, run for a whole batch."""

    role: Role | None
    """Which ranks have losses; None where all have."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""

    def backward(self, loss: Tensor, *, last: bool | None, retain_graph: bool = False) -> None:
        """Gradients of one micro-batch, scaled; `last` says whether a step follows, None keeps them on this rank."""

    def run(self, micros: Sequence[Any], loss_function: LossFunction | None) -> Tally:
        """Forward and backward of all of them. They are where the loader left them: what is needed is moved."""


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What a runner works with. A plan names what makes a runner of it; `Accumulate` does where none is named."""

    parts: Parts
    mesh: Mesh
    device: torch.device
    phases: Phases
    stream: RandomStream
    arithmetic: Arithmetic
    changes: ModelChanges


class Accumulate:
    """One micro-batch after the other, on a model that is one part."""

    role: Role | None = None

    def __init__(self, running: RunnerContext) -> None:
        if len(running.parts) != 1:
            raise PlanError(f"the plan cuts the model into {len(running.parts)} parts, and names no runner for them")
        (part,) = running.parts
        self.module = part.module
        self.stores = part.stores
        self.device = running.device
        self.changes = running.changes
        self.arithmetic = running.arithmetic
        self.phases = running.phases
        self.stream = running.stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        if torch.is_grad_enabled():
            self.changes.adopt()
        for store in self.stores:
            store.begin_forward()
        with self.phases.phase("forward"), self.stream.active():
            return self.arithmetic.call(self.module, args, kwargs)

    def backward(self, loss: Tensor, *, last: bool | None, retain_graph: bool = False) -> None:
        """Gradients of one micro-batch, on their way to their owners as `last` says."""
        with self.phases.phase("backward"):
            for store in self.stores:
                store.begin_backward(last)
            try:
                self.arithmetic.scaler.scaled(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            except CommError:
                raise
            except Exception as error:
                self._drop()
                if "through the graph a second time" not in str(error):
                    raise
                raise UsageError(
                    "backward of a loss whose graph is gone, because a backward has been through it: run the forward "
                    "again, add losses up before one backward, or give the first one retain_graph=True"
                ) from error
            for store in self.stores:
                store.end_backward()

    def _drop(self) -> None:
        """What a backward has left that did not come to its end is not half of a gradient: forget all of this step."""
        get_logger().warning("a backward did not come to its end: the gradients of this step so far are dropped")
        with suppress(CommError):  # the error that is on its way says more
            for store in self.stores:
                store.clear_gradients()

    def run(self, micros: Sequence[Any], loss_function: LossFunction | None) -> Tally:
        """Forward and backward of all of them; the gradient is that of their mean, or of their sum when counted."""
        tally = Tally()
        for number, micro in enumerate(micros, 1):
            loss, count = loss_of(self._output(to_device(micro, self.device), loss_function))
            is_counted = count is not None
            tally = tally.plus(loss, 1.0 if count is None else count, is_counted=is_counted)
            weighted = loss if is_counted else loss / len(micros)
            self.backward(weighted, last=number == len(micros))
        return tally

    def _output(self, micro: Any, loss_function: LossFunction | None) -> Any:
        if loss_function is None:
            return call(self.forward, micro)
        if not isinstance(micro, Sequence) or len(micro) != 2:
            raise UsageError(f"with a loss function a batch is (input, target); this is a {type(micro).__name__}")
        output = call(self.forward, micro[0])
        with self.arithmetic.region():
            return loss_function(output, micro[1])


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


def tokens_in(batch: Any) -> int | None:
    """How many tokens the inputs show: the elements of the first integer tensor with two or more dimensions."""
    if isinstance(batch, Tensor):
        is_tokens = batch.dim() >= 2 and not batch.is_floating_point() and batch.dtype is not torch.bool
        return batch.numel() if is_tokens else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return next((count for value in batch if (count := tokens_in(value)) is not None), None)
    return None
