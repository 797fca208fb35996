"""What is done to a model before there is an engine: `zero.Init` shards its parameters while it is being built.

A module is built for real, with the user's random numbers, and its parameters are cut when it is done: when it becomes
part of another module, or at the end. What is then written to them, by nn.init or by a loader, is written to the
gathered parameter, which is cut again when the next one is touched. So the weights are those of the plain build, at any
number of ranks, and a rank never holds more than the module it is building and one parameter beside its shards.

No function of torch is replaced: torch's own hooks see parameters and modules arrive, and a `ShardedParameter` asks its
record what to do.

Below it is what a user says of a model before it is planned: which modules are one unit, who uses whose parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.comm import collectives, groups
from mizzen.comm.join import init_distributed
from mizzen.config.load import ConfigSource, load, read_source
from mizzen.errors import UsageError, expect
from mizzen.log import warn_once
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.offload.built_shards import keep_on
from mizzen.parallel.zero.full.sharded_parameter import (
    PROPERTIES,
    RECORD,
    ShardedParameter,
    chunk,
    find_record,
    gather_shards,
    is_sharded,
    record_of,
    shard_dim,
)


@dataclass(slots=True, eq=False)
class BuiltShard:
    """The record of a parameter that no engine has yet."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dim: int
    mesh: DeviceMesh
    shard: Tensor
    bench: "Bench"

    @property
    def stand(self) -> Tensor:
        """The shard itself."""
        return self.shard

    @property
    def is_gathered(self) -> bool:
        """Whether a context holds it whole."""
        return id(self) in self.bench.held

    def copy(self) -> Tensor:
        """Another parameter with its values: cut as it is, or whole while it is held."""
        self.bench.clear_but()
        wants = self.parameter.requires_grad
        if self.is_gathered:
            return nn.Parameter(self.bench.held[id(self)][1].clone(), requires_grad=wants)
        made = nn.Parameter(self.shard.new_empty(self.shape), requires_grad=wants)
        adopt_shard(made, self.name, self.bench.keep(self.shard), self.shape, self.bench)
        return made

    def use(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let everything work on the whole parameter."""
        bench, first = self.bench, args[0] if args else None
        if isinstance(first, ShardedParameter):
            if name in PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name == "data" and len(args) == 2:
                bench.replace(_early(first), args[1])
                return None
            if name == "detach" and not self.is_gathered:  # so that a state dict holds shards, not the whole model
                return _alias(first)
        wanted = [_early(each) for each in tensors_in((args, kwargs)) if isinstance(each, ShardedParameter)]
        bench.clear_but(wanted)
        args, kwargs = change_tensors((args, kwargs), bench.in_place_of)
        found = func(*args, **kwargs)
        return next((early.parameter for early in wanted if found is bench.whole(early)), found)


def _early(parameter: Tensor) -> BuiltShard:
    record = record_of(parameter)
    if not isinstance(record, BuiltShard):
        raise UsageError(
            f"'{record.name}' belongs to an engine, and cannot be used together with parameters that zero.Init has cut"
        )
    return record


def _alias(parameter: Tensor) -> Any:
    """Another object for the same shard."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Any = parameter.detach()
    found.__class__ = ShardedParameter
    vars(found)[RECORD] = record_of(parameter)
    return found


class Bench:
    """The parameters that are whole at the moment, and how others are cut."""

    def __init__(
        self,
        mesh: DeviceMesh,
        dtype: torch.dtype | None,
        device: torch.device,
        keep: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self.mesh = mesh
        self.dtype = dtype
        self.device = device
        """Where parameters are whole."""
        self.keep = keep
        """Brings a shard to where it rests until an engine has it."""
        self.group = mesh.get_group()
        self.open: dict[int, tuple[BuiltShard, Tensor]] = {}
        self.held: dict[int, tuple[BuiltShard, Tensor]] = {}
        """What is whole until a context ends, and may be touched by one rank alone meanwhile."""

    def cut(self, parameter: nn.Parameter, name: str) -> None:
        """Keep this rank's shard of a parameter, of which the first rank's values count."""
        dtype = self.dtype if self.dtype is not None and parameter.is_floating_point() else parameter.dtype
        whole = parameter.detach().to(self.device, dtype).contiguous()
        collectives.broadcast(whole, group=self.group, group_src=0)
        shard_parameter(parameter, name, whole, self)

    def whole(self, early: BuiltShard) -> Tensor:
        """All of a parameter, until another one is touched."""
        if id(early) in self.held:
            return self.held[id(early)][1]
        if id(early) not in self.open:
            self.open[id(early)] = early, gathered(early)
        return self.open[id(early)][1]

    def replace(self, early: BuiltShard, value: Tensor) -> None:
        """Set the data of a parameter, which keeps its shape and dtype."""
        if value.shape != early.shape:
            raise UsageError(
                f"a parameter that zero.Init has cut has shape {list(early.shape)}; the data given {list(value.shape)}"
            )
        if value.dtype != early.shard.dtype and self.dtype is None:
            warn_once(
                f"parameters that zero.Init has sharded stay {early.shard.dtype}: give zero.Init(dtype={value.dtype})"
            )
        self.whole(early).copy_(value)

    def in_place_of(self, tensor: Tensor) -> Tensor:
        """The whole one for a sharded one."""
        return self.whole(_early(tensor)) if isinstance(tensor, ShardedParameter) else tensor

    def clear_but(self, kept: Sequence[BuiltShard] = ()) -> None:
        """Cut again what is whole, with the first rank's values."""
        keys = {id(early) for early in kept}
        with torch.no_grad():
            for key in [key for key in self.open if key not in keys]:
                early, value = self.open.pop(key)
                collectives.broadcast(value, group=self.group, group_src=0)
                early.shard.copy_(part_of(value, early.dim, self.mesh))

    @contextmanager
    def hold(self, wanted: Sequence[BuiltShard], source: int | None) -> Iterator[None]:
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
                early.shard.copy_(part_of(value, early.dim, self.mesh))


def shard_parameter(parameter: nn.Parameter, name: str, whole: Tensor, bench: Bench) -> None:
    """Let a parameter keep its shard of a whole value alone."""
    dim = shard_dim(whole.shape, bench.mesh.size())
    adopt_shard(parameter, name, bench.keep(part_of(whole, dim, bench.mesh)), whole.shape, bench)


def adopt_shard(parameter: nn.Parameter, name: str, shard: Tensor, shape: torch.Size, bench: Bench) -> None:
    """Let a parameter be the one of which a rank has this shard."""
    empty = torch.empty(shape, dtype=shard.dtype, device=bench.device)
    empty.untyped_storage().resize_(0)
    parameter.grad = None
    parameter.data = empty
    dim = shard_dim(shape, bench.mesh.size())
    vars(parameter)[RECORD] = BuiltShard(name, parameter, shape, dim, bench.mesh, shard, bench)
    parameter.__class__ = ShardedParameter


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

    def finish(self, module: nn.Module) -> None:
        """A module is built: cut its parameters, and those of the modules inside."""
        for name, inner in module.named_modules():
            self.begun.pop(id(inner), None)
            self.done[id(inner)] = inner
            for own, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
                if can_be_cut(parameter):
                    self.bench.cut(parameter, f"{name}.{own}".lstrip("."))

    def _module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self.finish(child)

    def _parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or not can_be_cut(parameter):
            return
        if id(module) in self.done:
            self.bench.cut(parameter, name)
        else:
            self.begun[id(module)] = module


@contextmanager
def init_suspended() -> Iterator[None]:
    """Inside, no `zero.Init` cuts anything: an engine takes a model. What was built in one so far is done."""
    building, AMBIENT.building = AMBIENT.building, None
    if building is not None:
        building.stop()
    try:
        yield
    finally:
        AMBIENT.building = building
        if building is not None:
            building.start()


def can_be_cut(parameter: Tensor) -> bool:
    """Whether a parameter can be cut: it has dimensions and memory, and is whole and nobody's."""
    return bool(
        not isinstance(parameter, DTensor | UninitializedParameter)
        and not is_sharded(parameter)
        and AMBIENT.owners.get(parameter) is None
        and parameter.dim()
        and parameter.numel()
        and not parameter.is_meta
    )


@contextmanager
def held(parameters: Sequence[Tensor], source: int | None) -> Iterator[None]:
    """Keep those of some parameters whole that no engine has yet; all ranks enter and leave."""
    early = [record for each in parameters if isinstance(record := find_record(each), BuiltShard)]
    benches = {id(record.bench): record.bench for record in early}
    with ExitStack() as stack:
        for bench in benches.values():
            stack.enter_context(bench.hold([record for record in early if record.bench is bench], source))
        yield


def gathered(early: BuiltShard) -> Tensor:
    """All of a parameter, in a new tensor that wants no gradient."""
    with torch.no_grad():
        shard = early.shard.to(early.bench.device)
        return gather_shards(shard, early.shape, early.dim, early.mesh.get_group())


def make_whole(model: nn.Module, keep: frozenset[str] = frozenset()) -> None:
    """Let parameters of a model that `zero.Init` has cut be whole, except those of these names."""
    for name, parameter in model.named_parameters():
        if name not in keep:
            make_parameter_whole(parameter)


def make_parameter_whole(parameter: nn.Parameter) -> None:
    """Let a parameter be whole, if `zero.Init` has cut it."""
    early = find_record(parameter)
    if isinstance(early, BuiltShard):
        whole = gathered(early)
        parameter.__class__ = nn.Parameter
        parameter.data = whole
        del vars(parameter)[RECORD]


def part_of(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a whole tensor, by torch.chunk's rule."""
    first, last = chunk(whole.shape[dim], mesh)
    return whole.narrow(dim, first, last - first)


def early_shard(early: BuiltShard, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a parameter as it is cut over a mesh: its shard, where the ranks are the same."""
    ranks = [value.mesh.flatten().tolist() for value in (early.mesh, mesh)]
    if ranks[0] == ranks[1]:
        return early.shard
    whole = gathered(early)
    return part_of(whole, shard_dim(whole.shape, mesh.size()), mesh)


class ShardedInit:
    """A context in which modules are sharded as they are built, or, with a module, what shards it at once.

    Nested contexts are one. A configuration of another stage than 3, or one rank, leaves modules as they are; `dtype`
    is the dtype of the shards, which otherwise have that of the build. Shards rest on the remote device, or as the
    configuration says in `offload_param`; on one rank, too.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        group: Any = None,
        remote_device: str | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu", "nvme", get_accelerator().name):
            raise UsageError(f"zero.Init(remote_device={remote_device!r}): known are none, cpu and nvme")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(
                f"zero.Init(dtype={dtype!r}): give a torch dtype of floating point, such as torch.bfloat16"
            )
        expect(group, ProcessGroup | None, "a process group")
        expect(module, nn.Module | None, "a module")
        given = read_source(config) if config is not None else {}
        self.keep = keep_on(remote_device, load(given))
        section = given.get("zero_optimization")
        stage = section.get("stage", 3) if isinstance(section, Mapping) else 3
        self.is_wanted = enabled and stage in (3, "auto")
        self.dtype = dtype
        self.group = group
        self.building: Building | None = None
        self.depth = 0
        if module is not None and self.is_wanted:
            with self:
                if self.building is not None:
                    self.building.finish(module)

    def __enter__(self) -> "ShardedInit":
        """Modules that are built from here on are sharded."""
        self.depth += 1
        if self.is_wanted and AMBIENT.building is None:
            init_distributed(verbose=False)
            if groups.get_world_size(self.group) > 1 or self.keep is not None:
                accelerator = get_accelerator()
                everyone: Any = torch.distributed.group.WORLD
                # Without names: clients (PEFT) take a tensor on a mesh that has some for one that is computed in parts.
                mesh = DeviceMesh.from_group(self.group or everyone, accelerator.name)
                bench = Bench(mesh, self.dtype, accelerator.device(), self.keep or torch.clone)
                self.building = AMBIENT.building = Building(bench)
                self.building.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever is not sharded yet is; after an error everything stays as it is."""
        self.depth -= 1
        if self.building is not None and not self.depth:
            building, self.building, AMBIENT.building = self.building, None, None
            building.stop(finish=error is None)


def register_use(module: nn.Module, parameter: Tensor) -> None:
    """Note that a module uses a parameter that it does not hold."""
    expect(module, nn.Module, "a module")
    expect(parameter, nn.Parameter, "a parameter")
    if (record := find_record(parameter)) is not None:
        raise UsageError(
            f"'{record.name}' is sharded already: register_external_parameter comes before initialize, best "
            "in the __init__ of the module that uses it"
        )
    AMBIENT.externals.set(parameter, module)


def unregister_use(parameter: Tensor) -> None:
    """Take that back."""
    AMBIENT.externals.remove(parameter)


def pin(module: nn.Module, is_pinned: bool = True) -> None:
    """Let a module be one unit of gathering, or not."""
    expect(module, nn.Module, "a module")
    if any(find_record(parameter) is not None for parameter in module.parameters()):
        warn_once("modules that are pinned as units, or no longer, after initialize() are heeded by the next one only")
    if is_pinned:
        AMBIENT.leaves.set(module, module)
    else:
        AMBIENT.leaves.remove(module)


def is_pinned(module: nn.Module) -> bool:
    """Whether somebody has pinned it."""
    return AMBIENT.leaves.get(module) is not None


def is_in_pinned(parameter: Tensor) -> bool:
    """Whether a parameter is of a module that somebody has pinned."""
    return any(parameter is each for module in AMBIENT.leaves.owners() for each in module.parameters())


def find(
    model: nn.Module, wanted: Sequence[type | str], *, how: str = "class", must_be_there: bool = True
) -> list[nn.Module]:
    """The modules of these classes, or of these names or ends of names, each once."""
    expect(model, nn.Module, "a module")
    expect(wanted, list | tuple | set, f"a list of {how}es" if how == "class" else f"a list of {how}s")
    found: dict[int, nn.Module] = {}
    for entry in wanted:
        expect(entry, type | str, f"a {how}")
        matches = [module for name, module in model.named_modules() if _matches(name, module, entry, how)]
        if not matches and must_be_there:
            raise UsageError(f"no module of {type(model).__name__} has the {how} {_quoted(entry)}")
        found |= {id(module): module for module in matches}
    return list(found.values())


def _matches(name: str, module: nn.Module, entry: type | str, how: str) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kind = type(module)
    if how == "class":
        return entry in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return name == entry or (how == "suffix" and name.endswith(entry))


def _quoted(entry: type | str) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)
