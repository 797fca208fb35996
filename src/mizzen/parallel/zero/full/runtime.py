"""How units run: gathered before a module is called, freed after it, gathered for its backward, reduced and freed.

[Note: around the call]
A module that is a unit gets a class of ours in front of its own, whose `__call__` does what is to be done before and
after. So hooks of the user, and whatever `module.compile()` has made, run inside, and the compiler never sees ours.

[Note: where a backward enters and leaves a unit]
It enters where it comes to the node behind an output, before that node runs; and it has left the unit once it has run
the node behind each input: a view of the input, made before the call. A view may be changed in place, and then, or
where no input needs a gradient, the end of the whole backward is where the unit is left.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from mizzen.ambient import AMBIENT
from mizzen.comm.backend import Tag
from mizzen.errors import CommError, NotBuilt, UsageError
from mizzen.log import warn_once
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.parallel.zero.full.unit import LiveUnit

CALLS: Final = "_unit_calls"
"""Under this name a module has its `UnitCalls`."""


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
        self.following: dict[int, Sequence[LiveUnit]] = {}
        self.is_ahead = False
        self.leaves_gradients = False
        """Whether the backward that runs leaves a gradient on some parameter, or is for inputs alone."""
        self.is_differentiated = False
        """Whether some backward shall be differentiated again. Its graph uses whole parameters at any time: units then
        stay gathered until a backward of the engine, or a step, is over."""
        self._task = -1
        self._ends = False
        """Whether we are told of the end of the backward that runs."""

    def add(self, units: Sequence[LiveUnit], gradients: Reduces, ahead: int) -> None:
        """Run these units too, which the same ranks share; a module may have units in several such sets."""
        self.units = (*self.units, *units)
        self.gradients.append(gradients)
        self.following |= _following(units, ahead)
        self.is_ahead |= ahead > 0
        for unit in units:
            unit.reduce = partial(gradients.reduce_unit, unit)
            calls = vars(unit.module).get(CALLS)
            if calls is None:
                calls = vars(unit.module)[CALLS] = UnitCalls(self, [])
            calls.units.append(unit)
            lead(unit.module)

    # Calls of the model

    def enter(self, units: Sequence[LiveUnit]) -> None:
        """The model, or a unit by itself, is called."""
        refuse_transforms()
        is_outermost, is_model = not self.position.calls, units[0].is_root
        if is_model and is_outermost and not self.position.is_backward:
            self.previous = ()
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
                    unit.free()  # nothing of it is needed in a backward

    # Gathering

    def gather(self, unit: LiveUnit, *, keep_second: bool = False) -> None:
        """Let a unit be whole."""
        try:
            unit.gather(self.position.tag(unit.plan.title), keep_second=keep_second)
        except CommError as error:
            raise explained(error) from None

    def gather_ahead(self, units: Sequence[LiveUnit]) -> None:
        """Start to gather units that are needed next."""
        for unit in units:
            try:
                unit.start_gather(self.position.tag(unit.plan.title))
            except CommError as error:
                raise explained(error) from None

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
        self.gather(unit)

    def leave(self, unit: LiveUnit) -> None:
        """A backward has left a unit: send its gradients, and free it."""
        if self.leaves_gradients:
            unit.reduce()
        unit.in_backward = False
        if not self.is_differentiated:
            unit.free()

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


def refuse_transforms() -> None:
    """Refuse to gather inside of a transform, whose tensors have no memory of their own."""
    if torch._C._are_functorch_transforms_active():
        raise NotBuilt(
            "torch.func (grad, vmap, jvp) of a model at ZeRO stage 3, whose parameters are gathered unit by unit: use "
            "torch.autograd.grad, with create_graph=True where it is differentiated again, or stage 2"
        )


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


@dataclass(slots=True, eq=False)
class UnitCall:
    """One call of a module that a backward may come back to."""

    units: Sequence[LiveUnit]
    previous: Sequence[LiveUnit] = ()
    """The units of the call before, which the backward comes to next."""
    inputs: int = 0
    """Views of inputs that a backward passes when it leaves the module."""
    left: int = 0
    """How many of them it has not passed."""
    task: int = -1


@dataclass(slots=True, eq=False)
class UnitCalls:
    """What happens around the calls of one module."""

    runtime: UnitRuntime
    units: list[LiveUnit]
    stack: list[UnitCall] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether the module is the model itself."""
        return self.units[0].is_root

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the units, and have a look at the inputs."""
        runtime, call = self.runtime, UnitCall(self.units)
        runtime.enter(self.units)
        try:
            if any(unit.in_backward for unit in self.units):  # it is computed again, in its own backward
                for unit in self.units:
                    runtime.gather(unit)
            else:
                has_backward = torch.is_grad_enabled()
                for unit in self.units:
                    runtime.gather(unit, keep_second=has_backward and not unit.is_root)
                    runtime.gather_ahead(runtime.following[id(unit)])
                if has_backward and not self.is_root:
                    args, kwargs = change_tensors((args, kwargs), partial(self._watched, call))
        except BaseException:
            runtime.exit(self.units)
            raise
        self.stack.append(call)
        return args, kwargs

    def _watched(self, call: UnitCall, tensor: Tensor) -> Tensor:
        """An input in whose place a backward tells that it has left the module."""
        if not tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor
        view = tensor.view_as(tensor)
        if view.grad_fn is not None:
            view.grad_fn.register_hook(lambda *_: self._passed(call))
            call.inputs += 1
        return view

    def _passed(self, call: UnitCall) -> None:
        call.left -= 1
        if not call.left:
            for unit in call.units:
                self.runtime.leave(unit)

    def after(self, inputs: Any, output: Any) -> None:
        """Hear of a backward that comes back to what the module has computed, and free the units."""
        call, runtime = self.stack.pop(), self.runtime
        if any(unit.in_backward for unit in self.units):
            runtime.exit(self.units)
            return
        if torch.is_grad_enabled():
            nodes = {id(node): node for node in _nodes(inputs, output)}
            for node in nodes.values():
                node.register_prehook(lambda *_: self._reached(call))
            if nodes:
                call.previous, runtime.previous = runtime.previous, self.units
        for unit in self.units:
            if not unit.is_root:
                unit.free()
        runtime.exit(self.units)

    def _reached(self, call: UnitCall) -> None:
        runtime = self.runtime
        task = torch._C._current_graph_task_id()
        if call.task != task:
            call.task, call.left = task, call.inputs
        elif all(unit.in_backward for unit in call.units):
            return
        for unit in call.units:
            runtime.reach(unit)
        if runtime.is_ahead:
            runtime.gather_ahead(call.previous)

    def failed(self) -> None:
        """The module has raised an error."""
        self.stack.pop()
        for unit in self.units:
            if not unit.in_backward:
                unit.free()
        self.runtime.exit(self.units)


def _nodes(inputs: Any, output: Any) -> Iterator[Any]:
    """The nodes behind the tensors of an output, also of an object's, and behind what these are views of.

    Who changes a view in place works on the tensor behind it, whose node is then the one that a backward comes to. What
    is behind an input is not the unit's own.
    """
    is_object = not isinstance(output, Tensor | tuple | list | dict) and hasattr(output, "__dict__")
    found = [*tensors_in(output), *(tensors_in(vars(output)) if is_object else ())]
    foreign = {id(each if each._base is None else each._base) for each in tensors_in(inputs)}
    for each in found:
        if each.grad_fn is not None:
            yield each.grad_fn
        base = each._base
        if base is not None and base.grad_fn is not None and id(base) not in foreign:
            yield base.grad_fn


class UnitModule:
    """Comes before the own class of a module that is a unit, while an engine has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module between a gather and a free."""
        calls: UnitCalls = vars(self)[CALLS]
        args, kwargs = calls.before(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            calls.failed()
            raise
        calls.after((args, kwargs), output)
        return output

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `.to()`, `.cpu()` and their kin call: a sharded module stays where it is."""
        module: Any = self
        first = next((each for each in module.parameters() if each.is_floating_point()), None)
        if first is None:
            return self
        there = fn(torch.empty(0, dtype=first.dtype, device=first.device))
        if there.dtype != first.dtype:
            raise UsageError(
                f"a sharded model cannot become {there.dtype}: it holds {first.dtype} as the configuration says; set "
                "bf16 or fp16 there, or change the model before initialize()"
            )
        if there.device != first.device:
            warn_once(
                f"a sharded model stays on {first.device} while an engine has it, and did not go to {there.device}"
            )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those of sharded parameters, which do not show them."""
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
        owners = self._owners()
        for store in {id(owner.store): owner.store for owner in owners if is_unit_store(owner.store)}.values():
            store.gradients.forget({owner.name for owner in owners if owner.store is store})

    def _owners(self) -> list[Any]:
        """Who trains the parameters."""
        module: Any = self
        found = (AMBIENT.owners.get(parameter) for parameter in module.parameters())
        return [owner for owner in found if owner is not None]

    @property
    def _initialize_hook(self) -> Any:
        """What `torch.compile` and `torch.jit` ask a module for: a model as a whole is refused at once."""
        if vars(self)[CALLS].is_root:
            raise UsageError(
                "torch.compile or torch.jit of an engine, or of its whole model, at ZeRO stage 3, where parameters are "
                'gathered unit by unit: call engine.compile(), or set "compile": {"enabled": true}, which compiles '
                "each block; for torch.jit take the model after engine.destroy()"
            )
        raise AttributeError("_initialize_hook")

    def __deepcopy__(self, memo: Any) -> Any:
        """What `copy.deepcopy` calls."""
        raise UsageError(
            "a model whose parameters are sharded cannot be copied or pickled: copy it before initialize(), take whole "
            "values with mizzen.zero.safe_get_full_fp32_param, or save with engine.save_16bit_model or save_checkpoint"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save` and `pickle` call."""
        return self.__deepcopy__(None)


def is_unit_store(store: Any) -> bool:
    """Whether a store holds units."""
    return isinstance(vars(store).get("runtime"), UnitRuntime)


def lead(module: nn.Module) -> None:
    """Put our class in front of a module's own. Modules of one class get one class: a compiler looks at that."""
    kind = type(module)
    if issubclass(kind, UnitModule):
        return
    known = next((each for each in kind.__subclasses__() if issubclass(each, UnitModule)), None)
    facts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = known or type(kind.__name__, (UnitModule, kind), facts)


def let_go(module: nn.Module) -> None:
    """Give a module its own class again."""
    if isinstance(module, UnitModule):
        vars(module).pop(CALLS)
        own: Any = next(kind for kind in type(module).__mro__[1:] if not issubclass(kind, UnitModule))
        module.__class__ = own
