"""When units are gathered, reduced and freed: what a call, a backward and a step of the model mean for all of them.

`calls.py` tells of the calls of modules, and of where a backward enters and leaves them.

[Note: transforms of torch.func]
Inside of `grad`, `vmap` or `jvp` the inputs are tensors of the transform, and parameters are constants to it. Units are
gathered outside of it, as it were. What it computes has no nodes at which a backward of ours could stop, and it may run
through its own graph after the model has returned: units stay gathered as for a graph that is differentiated again.
With gradients off there is no such graph, and units are freed as ever.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge

from mizzen.comm.backend import Tag
from mizzen.errors import CommError, UsageError
from mizzen.parallel.zero.full.unit import LiveUnit


@dataclass(slots=True)
class Position:
    """Where this rank is in a step, for the tags of one store's collectives."""

    step: int = 0
    is_backward: bool = False
    calls: int = 0
    """How many forward passes, and calls of other methods of the model, are on the stack."""
    phase: str = "forward"
    """What the outermost of them is."""

    def __enter__(self) -> None:
        """Code of the model runs, inside of which a sharded parameter is gathered where it is touched."""
        if not self.calls:
            self.phase = "forward" if torch.is_grad_enabled() else "evaluation"
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        """It is over, also after an error."""
        self.calls = max(0, self.calls - 1)

    def tag(self, unit: str) -> Tag:
        """The tag of a collective for a unit."""
        phase = self.phase if self.calls else "outside of forward"
        return Tag(self.step, unit, "backward" if self.is_backward else phase)


def explained(error: CommError) -> CommError:
    """An error with what helps, where ranks have parted ways."""
    if "parted ways" not in str(error):
        return error
    return CommError(
        f"{error}. At ZeRO stage 3 every rank has to run the same units in the same order: a branch that ranks may "
        "take differently belongs inside one unit; pin a module around it in zero_optimization.leaf_module"
    )


class Reduces(Protocol):
    """Who takes the gradients of a unit to their owners."""

    def reduce_unit(self, unit: LiveUnit) -> None:
        """Take what lies on its parameters."""

    def clear(self, *, taken: bool = False) -> None:
        """Forget all gradients."""


class UnitRuntime:
    """All units of one model."""

    def __init__(self, position: Position) -> None:
        self.units: tuple[LiveUnit, ...] = ()
        self.position = position
        self.gradients: list[Reduces] = []
        self.previous: Sequence[LiveUnit] = ()
        """The units of the last call that a backward may come back to."""
        self.earlier: Sequence[LiveUnit] = ()
        """Those of the call before it."""
        self.following: dict[int, Sequence[LiveUnit]] = {}
        """For each unit those that are gathered while it runs."""
        self.beyond: dict[int, Sequence[LiveUnit]] = {}
        """For each unit the one after these, whose shards are fetched meanwhile if they rest elsewhere."""
        self.is_ahead = False
        self.leaves_gradients = False
        """Whether the backward that runs leaves a gradient on some parameter, or is for inputs alone."""
        self.is_differentiated = False
        """Whether some backward shall be differentiated again, or torch.func has a graph of its own. Such a graph uses
        whole parameters at any time: units then stay gathered until a backward of the engine, or a step, is over."""
        self._task = -1
        self._ends = False
        """Whether we are told of the end of the backward that runs."""

    def add(self, units: Sequence[LiveUnit], gradients: Reduces, ahead: int) -> None:
        """Run these units too, which the same ranks share; a module may have units in several such sets."""
        self.units = (*self.units, *units)
        self.gradients.append(gradients)
        self.following |= _following(units, ahead)
        self.beyond |= _beyond(units, self.following) if ahead else dict.fromkeys(map(id, units), ())
        self.is_ahead |= ahead > 0
        for unit in units:
            unit.reduce = partial(gradients.reduce_unit, unit)

    def remove(self, units: Sequence[LiveUnit], gradients: Reduces) -> None:
        """Run these units no more, and forget them, so that nothing of theirs stays in memory."""
        self.units = tuple(unit for unit in self.units if unit not in units)
        self.gradients = [each for each in self.gradients if each is not gradients]
        self.previous = self.earlier = ()
        for unit in units:
            del self.following[id(unit)], self.beyond[id(unit)]
            unit.reduce = _reduce_nothing

    # Calls of the model

    def enter(self, units: Sequence[LiveUnit]) -> None:
        """The model, or a unit by itself, is called."""
        is_outermost, is_model = not self.position.calls, units[0].is_root
        if is_model and is_outermost and not self.position.is_backward:
            self.previous = self.earlier = ()
            for each in self.gradients if self.recover() else ():
                each.clear()  # what an exception has left is not half of a gradient
        if is_outermost:
            check_places(self.units if is_model else units)
        if is_model:
            self.position.__enter__()

    def exit(self, units: Sequence[LiveUnit]) -> None:
        """That call is over."""
        if units[0].is_root:
            self.position.__exit__()
            if not torch.is_grad_enabled() and not self.position.calls:
                for unit in units:
                    self.free_unit(unit)  # nothing of this call is needed in a backward

    # Gathering

    def gather(self, unit: LiveUnit, *, keep_second: bool = False) -> None:
        """Let a unit be whole."""
        try:
            with outside_transforms():
                unit.gather(self.position.tag(unit.plan.title), keep_second=keep_second)
        except CommError as error:
            raise explained(error) from None

    def gather_ahead(self, units: Sequence[LiveUnit], beyond: Sequence[LiveUnit]) -> None:
        """Start to gather units that are needed next, and to fetch the shards of those beyond that rest elsewhere.

        A gather waits for the shards of its own rank, and the device computes nothing meanwhile: so these come earlier.
        """
        for unit in units:
            try:
                with outside_transforms():
                    unit.start_gather(self.position.tag(unit.plan.title))
            except CommError as error:
                raise explained(error) from None
        for unit in beyond:
            with outside_transforms():
                unit.fetch()

    @contextmanager
    def held_open(self, unit: LiveUnit) -> Iterator[None]:
        """Gather a unit, and leave it gathered whatever runs inside."""
        self.gather(unit)
        unit.open += 1
        try:
            yield
        finally:
            unit.open -= 1
            unit.free()

    def free_unit(self, unit: LiveUnit) -> None:
        """Keep the shards of a unit alone, unless some graph needs it whole."""
        if not self.is_differentiated:
            with outside_transforms():
                unit.free()

    def free(self) -> None:
        """Shard again whatever is gathered without need."""
        self.is_differentiated = False
        for unit in self.units:
            unit.free()
            unit.drop_second()

    # Backward

    def reach(self, unit: LiveUnit) -> None:
        """A backward has come to a unit."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):  # -1: it is over
            # A reentrant checkpoint runs a backward inside of one, in which the parameters may be.
            is_inside = self.leaves_gradients and self._ends
            self.leaves_gradients = is_inside or self.position.is_backward or self._some_arrive()
            self._task = task
        self.is_differentiated |= torch.is_grad_enabled()
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        unit.in_backward = True
        if self.leaves_gradients:
            unit.sums.fetch()
        self.gather(unit)

    def leave(self, unit: LiveUnit) -> None:
        """A backward has left a unit: send its gradients, and free it."""
        if self.leaves_gradients:
            unit.reduce()
        unit.in_backward = False
        self.free_unit(unit)

    def end_backward(self) -> None:
        """A backward is over: whatever units have is sent, in an order that all ranks have."""
        self._ends, self._task = False, -1
        self.is_differentiated &= not self.position.is_backward
        for unit in self.units:
            if unit.in_backward or self._has_gradients(unit):
                if self.leaves_gradients:
                    unit.reduce()
                unit.in_backward = False
        if not self.is_differentiated:
            self.free()

    def finish(self) -> None:
        """Let units send gradients that came without their notice.

        A penalty on the gradient of an input, with nothing beside it, need not come through the output of any unit.
        """
        if any(self._has_gradients(unit) for unit in self.units):
            self.leaves_gradients = True
            self.end_backward()

    def recover(self) -> bool:
        """Start again after a backward that did not come to its end; says whether that was so."""
        if not self._ends:
            return False
        self._ends, self._task, self.is_differentiated = False, -1, False
        for unit in self.units:
            unit.in_backward = False
            for each in unit.trained:
                each.parameter.grad = None
            unit.free()
        return True

    def _has_gradients(self, unit: LiveUnit) -> bool:
        return any(each.parameter.grad is not None for each in unit.trained)

    def _some_arrive(self) -> bool:
        """Whether the backward that runs will add to the gradient of some parameter."""
        return any(_arrives(each.parameter) for unit in self.units for each in unit.trained)


def _reduce_nothing() -> None:
    """What a unit without a runtime does with its gradients."""


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def outside_transforms() -> AbstractContextManager[Any]:
    """Compute with plain tensors, whatever transforms are at work."""
    return temporarily_clear_interpreter_stack() if is_transformed() else nullcontext()


def check_places(units: Sequence[LiveUnit]) -> None:
    """Put a parameter back where something else stands in its module, and say so."""
    wrong = [
        (each, module, leaf)
        for unit in units
        for each in unit.parameters.values()
        for module, leaf in each.places
        if getattr(module, leaf, None) is not each.parameter
    ]
    for each, module, leaf in wrong:
        module.register_parameter(leaf, each.parameter)
    if wrong and is_transformed():
        raise UsageError(
            f"torch.func with respect to parameters, by functional_call with another '{wrong[0][0].name}': at ZeRO "
            "stage 3, where a rank holds shards, inputs alone can be transformed. For gradients of parameters call "
            "engine.backward and mizzen.zero.safe_get_full_grad; stages 0 to 2 have whole parameters"
        )
    if wrong:
        raise UsageError(
            f"'{wrong[0][0].name}' was replaced in the model, by load_state_dict with assign=True, functional_call or "
            "an assignment, and nobody would train what came: the sharded parameter is there again. Copy values "
            "instead, with load_state_dict alone, or into what GatheredParameters(..., modifier_rank=0) has gathered"
        )


def _arrives(parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return False
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # torch.autograd.grad hands it to its caller
        return False


def _following(units: Sequence[LiveUnit], ahead: int) -> dict[int, Sequence[LiveUnit]]:
    """For each unit the next ones in the order of definition, up to so many elements."""
    root, *others = units
    found: dict[int, Sequence[LiveUnit]] = {}
    for number, unit in enumerate((root, *others)):
        room, following = ahead, []
        for later in others[number:]:
            if room <= 0:
                break
            following.append(later)
            room -= later.plan.numel
        found[id(unit)] = following
    return found


def _beyond(units: Sequence[LiveUnit], following: dict[int, Sequence[LiveUnit]]) -> dict[int, Sequence[LiveUnit]]:
    """For each unit the one that comes after those that follow it."""
    others = units[1:]
    return {id(unit): others[number + len(following[id(unit)]) :][:1] for number, unit in enumerate(units)}
