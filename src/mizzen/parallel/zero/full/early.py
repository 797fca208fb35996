"""Parameters that are sharded while a model is being built, before there is an engine: what `zero.Init` does.

A module is built for real, with the user's random numbers, and its parameters are cut when it is done: when it becomes
part of another module, or at the end. What is then written to them, by nn.init or by a loader, is written to the
gathered parameter, which is cut again when the next one is touched. So the weights are those of the plain build, at any
number of ranks, and a rank never holds more than the module it is building and one parameter beside its shards.

No function of torch is replaced: torch's own hooks see parameters and modules arrive, and an `Early` parameter answers
for itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from mizzen.ambient import AMBIENT
from mizzen.comm import collectives
from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.parallel.zero.full.live import gather_shards, local
from mizzen.parallel.zero.full.sharded import CALLS, FACTS, Moved, carry, move, property_of
from mizzen.parallel.zero.full.units import shard_dim


class Early(DTensor):
    """A parameter of which this rank holds a shard, in a model that no engine has yet."""

    bench: ClassVar["Bench | None"] = None
    """Where it is gathered when it is touched."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let everything but facts work on the whole parameter."""
        kwargs = kwargs or {}
        name = property_of(func)
        if (name in FACTS and len(args) == 1) or name in CALLS - {"detach"} or name in ("grad", "requires_grad"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        bench = next(type(value).bench for value in tensors_in((args, kwargs)) if isinstance(value, Early))
        if bench is None:
            raise AssertionError("an early parameter without a bench")
        if name == "detach" and id(args[0]) not in bench.held:  # so that a state dict holds shards, not the whole model
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args)
            found.__class__ = type(args[0])
            return found
        if name == "__deepcopy__":
            return bench.copied(*args)
        if name == "data" and len(args) == 2:
            bench.replace(args[0], args[1])
            return None
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [value for value in tensors_in((args, kwargs)) if isinstance(value, Early)]
            bench.clear_but(wanted)
            args, kwargs = change_tensors((tuple(args), dict(kwargs)), bench.in_place_of)
        found = func(*args, **kwargs)
        return next((early for early in wanted if found is bench.whole(early)), found)


class Bench:
    """The parameters that are whole at the moment, and how others are cut."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype | None, device: torch.device) -> None:
        self.mesh = mesh
        self.dtype = dtype
        self.device = device
        self.group = mesh.get_group()
        self.kind: Any = type("Early", (Early,), {"bench": self})
        self.open: dict[int, tuple[Any, Tensor]] = {}
        self.held: dict[int, tuple[Any, Tensor]] = {}
        """What is whole until a context ends, and may be touched by one rank alone meanwhile."""
        self.known: dict[int, tuple[Tensor, Any]] = {}
        """What became of parameters that were cut: the emptied object, and the sharded one."""

    def cut(self, parameter: Tensor, label: str) -> Any:
        """The shard of a parameter of which the first rank's values count; the object itself is emptied."""
        if id(parameter) in self.known:
            return self.known[id(parameter)][1]
        dtype = self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype
        whole = parameter.detach().to(self.device, dtype).contiguous()
        collectives.broadcast(whole, group=self.group, group_src=0)
        dim = shard_dim(whole.shape, self.mesh.size())
        placements = [Shard(dim)]
        shard = _chunk(whole, dim, self.mesh).clone()
        made: Any = DTensor.from_local(
            shard, self.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        early = nn.Parameter(made, requires_grad=parameter.requires_grad)
        carry(parameter, early)
        early.__class__ = self.kind
        if isinstance(parameter, nn.Parameter):
            move(parameter, label, "zero.Init sharded it")
        self.known[id(parameter)] = parameter, early
        return early

    def whole(self, early: Any) -> Tensor:
        """All of a parameter, until another one is touched."""
        if id(early) in self.held:
            return self.held[id(early)][1]
        if id(early) not in self.open:
            self.open[id(early)] = early, gathered(early)
        return self.open[id(early)][1]

    def copied(self, early: Any, memo: dict[int, Any]) -> Any:
        """Another parameter with its values: cut as it is, or whole while it is held."""
        if id(early) not in memo:
            self.clear_but()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                shard = DTensor.clone(early)
                made = nn.Parameter(self.held[id(early)][1].clone() if id(early) in self.held else shard)
                made.requires_grad_(early.requires_grad)
            if isinstance(made, DTensor):
                made.__class__ = self.kind
            memo[id(early)] = made
        return memo[id(early)]

    def replace(self, early: Any, value: Tensor) -> None:
        """Set the data of a parameter, which keeps its shape and dtype."""
        if value.shape != early.shape:
            raise UsageError(
                f"a parameter that zero.Init has cut has shape {list(early.shape)}; the data given {list(value.shape)}"
            )
        if value.dtype != early.dtype and self.dtype is None:
            warn_once(f"parameters that zero.Init has sharded stay {early.dtype}: give zero.Init(dtype={value.dtype})")
        self.whole(early).copy_(value)

    def in_place_of(self, tensor: Tensor) -> Tensor:
        """The whole one for an early one."""
        return self.whole(tensor) if isinstance(tensor, Early) else tensor

    def clear_but(self, kept: Sequence[Any] = ()) -> None:
        """Cut again what is whole, with the first rank's values."""
        keys = {id(early) for early in kept}
        with torch.no_grad():
            for key in [key for key in self.open if key not in keys]:
                early, value = self.open.pop(key)
                collectives.broadcast(value, group=self.group, group_src=0)
                self._cut_again(early, value)

    @contextmanager
    def hold(self, wanted: Sequence[Any], source: int | None) -> Iterator[None]:
        """Keep parameters whole; at the end they are cut with the values of the rank `source`, or left as they were."""
        self.clear_but()
        asked = {id(early): early for early in wanted}
        new = [key for key in asked if key not in self.held]
        self.held |= {key: (asked[key], gathered(asked[key])) for key in new}
        mine = [self.held[key] for key in asked]
        try:
            yield
        finally:
            for key in new:
                del self.held[key]
        with torch.no_grad():
            for early, value in mine if source is not None else ():
                collectives.broadcast(value, source, group=self.group)
                self._cut_again(early, value)

    def _cut_again(self, early: Any, value: Tensor) -> None:
        local(early).copy_(_chunk(value, early.placements[0].dim, self.mesh))


class Building:
    """Sees modules and parameters arrive, from `start` to `stop`."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.begun: dict[int, nn.Module] = {}
        """Modules that have parameters and are not done yet."""
        self.done: dict[int, nn.Module] = {}
        self.handles: list[RemovableHandle] = []

    def start(self) -> None:
        """From here on."""
        self.handles = [
            register_module_module_registration_hook(self._module),
            register_module_parameter_registration_hook(self._parameter),
        ]

    def stop(self, *, finish: bool = True) -> None:
        """Look away; cut what is left, unless the build has failed."""
        for handle in self.handles:
            handle.remove()
        for module in list(self.begun.values()) if finish else ():
            self.finish(module)
        if finish:
            self.bench.clear_but()
        self.begun.clear()
        self.done.clear()
        self.bench.known.clear()

    def finish(self, module: nn.Module) -> None:
        """A module is built: cut its parameters, and those of the modules inside."""
        for name, inner in module.named_modules():
            self.begun.pop(id(inner), None)
            self.done[id(inner)] = inner
            for own, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
                if fits(parameter) or id(parameter) in self.bench.known:
                    inner.register_parameter(own, self._cut(parameter, f"{name}.{own}".lstrip(".")))

    def _module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.finish(child)

    def _parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or not fits(parameter):
            return None
        if id(module) in self.done:
            return self._cut(parameter, name)
        self.begun[id(module)] = module
        return None

    def _cut(self, parameter: Tensor, label: str) -> Any:
        """Cut a parameter, also where modules that are not done yet have it."""
        early = self.bench.cut(parameter, label)
        for module in list(self.begun.values()):
            for own, other in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if other is parameter:
                    module.register_parameter(own, early)
        return early


@contextmanager
def built() -> Iterator[None]:
    """While an engine takes a model no `zero.Init` cuts anything; what was built in one so far is done."""
    building, AMBIENT.building = AMBIENT.building, None
    if building is not None:
        building.stop()
    try:
        yield
    finally:
        AMBIENT.building = building
        if building is not None:
            building.start()


def fits(parameter: Tensor) -> bool:
    """Whether a parameter can be cut: it has dimensions and memory, and is whole and nobody's."""
    return bool(
        not isinstance(parameter, DTensor | Moved | UninitializedParameter)
        and AMBIENT.owners.get(parameter) is None
        and parameter.dim()
        and parameter.numel()
        and not parameter.is_meta
    )


@contextmanager
def held(parameters: Sequence[Tensor], source: int | None) -> Iterator[None]:
    """Keep those of some parameters whole that are early; all ranks enter and leave."""
    benches = {id(bench): bench for each in parameters if isinstance(each, Early) and (bench := type(each).bench)}
    with ExitStack() as stack:
        for bench in benches.values():
            stack.enter_context(bench.hold([each for each in parameters if isinstance(each, bench.kind)], source))
        yield


def gathered(early: Any) -> Tensor:
    """All of a parameter, in a new tensor that wants no gradient."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        mesh, dim = early.device_mesh, early.placements[0].dim
        return gather_shards(local(early), list(early.shape), dim, mesh.get_group())


def make_whole(model: nn.Module, keep: frozenset[str] = frozenset()) -> None:
    """Give a model plain parameters for its early ones, except those of these names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, Early) and names[id(parameter)] not in keep:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(gathered(parameter), requires_grad=parameter.requires_grad)
                    carry(parameter, made[id(parameter)])
                module.register_parameter(own, made[id(parameter)])


def _chunk(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part, by torch.chunk's rule."""
    each = -(-whole.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * each, whole.shape[dim])
    return whole.narrow(dim, start, min(each, whole.shape[dim] - start))


def take_out(model: nn.Module, early: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Put parameters without memory in the place of early ones, under all their names; returns them by name."""
    stand_ins = {
        id(parameter): (name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")))
        for name, parameter in early.items()
    }
    for parameter in early.values():
        stand_ins[id(parameter)][1].requires_grad_(parameter.requires_grad)
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in stand_ins:
                module.register_parameter(own, stand_ins[id(parameter)][1])
    return dict(stand_ins.values())


def recut(early: Any, mesh: DeviceMesh) -> DTensor:
    """The same parameter as it is cut over this mesh: as it is where the ranks are the same."""
    ranks = [value.mesh.flatten().tolist() for value in (early.device_mesh, mesh)]
    if ranks[0] == ranks[1]:
        found: DTensor = early
        return found
    whole = gathered(early)
    dim = shard_dim(whole.shape, mesh.size())
    shard = _chunk(whole, dim, mesh).clone()
    return DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
