"""What happens around the calls of modules that are units, and where a backward comes by.

[Note: around the call]
A module that is a unit gets a class of ours in front of its own, whose `__call__` does what is to be done before and
after. So hooks of the user, and whatever `module.compile()` has made, run inside, and the compiler never sees ours.

[Note: where a backward enters and leaves a unit]
It enters where it comes to the node behind an output, before that node runs; and it has left the unit once it has run
the node behind each input: a view of the input, made before the call. A view may be changed in place, and then, or
where no input needs a gradient, the end of the whole backward is where the unit is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.model.wrapper import LateTensor
from mizzen.parallel.zero.full.runtime import UnitRuntime, is_transformed
from mizzen.parallel.zero.full.unit import LiveUnit

CALLS: Final = "_unit_calls"
"""Under this name a module has its `UnitCalls`."""


@dataclass(slots=True, eq=False)
class UnitCall:
    """One call of a module that a backward may come back to."""

    units: Sequence[LiveUnit]
    previous: Sequence[LiveUnit] = ()
    """The units of the call before, which the backward comes to next."""
    earlier: Sequence[LiveUnit] = ()
    """Those of the call before that one."""
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
                has_backward = torch.is_grad_enabled() and not is_transformed()
                for unit in self.units:
                    runtime.gather(unit, keep_second=has_backward and not unit.is_root)
                    runtime.gather_ahead(runtime.following[id(unit)], runtime.beyond[id(unit)])
                if has_backward and not self.is_root:
                    args, kwargs = change_tensors((args, kwargs), partial(self._watched, call))
                runtime.is_differentiated |= torch.is_grad_enabled() and is_transformed()
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
        if torch.is_grad_enabled() and not is_transformed():
            nodes = {id(node): node for node in _nodes(inputs, output)}
            for node in nodes.values():
                node.register_prehook(lambda *_: self._reached(call))
            if nodes:
                call.previous, call.earlier = runtime.previous, runtime.earlier
                runtime.previous, runtime.earlier = self.units, runtime.previous
        for unit in self.units:
            if not unit.is_root:
                runtime.free_unit(unit)
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
            runtime.gather_ahead(call.previous, call.earlier)

    def compute_late(self, output: Any) -> None:
        """Compute what the model has left for later, where all of it is sharded again after this call."""
        if self.is_root and not torch.is_grad_enabled():
            for each in _tensors_of(output):
                if isinstance(each, LateTensor):
                    each.computed()

    def failed(self) -> None:
        """The module has raised an error."""
        self.stack.pop()
        for unit in self.units:
            if not unit.in_backward:
                self.runtime.free_unit(unit)
        self.runtime.exit(self.units)


def _tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output, also of an object's."""
    is_object = not isinstance(output, Tensor | tuple | list | dict) and hasattr(output, "__dict__")
    return [*tensors_in(output), *(tensors_in(vars(output)) if is_object else ())]


def _nodes(inputs: Any, output: Any) -> list[Any]:
    """The nodes behind the tensors of an output, also of an object's, and behind what these are views of.

    Who changes a view in place works on the tensor behind it, whose node is then the one that a backward comes to. What
    is behind an input is not the unit's own. A tensor that computes its values when it is used is not used here.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = _tensors_of(output)
        foreign = {id(each if each._base is None else each._base) for each in tensors_in(inputs)}
        bases = [each._base for each in found if each._base is not None and id(each._base) not in foreign]
        return [each.grad_fn for each in (*found, *bases) if each.grad_fn is not None]


class UnitModule:
    """Comes before the own class of a module that is a unit, while an engine has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module between a gather and a free."""
        calls: UnitCalls = vars(self)[CALLS]
        args, kwargs = calls.before(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            calls.compute_late(output)
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


def lead(runtime: UnitRuntime, unit: LiveUnit) -> None:
    """Put our class in front of the own one of a unit's module, which may have units in several sets.

    Modules of one class get one class: a compiler looks at that.
    """
    module: nn.Module = unit.module
    vars(module).setdefault(CALLS, UnitCalls(runtime, [])).units.append(unit)
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


def watch_parts(units: Sequence[LiveUnit], runtime: UnitRuntime) -> list[RemovableHandle]:
    """Hear of calls of parts of a model: in evaluation one may be called alone, as an encoder is before generation."""
    root, *others = units
    inside = {id(module) for unit in others for module in unit.module.modules()}
    parts = [module for module in root.module.modules() if module is not root.module and id(module) not in inside]

    def enter(*_: Any) -> None:
        if not torch.is_grad_enabled():
            runtime.enter((root,))

    def leave(*_: Any) -> None:
        if not torch.is_grad_enabled():
            runtime.exit((root,))

    return [
        handle
        for part in parts
        for handle in (
            part.register_forward_pre_hook(enter, prepend=True),
            part.register_forward_hook(leave, always_call=True),
        )
    ]
