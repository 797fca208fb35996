"""From an applied plan to an engine: the only place where a run's variants are chosen."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.host import cores
from mizzen.ambient import AMBIENT
from mizzen.checkpoint.save import SaveThread
from mizzen.config.zero import OffloadConfig
from mizzen.engine.access import Owner, trained_name
from mizzen.engine.engine import Engine, EngineComponents
from mizzen.engine.model_changes import ModelChanges
from mizzen.engine.offloaded_step import OffloadedStep
from mizzen.engine.optimizer import use_masters
from mizzen.engine.phases import Phases
from mizzen.engine.run_state import RunState
from mizzen.engine.runner import Accumulate, RunnerContext
from mizzen.engine.saving import Saving, folder_of, preflight, rank_group_of
from mizzen.engine.status import RunContext
from mizzen.engine.stopping import Stopping
from mizzen.engine.update import Updater
from mizzen.engine.vote import Vote
from mizzen.errors import UsageError
from mizzen.monitor.report import Observer
from mizzen.monitor.sinks import monitor_of
from mizzen.optim.guard import Guard
from mizzen.optim.rules import why_not_apart
from mizzen.plan.parts import Parts, Store
from mizzen.plan.transform import MakeRunner
from mizzen.precision.arithmetic import Arithmetic
from mizzen.precision.scaler import LossScaler
from mizzen.profiler.build import build_instruments
from mizzen.progress import get_progress


def build_engine(
    parts: Parts,
    context: RunContext,
    *,
    optimizer: Optimizer | None,
    scheduler: Any,
    observers: tuple[Observer, ...],
    make_runner: MakeRunner = Accumulate,
    make: Callable[[EngineComponents, RunContext], Engine] = Engine,
) -> Engine:
    """Put an engine together. `optimizer` was built on the model's own parameters; it is given the masters instead."""
    stores = [store for part in parts for store in part.stores]
    resolved, mesh = context.resolved, context.mesh
    config = resolved.config
    arithmetic = Arithmetic.of(config, get_accelerator().name)
    updater, stopping = None, Stopping()
    if optimizer is not None:
        use_masters(optimizer, stores)
    for lot in (lot for store in stores for lot in store.contents.lots):
        if optimizer is not None:  # some rules begin with states
            lot.rest.rest_states(lot.tensors, optimizer.state)
        lot.unload()
    changes = ModelChanges([part.module for part in parts], stores, optimizer)
    run_state = RunState(
        settings=config,
        mesh=mesh,
        batch=context.resolved.batch,
        parts=parts,
        changes=changes,
        stream=context.stream,
        scaler=arithmetic.scaler,
        seed=context.seed,
        groups=context.groups,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    accelerator, is_written = get_accelerator(), monitor_of(observers).enabled
    instruments = build_instruments(resolved, run_state.module, mesh, accelerator, is_written=is_written)
    phases = Phases(accelerator if config.wall_clock_breakdown else None, instruments.around)
    get_progress().set_hang_timeout(config.hang_timeout)
    phases.at_step(0)  # from now on there is something to save
    runner = make_runner(RunnerContext(parts, mesh, context.device, phases, context.stream, arithmetic, changes))
    if optimizer is not None:
        gain = float(resolved.layout.same_model) if config.gradient_allreduce_op == "sum" else 1.0
        updater = Updater(
            stores,
            optimizer,
            Vote(context.mesh.everyone, context.device, runner.role, gain=gain, layout=context.mesh.layout),
            max_norm=config.gradient_clipping,
            scaler=arithmetic.scaler,
            changes=changes,
            stopping=stopping,
        )
        updater.offloaded = _offloaded(stores, optimizer, context)
    meters = (
        instruments.meters if updater is None or updater.offloaded is None else (*instruments.meters, updater.offloaded)
    )
    saving = Saving(config.checkpoint, rank_group_of(mesh), SaveThread(mesh.aside), told=observers)
    followers = (observer for part in parts for observer in part.observers)
    observers = (*observers, *instruments.observers, *followers, saving)
    components = EngineComponents(run_state, runner, updater, phases, saving, stopping, observers, meters)
    engine = make(components, context)
    _own(engine, arithmetic.scaler)
    if config.checkpoint.dir is not None:
        preflight(run_state, folder_of(config.checkpoint, None))
    return engine


def _offloaded(stores: Sequence[Store], optimizer: Optimizer, context: RunContext) -> OffloadedStep | None:
    """What steps lots of which some rest outside the device; None where all rest on it."""
    lots = [lot for store in stores for lot in store.contents.lots]
    if all(lot.rest.place == "device" for lot in lots):
        return None
    if reason := why_not_apart(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} {reason}: its states cannot rest outside the device. Leave offload_optimizer "
            "and offload out, or use another optimizer"
        )
    asked = context.resolved.config.offload or OffloadConfig()
    own_cores = max(1, cores() // max(1, context.world.local_size))
    stepping = OffloadedStep(optimizer, context.device, threads=own_cores if asked.threads == "auto" else asked.threads)
    stepping.split(lots, _streamed_ratio(asked))
    return stepping


def _streamed_ratio(asked: OffloadConfig) -> float:
    """The share of what rests in host memory that passes through the device, the same on all ranks."""
    ratio = 0.0 if asked.streamed_ratio == "auto" else min(1.0, asked.streamed_ratio)
    if ratio > 0 and get_accelerator().has_streams:
        raise UsageError(
            f"offload.streamed_ratio {ratio:g}: lots that pass through a device with streams have come back with wrong "
            "values, so it is refused until that is mended; leave the key out, and the host steps what rests there"
        )
    return ratio


def _own(engine: Engine, scaler: LossScaler) -> None:
    """Let the parameters of an engine be found by themselves."""
    zero = engine.settings.zero_optimization
    engine.owners = [
        Owner(name, store, engine.basic_optimizer, scaler, zero.enable_sanity_checks, zero.stage)
        for store in engine.stores
        for name in store.contents.held
    ]
    # Never taken away: torch walks through its hooks in each step, and a collector may end an engine in the middle.
    AMBIENT.guard = AMBIENT.guard or register_optimizer_step_pre_hook(Guard(trained_name))
    for owner in engine.owners:
        AMBIENT.owners.set(owner.store.contents.held[owner.name], owner)
