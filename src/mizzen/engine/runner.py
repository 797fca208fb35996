"""Forward and backward of micro-batches on a model that is whole on this rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mizzen.comm.mesh import Mesh
from mizzen.engine.model_changes import ModelChanges
from mizzen.engine.phases import Phases
from mizzen.engine.randomness import RandomStream
from mizzen.errors import CommError, PlanError, UsageError
from mizzen.log import get_logger
from mizzen.plan.losses import Evaluation, LossFunction, Role, Tally, call, loss_of, pull, to_device
from mizzen.plan.parts import Parts
from mizzen.precision.arithmetic import Arithmetic


class Runner(Protocol):
    """How micro-batches run. The engine calls forward and backward for an open loop, run for a whole batch."""

    role: Role | None
    """Which ranks have losses; None where all have."""
    stage: int
    """The place of this rank among the stages of a pipeline; 0 where there is one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""

    def backward(self, loss: Tensor, *, last: bool | None, retain_graph: bool = False) -> None:
        """Gradients of one micro-batch, scaled; `last` says whether a step follows, None keeps them on this rank."""

    def run(self, micros: Sequence[Any], loss_function: LossFunction | None) -> Tally:
        """Forward and backward of all of them. They are where the loader left them: what is needed is moved."""

    def evaluate(self, micros: Sequence[Any], loss_function: LossFunction | None, *, has_loss: bool) -> Evaluation:
        """Forward of all of them, without gradients; `has_loss` asks for losses, else only outputs are kept."""

    def pull(self, source: Callable[[], Iterator[Any]], count: int) -> list[Any]:
        """The next micro-batches, or as many as there are; on a rank that needs no data as many placeholders."""

    def check_open_loop(self, call: str) -> None:
        """Refuse a call of an open loop where only whole batches can be run."""


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
    stage = 0

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

    def evaluate(self, micros: Sequence[Any], loss_function: LossFunction | None, *, has_loss: bool) -> Evaluation:
        """Forward of one micro-batch after the other."""
        found = Evaluation()
        for micro in micros:
            output = self._output(to_device(micro, self.device), loss_function)
            found.outputs.append(output)
            if has_loss:
                found.add(*loss_of(output))
        return found

    def pull(self, source: Callable[[], Iterator[Any]], count: int) -> list[Any]:
        """The next micro-batches: this rank computes with all of them."""
        return pull(source(), count)

    def check_open_loop(self, call: str) -> None:
        """Any call is right here."""

    def _output(self, micro: Any, loss_function: LossFunction | None) -> Any:
        if loss_function is None:
            return call(self.forward, micro)
        if not isinstance(micro, Sequence) or len(micro) != 2:
            raise UsageError(f"with a loss function a batch is (input, target); this is a {type(micro).__name__}")
        output = call(self.forward, micro[0])
        with self.arithmetic.region():
            return loss_function(output, micro[1])


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
