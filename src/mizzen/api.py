"""The composition root: from a model and a configuration to an engine, one arrow after the other."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mizzen.accelerator import get_accelerator
from mizzen.comm.join import init_distributed
from mizzen.comm.mesh import Mesh, check_groups, layout_from_mpu
from mizzen.config.load import ConfigSource, load, read_source
from mizzen.config.resolve import at_world, split_degree
from mizzen.config.schema import Config
from mizzen.engine.access import release_model
from mizzen.engine.budgets import with_budgets
from mizzen.engine.build import build_engine
from mizzen.engine.engine import Engine, EngineComponents
from mizzen.engine.prepare import (
    check_equal,
    check_optimizer,
    choose_optimizer,
    choose_scheduler,
    compare_plans,
    loaders_of,
    move_to_device,
    observers_of,
    refuse_wrapped,
    seed_of,
    stream_of,
    warn_of_slow_links,
    with_current_parameters,
    with_optimizer_groups,
    without_needless_offload,
)
from mizzen.engine.runner import Accumulate
from mizzen.engine.status import RunContext
from mizzen.environment import World
from mizzen.errors import ConfigError, UsageError
from mizzen.log import LEVELS, set_level
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.monitor.terminal import dump_state
from mizzen.order import ORDER
from mizzen.parallel.pipeline.module import LayeredModule, PipelineOptions
from mizzen.parallel.pipeline.profile import profile_blocks, profile_layers
from mizzen.parallel.zero.full.init import init_suspended
from mizzen.plan.build import build
from mizzen.plan.parts import Part

Setup = tuple[Engine, Optimizer | None, Any, Any]


@init_suspended()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: ConfigSource | None = None,
    *,
    make_engine: Callable[[EngineComponents, RunContext], Engine] = Engine,
    defaults: Mapping[str, Any] | None = None,
) -> Setup:
    """An engine for a model, with its optimizer, data loader and learning-rate schedule.

    `config` is a dict, a path, JSON text or base64; it may also come as `args.deepspeed_config` or `config_params`.
    An optimizer, or a callable that makes one from parameter groups, takes the place of the one in the configuration.
    `make_engine` is a subclass of Engine, or makes one; `defaults` are keys for a configuration that lacks them.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize() needs model=, an nn.Module; it got {type(model).__name__}")
    refuse_wrapped(model)
    source = _only_source(args, config, config_params)
    given = read_source(source)
    _listen(given.get("log_level"))
    given = {**(defaults or {}), **given}
    given |= _degrees_of_model(model, given)
    settings = load(given | _degrees_of_mesh(mesh_param))
    world = _join(settings, distributed_port, dist_init_required)
    if mpu is not None:
        settings = load(given | _degrees_of_mpu(mpu, world.size))
    settings = at_world(settings, world.size)
    if replaced := release_model(model):
        optimizer = with_current_parameters(optimizer, replaced)
        model_parameters = with_current_parameters(model_parameters, replaced)
    if isinstance(model, LayeredModule):
        profile_layers(model, settings)
    sketch = profile_blocks(sketch_of(model, settings), model, settings, world.size)
    chosen = choose_optimizer(optimizer, settings, model, sketch, model_parameters)
    sketch = with_optimizer_groups(sketch, model, chosen)
    plan = build(with_budgets(without_needless_offload(settings), sketch, model, world), world.size, sketch, ORDER)
    check_optimizer(chosen, plan)
    if mpu is not None:
        check_groups(mpu, plan.resolved.layout, world.rank)
    compare_plans(plan)
    warn_of_slow_links(plan.resolved.layout, world)
    accelerator = get_accelerator()
    mesh = Mesh.build(plan.resolved.layout, device_type=accelerator.name, groups=plan.groups)
    plan.take(model, mesh)
    move_to_device(model, plan, mesh)
    parts = plan.apply((Part(model),), mesh)
    check_equal(model, mesh, plan.not_data_parallel)
    seed = seed_of(plan.resolved.config, mesh)
    context = RunContext(
        resolved=plan.resolved,
        user_config=source if isinstance(source, Mapping) else read_source(source),
        mesh=mesh,
        world=world,
        device=accelerator.device(),
        stream=stream_of(plan.resolved.config, seed, mesh),
        make_loader=loaders_of(plan, mesh, seed),
        seed=seed,
        groups=plan.sketch.groups,
    )
    engine = build_engine(
        parts,
        context,
        optimizer=chosen,
        scheduler=choose_scheduler(lr_scheduler, plan.resolved.config, chosen),
        observers=observers_of(plan, world),
        make_runner=plan.runner or Accumulate,
        make=make_engine,
    )
    dump_state(plan.resolved.config, world)
    if training_data is not None:
        engine.set_dataloader(engine.deepspeed_io(training_data, collate_fn=collate_fn))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def sketch_of(model: nn.Module, settings: Config) -> Sketch:
    """What a plan has to know of a model: how activations go through it only where its matrices are to be cut."""
    sketch = Sketch.of(model)
    if split_degree(settings) > 1:
        return sketch.with_flow(flow_of(model))
    return sketch.unsplit(settings.tensor_parallel_size)


def _only_source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    """Exactly one of the three, or an error that says which were given."""
    from_args = vars(args).get("deepspeed_config") if args is not None and "__dict__" in dir(args) else None
    sources = {"args.deepspeed_config": from_args, "config": config, "config_params": config_params}
    given = [name for name, source in sources.items() if source is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise ConfigError("", f"give the configuration in exactly one of {', '.join(sources)}; given: {found}")
    return next(source for source in sources.values() if source is not None)


def _listen(level: Any) -> None:
    """Set the level of messages before there are any: what the configuration itself has to say comes first."""
    if isinstance(level, str) and level.lower() in LEVELS:
        set_level(level)


def _join(settings: Config, port: int, is_required: bool | None) -> World:
    """Join the other ranks, as patiently as the configuration says."""
    patience = settings.communication_timeout if settings.is_given("communication_timeout") else None
    return init_distributed(
        distributed_port=port,
        dist_init_required=is_required,
        timeout=timedelta(minutes=patience) if patience else None,
        config=settings,
        verbose=False,
    )


def _degrees_of_mesh(mesh_param: tuple[int, int] | None) -> dict[str, int]:
    """(data-parallel, sequence-parallel) ranks, under the keys that a configuration has for them."""
    if mesh_param is None:
        return {}
    if not isinstance(mesh_param, tuple | list) or len(mesh_param) != 2:
        raise UsageError(f"mesh_param={mesh_param!r}: give (data-parallel, sequence-parallel) ranks, such as (4, 2)")
    return {"data_parallel_size": mesh_param[0], "sequence_parallel_size": mesh_param[1]}


def _degrees_of_model(model: nn.Module, given: Mapping[str, Any]) -> dict[str, int]:
    """The stages, and the ranks for each matrix, that a model written as a list of layers asks for itself."""
    options = model.options if isinstance(model, LayeredModule) else PipelineOptions()
    if "tensor_parallel" in given and "tensor_parallel_size" not in given:  # its layers are yet to be cut
        asked = {"pipeline_parallel_size": options.stages}
    else:
        asked = {"pipeline_parallel_size": options.stages, "tensor_parallel_size": options.tensor_ranks}
    for key, degree in asked.items():
        if degree is not None and given.get(key, degree) != degree:
            raise ConfigError(key, f"{given[key]}, but the PipelineModule has {degree}: leave one out")
    return {key: degree for key, degree in asked.items() if degree is not None}


def _degrees_of_mpu(mpu: Any, world: int) -> dict[str, Any]:
    """The degrees of a Megatron-style object, whose model comes split already, under the keys of a configuration."""
    layout = layout_from_mpu(mpu, world)
    return {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "sequence_parallel_size": layout.sp,
    }


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, which scripts hand to `initialize` as `args`."""
    group = parser.add_argument_group("mizzen", "distributed training")
    group.add_argument("--deepspeed", action="store_true", help="a flag for scripts to test; it changes nothing here")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="the configuration, JSON or HJSON")
    return parser
