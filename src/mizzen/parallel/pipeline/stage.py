"""How one chunk of a model is called for a micro-batch: what it takes of the batch, what goes on, what the loss is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from mizzen.errors import UsageError
from mizzen.parallel.pipeline.blocks import StageForward
from mizzen.parallel.pipeline.module import LayeredModule
from mizzen.plan.losses import LossFunction
from mizzen.precision.arithmetic import Arithmetic


class Stage(Protocol):
    """One chunk. The runner calls run for each micro-batch, and loss on the last chunk alone."""

    def run(self, carried: Any, batch: Any) -> Any:
        """What goes to the next chunk, or on the last one the output; `carried` comes from the chunk before.

        The batch is there on the first and on the last chunk.
        """

    def loss(self, output: Any, batch: Any, function: LossFunction | None) -> Any:
        """The loss, in any of the forms that a model may return."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a chunk is among the others."""

    is_first: bool
    is_last: bool
    is_next_last: bool
    """Whether the next one has the batch itself."""


def stage_of(module: nn.Module, arithmetic: Arithmetic, ends: Ends) -> Stage:
    """How a chunk is called."""
    if isinstance(module, LayeredModule):
        return LayerStage(module, arithmetic, ends)
    return BlockStage(module, arithmetic, ends)


class LayerStage:
    """Some layers of a `PipelineModule`; a batch is (inputs, labels)."""

    def __init__(self, module: LayeredModule, arithmetic: Arithmetic, ends: Ends) -> None:
        self.module = module
        self.arithmetic = arithmetic
        self.ends = ends

    def run(self, carried: Any, batch: Any) -> Any:
        """The output of the layers."""
        return self.arithmetic.call(self.module, (_part(batch, 0) if self.ends.is_first else carried,), {})

    def loss(self, output: Any, batch: Any, function: LossFunction | None) -> Any:
        """What the loss function says of the output and the labels; the output itself without one."""
        function = function or self.module.loss_fn
        if function is None:
            return output
        with self.arithmetic.region():
            return function(output, _part(batch, 1))


def _part(batch: Any, number: int) -> Any:
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > number:
        return batch[number]
    size = f" of {len(batch)}" if isinstance(batch, Sequence) else ""
    raise UsageError(
        f"a batch of a PipelineModule is (inputs, labels); this is a {type(batch).__name__}{size}: give "
        "engine.set_batch_fn() a function that makes one of it"
    )


class BlockStage:
    """A model cut between its blocks; a batch is what the model takes, labels included."""

    def __init__(self, module: nn.Module, arithmetic: Arithmetic, ends: Ends) -> None:
        self.module = module
        self.arithmetic = arithmetic
        self.ends = ends
        forward = vars(module)["forward"]
        self.takes_cache = isinstance(forward, StageForward) and forward.takes("use_cache")

    def run(self, carried: Any, batch: Any) -> Any:
        """The hidden states, with the inputs of the model for stages that do not read them."""
        args, kwargs = _arguments(batch) if batch is not None else (tuple(carried["args"]), carried["kwargs"])
        if not self.ends.is_last:
            kwargs = {name: value for name, value in kwargs.items() if not _is_label(name)}
        given = {**({"use_cache": False} if self.takes_cache else {}), **kwargs}
        received = None if self.ends.is_first else carried["hidden"]
        hidden = self.arithmetic.call(self.module, (args, given, received), {})
        if self.ends.is_last:
            return hidden
        rest = {} if self.ends.is_next_last else {"args": args, "kwargs": kwargs}
        return {"hidden": hidden, **rest}

    def loss(self, output: Any, batch: Any, function: LossFunction | None) -> Any:
        """What the model has computed itself."""
        if function is not None:
            raise UsageError(
                "train_batch(loss_fn=...) with a model that is cut between its blocks: it computes its loss itself, "
                "from labels in the batch"
            )
        return output


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _is_label(name: str) -> bool:
    return "label" in name or name in ("start_positions", "end_positions")
