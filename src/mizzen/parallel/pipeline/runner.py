"""Runs micro-batches through the stages of a pipeline as a table says: any table, one rank's row of it.

What is chosen beforehand is in `cut.py`, what travels in `link.py`. An error of a stage ends its process, and with that
the waits of the others, which name it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mizzen.comm.mesh import Mesh
from mizzen.errors import UsageError
from mizzen.parallel.pipeline.link import Link
from mizzen.parallel.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Instruction,
    Receive,
    Schedule,
    Send,
    StageMessage,
    input_of,
    output_of,
    transfers,
)
from mizzen.parallel.pipeline.split import Halves, SplitBackward
from mizzen.parallel.pipeline.stage import Ends, Stage, stage_of
from mizzen.parallel.pipeline.wire import Description, describe
from mizzen.plan.losses import Evaluation, LossFunction, Role, Tally, loss_of, pull, to_device
from mizzen.plan.parts import Part, Store

MakeTable = Callable[..., Schedule]
"""The table for so many micro-batches; with `forward_only` that of an evaluation."""


@dataclass(slots=True)
class Kept:
    """What a chunk keeps of a micro-batch from its forward to the end of its backward."""

    inputs: list[Tensor]
    """What came from the chunk before and needs a gradient."""
    outputs: list[Tensor]
    """What has to be differentiated: what went to the next chunk, or the loss."""
    description: Description | None
    """Of the output; None on the last chunk."""
    split: SplitBackward | None = None


class Pipelined:
    """The parts of one stage, and the messages to the others. `running` is the `RunnerContext` of an engine."""

    def __init__(self, running: Any, *, placement: Sequence[int], table: MakeTable) -> None:
        mesh: Mesh = running.mesh
        self.stage = mesh.coordinate("pp")
        self.placement = tuple(placement)
        self.device: torch.device = running.device
        self.phases, self.stream = running.phases, running.stream
        self.changes, self.arithmetic = running.changes, running.arithmetic
        own = [chunk for chunk, stage in enumerate(self.placement) if stage == self.stage]
        self.parts: dict[int, Part] = dict(zip(own, running.parts, strict=True))
        self.calls = {
            chunk: stage_of(part.module, self.arithmetic, self._ends(chunk)) for chunk, part in self.parts.items()
        }
        self.stores = {chunk: tuple(self._stores_of(part)) for chunk, part in self.parts.items()}
        self.halves = {
            chunk: Halves(self.parts[chunk].module, are_wanted=not any(_has_units(store) for store, _ in stores))
            for chunk, stores in self.stores.items()
        }
        self.role: Role | None = Role(mesh.layout.world // mesh.size("pp"), has_losses=self.last_chunk in self.parts)
        self.link = Link(mesh.group("pp"), mesh.ranks("pp"), self.device)
        self.actions = lru_cache(maxsize=64)(partial(_actions, table, self.stage))

    @property
    def last_chunk(self) -> int:
        """The chunk that has the output of the model."""
        return len(self.placement) - 1

    def _stores_of(self, part: Part) -> Iterator[tuple[Store, bool]]:
        """The stores of what a chunk uses, its own first, and whether other chunks have gradients for them too."""
        modules = [each.module for each in self.parts.values()]
        for store in sorted(
            (s for each in self.parts.values() for s in each.stores), key=lambda s: s not in part.stores
        ):
            users = [module for module in modules if _uses(module, store)]
            is_far = any(site.is_far for site in store.contents.sites.values())
            if store in part.stores or any(user is part.module for user in users):
                yield store, is_far or len(users) > 1

    def _ends(self, chunk: int) -> Ends:
        last = len(self.placement) - 1
        return Ends(chunk == 0, chunk == last, chunk + 1 == last)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a stage has no output of its own."""
        self.check_open_loop("forward")

    def backward(self, loss: Tensor, *, last: bool | None, retain_graph: bool = False) -> None:
        """Refused: a backward goes through all stages."""
        self.check_open_loop("backward")

    def check_open_loop(self, call: str) -> NoReturn:
        """Say what to call instead."""
        raise UsageError(
            f"{call}() on a pipeline, whose stages have different micro-batches at any time: call "
            "engine.train_batch(data_iter), which runs and steps a whole batch, or engine.eval_batch(data_iter)"
        )

    def pull(self, source: Callable[[], Iterator[Any]], count: int) -> list[Any]:
        """Data on the first and on the last stage; others need none."""
        needs_data = 0 in self.parts or self.last_chunk in self.parts
        return pull(source(), count) if needs_data else [None] * count

    def run(self, micros: Sequence[Any], loss_function: LossFunction | None) -> Tally:
        """Forward and backward of all of them, as the table says."""
        self.changes.adopt()
        actions = self.actions(len(micros))
        has_halves = any(isinstance(each, Instruction) and each.kind is BACKWARD_INPUT for each in actions)
        batch = BatchRun(self, micros, loss_function, has_halves=has_halves)
        with self._gathered(), self.stream.active():
            for action in actions:
                batch.do(action)
        self.link.finish()
        return batch.tally

    def evaluate(self, micros: Sequence[Any], loss_function: LossFunction | None, *, has_loss: bool) -> Evaluation:
        """Forward of all of them."""
        batch = BatchRun(self, micros, loss_function, has_loss=has_loss)
        with self._gathered(), self.stream.active():
            for action in self.actions(len(micros), forward_only=True):
                batch.do(action)
        self.link.finish()
        return batch.found

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Hold what a plan wants to stay gathered between micro-batches, on all ranks of the stage together."""
        with ExitStack() as stack:
            for store in (store for part in self.parts.values() for store in part.stores):
                if store.contents.stays_gathered:
                    stack.enter_context(store.gather(store.contents.held))
            yield


def _actions(table: MakeTable, stage: int, micros: int, *, forward_only: bool = False) -> tuple[Action, ...]:
    return transfers(table(micros, forward_only=forward_only))[stage]


@dataclass(slots=True)
class BatchRun:
    """One batch on its way through one stage."""

    runner: Pipelined
    micros: Sequence[Any]
    loss_function: LossFunction | None
    has_loss: bool = True
    has_halves: bool = False
    """Whether any backward of this stage is to be taken in halves."""
    tally: Tally = field(default_factory=Tally)
    found: Evaluation = field(default_factory=Evaluation)
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    handed: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Outputs for a chunk of this same stage: their description and tensors."""
    returned: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Gradients of what was handed over."""
    owed: list[StageMessage] = field(default_factory=list)
    """Gradients to be asked for once it is known what they are of."""
    done: dict[int, int] = field(default_factory=dict)
    """Backwards of each chunk that are through."""

    def do(self, action: Action) -> None:
        """One action of the row."""
        if isinstance(action, Receive):
            self._post(action.message)
        elif isinstance(action, Send):
            pass  # each instruction sends what it has made as soon as it has it
        elif action.kind is FORWARD:
            self._forward(action.chunk, action.micro, action)
            self._post_owed()
        elif action.kind is BACKWARD_WEIGHT:
            self._backward_weights(action.chunk, action.micro)
        else:
            self._backward(action.chunk, action.micro, action)

    def _post(self, transfer: StageMessage) -> None:
        if transfer.payload == "activation":
            self.runner.link.post(transfer)
        elif (transfer.chunk, transfer.micro) not in self.kept:  # its forward is the very next instruction
            self.owed.append(transfer)
        else:
            self.runner.link.post_gradients(transfer, self._expected(transfer.chunk, transfer.micro))

    def _post_owed(self) -> None:
        """Ask for gradients of what the forward that is just through has given."""
        owed, self.owed = self.owed, []
        for transfer in owed:
            self._post(transfer)

    def _expected(self, chunk: int, micro: int) -> Any:
        description = self.kept[chunk, micro].description
        return description.gradients if description is not None else ()

    # Forward

    def _forward(self, chunk: int, micro: int, one: Instruction) -> None:
        runner = self.runner
        carried, inputs = self._input(chunk, micro, one)
        for store, _ in runner.stores[chunk]:
            store.begin_forward()
        batch = to_device(self.micros[micro], runner.device) if chunk in (0, runner.last_chunk) else None
        stage = runner.calls[chunk]
        with runner.phases.phase("forward"):
            output = stage.run(carried, batch)
            if chunk == runner.last_chunk:
                self._end(chunk, micro, stage, output, batch, inputs)
                return
            description, tensors = describe(output)
            outputs = [tensor for tensor in tensors if tensor.requires_grad]
            if torch.is_grad_enabled():
                self.kept[chunk, micro] = Kept(inputs, outputs, description)
            if (transfer := output_of(one, runner.placement)) is not None:
                runner.link.send(transfer, description, tensors)
            else:
                self.handed[chunk + 1, micro] = description, [tensor.detach() for tensor in tensors]

    def _input(self, chunk: int, micro: int, one: Instruction) -> tuple[Any, list[Tensor]]:
        """What comes from the chunk before, and the tensors of it whose gradients go back there."""
        if chunk == 0:
            return None, []
        transfer = input_of(one, self.runner.placement)
        description, tensors = (
            self.handed.pop((chunk, micro)) if transfer is None else self.runner.link.receive(transfer)
        )
        if not torch.is_grad_enabled():
            return description.build(tensors), []
        needing = [facts.needs_gradient for facts in description.tensors]
        leaves = [tensor.requires_grad_() for tensor, needs in zip(tensors, needing, strict=True) if needs]
        entered = [_entered(each) if needs else each for each, needs in zip(tensors, needing, strict=True)]
        return description.build(entered), leaves

    def _end(self, chunk: int, micro: int, stage: Stage, output: Any, batch: Any, inputs: list[Tensor]) -> None:
        """The model is through with a micro-batch."""
        self.found.outputs.append(output)
        if not self.has_loss:
            return
        loss, count = loss_of(stage.loss(output, batch, self.loss_function))
        if not torch.is_grad_enabled():
            self.found.add(loss, count)
            return
        self.found.outputs.clear()
        is_counted = count is not None
        self.tally = self.tally.plus(loss, 1.0 if count is None else count, is_counted=is_counted)
        weighted = self.runner.arithmetic.scaler.scaled(loss if is_counted else loss / len(self.micros))
        self.kept[chunk, micro] = Kept(inputs, [weighted] if weighted.requires_grad else [], None)

    # Backward

    def _backward(self, chunk: int, micro: int, one: Instruction) -> None:
        """Both halves, or the first, where that is asked for and right."""
        halves = self.runner.halves[chunk]
        is_split = one.kind is BACKWARD_INPUT and halves.are_right
        if not is_split:
            self._begin(chunk)
        kept, gradients = self.kept[chunk, micro], self._gradients(chunk, micro, one)
        with self.runner.phases.phase("backward"):
            if is_split:
                kept.split = _first_half(kept, gradients)
                if kept.split is None:
                    halves.are_right = False
                    self._begin(chunk)
            if kept.split is None and kept.outputs:
                with halves.watched() if self.has_halves else nullcontext():
                    torch.autograd.backward(kept.outputs, gradients)
            kept.outputs = []
            self._return(chunk, micro, one, kept)
            if kept.split is None:
                self._end_backward(chunk)
        if one.kind is BACKWARD:
            del self.kept[chunk, micro]

    def _backward_weights(self, chunk: int, micro: int) -> None:
        kept = self.kept.pop((chunk, micro))
        if kept.split is None:
            return
        with self.runner.phases.phase("backward"):
            self._begin(chunk)
            kept.split.weights()
            self._end_backward(chunk)

    def _begin(self, chunk: int) -> None:
        """Announce a backward that leaves gradients on weights; the last of a chunk lets them go to their owners.

        What several chunks have gradients for is summed when all of them are through: stages that hold the same would
        wait for each other in the middle of the table.
        """
        self.done[chunk] = self.done.get(chunk, 0) + 1
        is_last = self.done[chunk] == len(self.micros)
        for store, is_spread in self.runner.stores[chunk]:
            store.begin_backward(None if is_spread else is_last)

    def _end_backward(self, chunk: int) -> None:
        for store, _ in self.runner.stores[chunk]:
            store.end_backward()

    def _gradients(self, chunk: int, micro: int, one: Instruction) -> list[Tensor | None]:
        if chunk == self.runner.last_chunk:
            return [None for _ in self.kept[chunk, micro].outputs]
        if (transfer := input_of(one, self.runner.placement)) is None:
            return [*self.returned.pop((chunk, micro))]
        return [*self.runner.link.receive_gradients(transfer, self._expected(chunk, micro))]

    def _return(self, chunk: int, micro: int, one: Instruction, kept: Kept) -> None:
        """Give the gradients of the inputs back to where these came from."""
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in kept.inputs]
        kept.inputs = []
        if chunk == 0:
            return
        if (transfer := output_of(one, self.runner.placement)) is not None:
            self.runner.link.send_gradients(transfer, found)
        else:
            self.returned[chunk - 1, micro] = found


def _entered(leaf: Tensor) -> Tensor:
    """The memory of an input as a layer may change it in place: to autograd it is no view of the input."""
    found: Tensor = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
    return found


def _uses(module: nn.Module, store: Store) -> bool:
    """Whether a module has a trained parameter that a store holds."""
    held = {id(parameter) for parameter in store.contents.trained.values()}
    return any(id(parameter) in held for parameter in module.parameters())


def _has_units(store: Store) -> bool:
    """Whether parameters are gathered for a backward and freed after it."""
    return len(store.contents.units) > 1


def _first_half(kept: Kept, gradients: Sequence[Tensor | None]) -> SplitBackward | None:
    """Put the gradients of inputs on them, if any; returns what comes later, None where all has to come now."""
    if not kept.inputs or not kept.outputs:
        return _Later(kept.outputs, gradients)
    split = SplitBackward(kept.outputs, gradients, kept.inputs)
    return split if split.inputs() else None


class _Later(SplitBackward):
    """A backward all of which can wait: nobody needs the gradients of inputs."""

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        super().__init__(outputs, gradients, ())

    def weights(self) -> None:
        """All of it."""
        if self._outputs:
            torch.autograd.backward(list(self._outputs), list(self._gradients))
