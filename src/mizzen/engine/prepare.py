"""What happens to a model before its plan is applied: it moves to the device, and every rank gets rank 0's values."""

import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.accelerator import get_accelerator
from mizzen.comm import collectives, groups
from mizzen.comm.fingerprint import compare, sum_of_bits
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.optimizer import UNBUILT
from mizzen.config.resolve import check_filled_in
from mizzen.config.schema import Config, as_json
from mizzen.data.loader import LoaderFactory
from mizzen.engine.meta_weights import fill_from_files
from mizzen.engine.randomness import RandomStream
from mizzen.environment import World
from mizzen.errors import ConfigError, MizzenError, UsageError
from mizzen.log import warn_once
from mizzen.model.home import Site
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.monitor.build import build_observers
from mizzen.monitor.report import Observer
from mizzen.optim.build import build_optimizer, build_scheduler, param_groups, tell_slips
from mizzen.optim.rules import is_known, joins_parts, whole_groups
from mizzen.parallel.zero.full.calls import UnitModule
from mizzen.parallel.zero.full.init import make_parameter_whole, make_whole
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from mizzen.parallel.zero.reduce import torch_dtype
from mizzen.plan.build import Plan
from mizzen.plan.explain import facts_of
from mizzen.precision.arithmetic import check_device
from mizzen.precision.policy import Policy
from mizzen.wording import and_more

WRAPPERS: Final = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "what is inside it, its .module",
    "torch.nn.parallel.data_parallel.DataParallel": "what is inside it, its .module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "the model as it was before",
    "torch.distributed.fsdp.FSDPModule": "the model as it was before fully_shard()",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": "the model as it was before fully_shard()",
    "torch.distributed._composable.replicate.DDP": "the model as it was before replicate()",
    "apex.parallel.distributed.DistributedDataParallel": "what is inside it, its .module",
    "mizzen.engine.engine.Engine": "what is inside it, its .module",
}
"""Classes of modules that see to gradients or shards themselves, with what to give instead."""


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse a model in which something else already sums gradients or shards parameters."""
    for name, module in model.named_modules():
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
        kind = next((kind for kind in kinds if kind in WRAPPERS), None)
        if kind is not None and not isinstance(module, UnitModule):  # that one is ours, of an earlier engine
            place = f"'{name}' in the model is" if name else "model= is"
            raise UsageError(
                f"{place} wrapped: it is of {kind.rpartition('.')[2]}, which sums gradients or shards parameters "
                f"itself, as an engine does. Give initialize() {WRAPPERS[kind]}"
            )


def without_needless_offload(config: Config) -> Config:
    """A configuration that does not offload to the host where training runs there: what would move is there already."""
    zero = config.zero_optimization
    sections = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    needless = [name for name, section in sections.items() if section is not None and section.device == "cpu"]
    if not get_accelerator().shares_host_memory or not needless:
        return config
    for name in needless:
        warn_once(f"zero_optimization.{name} to the cpu has no effect here: training runs on the cpu")
    if zero.zenflow is not None and "offload_optimizer" in needless:
        warn_once("zero_optimization.zenflow has no effect here: training runs on the cpu, with all states there")
        needless.append("zenflow")
    offload = config.offload
    if offload is not None and offload.step_in_backward and "offload_optimizer" in needless:
        warn_once("offload.step_in_backward has no effect here: training runs on the cpu, with all states there")
        offload = offload.model_copy(update={"step_in_backward": False})
    zero = zero.model_copy(update=dict.fromkeys(needless))
    return config.model_copy(update={"zero_optimization": zero, "offload": offload})


def warn_of_slow_links(layout: Layout, world: World) -> None:
    """Say so where ranks that share each matrix are on several nodes: tensor-parallel ranks are neighbours."""
    if layout.tp > 1 and world.local_size % layout.tp:
        warn_once(
            f"tensor parallelism over {layout.tp} ranks goes beyond a node, which has {world.local_size} of them: "
            "every layer exchanges its activations between nodes. Take a size that divides the ranks of a node, and "
            "ZeRO or a pipeline between nodes"
        )


def compare_plans(plan: Plan) -> None:
    """All ranks compare what they are about to do, in one exchange; a rank that differs is named with the field."""
    for note in plan.notes:
        warn_once(note)
    if plan.resolved.layout.world == 1:
        return
    compare(
        {
            **json.loads(as_json(plan.resolved.config)),
            "model": plan.sketch.fingerprint(),
            "mizzen": version_of("mizzen"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        layout=plan.resolved.layout,
    )


@cache
def version_of(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def move_to_device(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Move a model to the device; its frozen parameters and buffers get their dtype and rank 0's values.

    Trained parameters get theirs when the plan moves them into their buffers, from the values as they are here.
    """
    check_device(plan.resolved.config, get_accelerator())
    policy, device = Policy.of(plan.resolved.config), get_accelerator().device()
    cut = plan.cut_here
    late = plan.moved_by_apply - cut.keys()
    make_whole(model, keep=late | cut.keys())
    filled = fill_from_files(model, plan, mesh)
    _check_memory(model)
    if cut:
        _keep_parts(model, {name: each for name, each in cut.items() if name not in filled}, mesh, late | filled)
    if late:
        _move_apart(model, device, late)
    else:
        model.to(device)
    trained = late | {name for p in plan.sketch.parameters if p.is_trained for name in p.names}
    for name, parameter in model.named_parameters():
        if name not in trained and policy.parameters and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch_dtype(policy.parameters))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if policy.buffers and buffer.is_floating_point():
                setattr(module, name, buffer.to(torch_dtype(policy.buffers)))
    if plan.resolved.layout.world > 1:
        rest = [parameter for name, parameter in model.named_parameters() if name not in trained]
        _broadcast([*rest, *model.buffers()], mesh)


def _keep_parts(model: nn.Module, cut: Mapping[str, ParameterSketch], mesh: Mesh, late: Collection[str]) -> None:
    """Keep this rank's part of what is cut, one parameter after the other: a model need never be whole on the device.

    Values are those of the first of the ranks that share a parameter, and so are those of what these ranks have alike.
    """
    device = get_accelerator().device()
    axes = {axis: None for p in cut.values() for axis in _site(p, mesh).cut_axes}
    shared = [mesh.group(axis) for axis in axes]
    for name, parameter in model.named_parameters():
        if name in late:
            continue
        if (sketch := cut.get(name)) is None:
            parameter.data = _of_the_first(parameter.data.to(device), shared)
            continue
        make_parameter_whole(parameter)
        whole = _of_the_first(parameter.data.to(device), shared)
        parameter.data = _site(sketch, mesh).part_of(whole).clone(memory_format=torch.contiguous_format)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _of_the_first(buffer.to(device), shared))


def _site(parameter: ParameterSketch, mesh: Mesh) -> Site:
    return Site(parameter.shape, parameter.home, mesh.layout, mesh.rank)


def _of_the_first(tensor: Tensor, shared: Iterable[Any]) -> Tensor:
    """The value that the first rank of each of these groups has."""
    value = tensor.contiguous()
    for group in shared:
        collectives.broadcast(value, groups.get_global_rank(group, 0), group=group)
    return value


def _check_memory(model: nn.Module) -> None:
    """Refuse a model without values: nobody but the user knows what they should be."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise UsageError(
            f"{and_more(empty, 3)}: no values on the meta "
            "device. Build the model on a real one, in mizzen.zero.Init where it is too large for that, name the "
            "folder of its weights as checkpoint.weights, or call model.to_empty(device=...) and fill it"
        )


def _move_apart(model: nn.Module, device: torch.device, late: frozenset[str]) -> None:
    """Move everything to the device but parameters that their transform moves, one unit after the other."""
    for name, parameter in model.named_parameters():
        if name not in late:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def check_equal(model: nn.Module, mesh: Mesh, elsewhere: Collection[str] = ()) -> None:
    """Make sure that ranks of one part of the model have the same of it; one that differs is named with the tensor.

    What lives elsewhere than the rest, as experts do, has its values from the first rank that holds it.
    """
    if mesh.layout.same_model == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    tensors = [
        (name, tensor)
        for name, tensor in tensors
        if not is_sharded(tensor) and name not in elsewhere  # shards differ
    ]
    sums = {name: sum_of_bits(tensor) for name, tensor in tensors}
    values = torch.stack(list(sums.values())).tolist() if sums else []
    compare({name: str(value) for name, value in zip(sums, values, strict=True)}, mesh.same_model_group, mesh.layout)


def _broadcast(tensors: Iterable[Tensor], mesh: Mesh) -> None:
    group = mesh.same_model_group
    source = groups.get_global_rank(group, 0)
    for tensor in tensors:
        data = tensor.detach()
        whole = data if data.is_contiguous() else data.contiguous()
        collectives.broadcast(whole, source, group=group)
        if whole is not data:
            data.copy_(whole)


def seed_of(config: Config, mesh: Mesh) -> int:
    """The seed of the run: the `seed` key or, absent, rank 0's own."""
    seed = torch.tensor(config.seed if config.seed is not None else torch.initial_seed() % (1 << 62))
    world = mesh.layout.world
    if world > 1:
        on_device = seed.to(get_accelerator().device())
        collectives.broadcast(on_device, 0)
        seed = on_device.cpu()
    return int(seed)


def stream_of(config: Config, seed: int, mesh: Mesh) -> RandomStream:
    """The random numbers of the model: torch's own if asked for, and where one rank trains without a seed."""
    if config.dropout_stream == "torch" or (config.seed is None and mesh.layout.world == 1):
        return RandomStream(None)
    return RandomStream(seed, mesh.drawing)


def loaders_of(plan: Plan, mesh: Mesh, seed: int) -> LoaderFactory:
    """What makes this rank's loaders."""
    return LoaderFactory(
        seed=seed,
        rank=mesh.data_rank,
        ranks=plan.resolved.layout.dp,
        accumulation=plan.resolved.batch.accumulation,
        drop_last=plan.resolved.config.dataloader_drop_last,
        device_type=get_accelerator().name,
    )


def choose_optimizer(
    given: Optimizer | Callable[[Any], Optimizer] | None,
    config: Config,
    model: nn.Module,
    sketch: Sketch,
    model_parameters: Iterable[Any] | None = None,
) -> Optimizer | None:
    """The optimizer of a run: an object, what a callable makes, the one that the configuration names, or none."""
    if given is None and config.optimizer is None:
        return None
    groups, placed = param_groups(model, given.param_groups if isinstance(given, Optimizer) else model_parameters)
    if not placed:
        raise UsageError("nothing to train: no parameter of the model, or of model_parameters=, requires a gradient")
    if given is None and config.optimizer is not None:
        sketches = sketch.by_name()
        return build_optimizer(
            config.optimizer.type,
            dict(config.optimizer.params),
            groups,
            device_type=get_accelerator().name,
            facts={id(parameter): sketches[name] for name, parameter in model.named_parameters()},
        )
    made = given if isinstance(given, Optimizer) else given(groups) if callable(given) else given
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer= is a torch optimizer or a callable that makes one; it gave a {type(made).__name__}"
        )
    if (why := UNBUILT.get(type(made).__name__.lower())) is not None:
        raise UsageError(f"optimizer= is {type(made).__name__}, which is not built yet: {why}")
    return made


def with_current_parameters(given: Any, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> Any:
    """An optimizer or `model_parameters` of a model that an earlier engine had, with the parameters of now."""
    new = {id(old): parameter for old, parameter in replaced}

    def renew(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            return new.get(id(entry), entry)
        if isinstance(entry, Mapping):
            return {**entry, "params": renew(entry["params"])} if "params" in entry else entry
        return type(entry)(map(renew, entry)) if isinstance(entry, list | tuple) else entry

    if isinstance(given, Optimizer):
        given.param_groups[:] = renew(given.param_groups)
        return given
    return renew(list(given)) if isinstance(given, Iterable) and not isinstance(given, Tensor | Mapping) else given


def with_optimizer_groups(sketch: Sketch, model: nn.Module, optimizer: Optimizer | None) -> Sketch:
    """A sketch that says what is to be trained, and which of it the optimizer needs whole."""
    if optimizer is None:  # what nobody trains is sharded as frozen parameters are
        return sketch.with_groups({}).frozen()
    _, placed = param_groups(model, optimizer.param_groups)
    return sketch.with_groups(placed, whole_groups(optimizer), joins=joins_parts(optimizer))


def check_optimizer(optimizer: Optimizer | None, plan: Plan) -> None:
    """Refuse to share out parameters among ranks for a rule that may look at all of them together."""
    if optimizer is not None:
        tell_slips(optimizer)
    config, layout = plan.resolved.config, plan.resolved.layout
    stage = config.zero_optimization.stage
    is_shared = stage > 0 and layout.same_model > 1
    if optimizer is not None and is_shared and stage > 1 and not config.is_given("gradient_clipping"):
        warn_once(
            f"at ZeRO stage {stage} p.grad is None after backward: torch.nn.utils.clip_grad_norm_ on parameters and "
            f"edits of p.grad have no effect. Gradients are clipped at a norm of {config.gradient_clipping:g}, the "
            "default of gradient_clipping: set that key; mizzen.zero.safe_set_full_grad changes a gradient"
        )
    if optimizer is None or not is_shared or is_known(optimizer) or config.zero_allow_untested_optimizer:
        return
    raise ConfigError(
        "zero_allow_untested_optimizer",
        f"{type(optimizer).__name__} is not known to treat each parameter by itself, and at stage "
        f"{stage} every rank steps only its share of them; set this key to true if it does, "
        "or use stage 0",
    )


def choose_scheduler(given: Any, config: Config, optimizer: Optimizer | None) -> Any:
    """The learning-rate schedule of a run: an object, what a callable makes, or the one that is configured."""
    if optimizer is None:
        if given is not None:
            raise UsageError("lr_scheduler= without an optimizer: name one in the configuration, or give one")
        if config.scheduler is not None:
            warn_once("scheduler has no effect here: this engine has no optimizer, so it does not train")
        return None
    if given is None:
        if config.scheduler is None or config.scheduler.type is None:
            return None
        check_filled_in(config)
        return build_scheduler(config.scheduler.type, dict(config.scheduler.params), optimizer)
    if "step" in dir(given):
        attached = vars(given).get("optimizer")
        if attached is not None and attached is not optimizer:
            raise UsageError(
                "lr_scheduler= belongs to another optimizer than the one in use: give a callable that makes the "
                "schedule from the optimizer it gets, or give optimizer= as well"
            )
        return given
    if callable(given):
        return given(optimizer)
    raise UsageError(f"lr_scheduler= has a step() or is a callable that makes one; this is a {type(given).__name__}")


def observers_of(plan: Plan, world: World) -> tuple[Observer, ...]:
    """What is told of each step. Rank 0 alone writes numbers; what keeps it from that is raised on every rank."""
    observers: tuple[Observer, ...] = ()
    said: list[MizzenError | None] = [None]
    try:
        config = plan.resolved.config
        is_shown = world.rank == 0 and config.jsonl_monitor.enabled
        observers = build_observers(config, world, facts_of(plan) if is_shown else None)
    except MizzenError as error:
        said = [error]
    if world.size > 1:
        collectives.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise said[0]
    return observers
