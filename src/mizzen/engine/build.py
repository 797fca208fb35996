"""From an applied plan to an engine: the only place where a run's variants are chosen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.host import numa_nodes, own_cores
from mizzen.ambient import AMBIENT
from mizzen.checkpoint.save import SaveThread
from mizzen.config.schema import Config
from mizzen.config.zero import OffloadConfig, ZenFlowConfig
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
from mizzen.engine.step_in_backward import StepInBackward
from mizzen.engine.stopping import Stopping
from mizzen.engine.streamed_share import StreamedShare
from mizzen.engine.update import Updater
from mizzen.engine.vote import Vote
from mizzen.engine.zenflow import ZenFlowStep
from mizzen.errors import UsageError
from mizzen.monitor.report import Observer
from mizzen.monitor.sinks import monitor_of
from mizzen.offload.places import DEVICE, OffloadSettings
from mizzen.optim.guard import Guard
from mizzen.optim.rules import is_adam, is_elementwise, why_not_apart
from mizzen.plan.parts import Parts
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
        updater.offloaded = _offloaded(run_state, optimizer, context, updater.expected_factor)
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


def _offloaded(
    run: RunState, optimizer: Optimizer, context: RunContext, expected: Callable[[], float | None]
) -> OffloadedStep | None:
    """What steps lots of which some rest outside the device; None where all rest on it."""
    config = context.resolved.config
    lots = [lot for store in run.stores for lot in store.contents.lots]
    is_away = any(lot.rest.place != DEVICE for lot in lots)
    asked = config.offload or OffloadConfig()
    share, zenflow = None, config.zero_optimization.zenflow
    in_backward = OffloadSettings.of(config).in_backward
    is_fixed = config.deterministic or zenflow is not None or in_backward
    if asked.streamed_ratio == "auto" and get_accelerator().has_streams and not is_fixed:
        share = StreamedShare(context.mesh.everyone, context.device, context.resolved.batch.accumulation)
        if OffloadSettings.of(config).is_on:  # whoever measures does so together with all ranks
            is_away = share.is_for_any(is_away)
    if not is_away:
        return None
    if reason := why_not_apart(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} {reason}: its states cannot rest outside the device. Leave offload_optimizer "
            "and offload out, or use another optimizer"
        )
    near = own_cores(context.world.local_rank, context.world.local_size)
    threads = _threads(config, len(near)) if asked.threads == "auto" else asked.threads
    cores = near if asked.threads == "auto" and numa_nodes() > 1 else ()
    if zenflow is not None:
        stepping: OffloadedStep = _late(run, optimizer, zenflow, context.device, threads, cores)
    elif in_backward:
        if not is_elementwise(optimizer):
            raise UsageError(
                f"offload.step_in_backward needs a rule that works element by element, and {type(optimizer).__name__} "
                "is not known to: leave the key out"
            )
        stepping = StepInBackward(optimizer, context.device, expected=expected, threads=threads, cores=cores)
    else:
        stepping = OffloadedStep(optimizer, context.device, threads=threads, share=share, cores=cores)
    stepping.begin(lots, None if asked.streamed_ratio == "auto" else min(1.0, asked.streamed_ratio))
    return stepping


def _threads(config: Config, cores: int) -> int:
    """Threads of the step on the host: the asked share of a rank's cores, at least one."""
    section = config.zero_optimization.offload_optimizer
    share = section.cpuadam_cores_perc if section is not None else None
    if share is None:
        share = 0.8 if OffloadSettings.of(config).in_backward else 1.0
    return max(1, round(cores * share))


def _late(
    run: RunState,
    optimizer: Optimizer,
    section: ZenFlowConfig,
    device: torch.device,
    threads: int,
    cores: Sequence[int],
) -> ZenFlowStep:
    """What steps important columns on the device, and the others on the host every few steps."""
    asked = run.settings.offload or OffloadConfig()
    if not is_adam(optimizer):
        raise UsageError(
            f"zero_optimization.zenflow needs Adam or AdamW, not {type(optimizer).__name__}: leave the section out"
        )
    if section.overlap_step and asked.threads == "auto":
        threads = max(1, round(threads * (1 - section.pt_reserved_cores_perc)))
    return ZenFlowStep(
        optimizer,
        device,
        section=section,
        stores=run.stores,
        epoch_steps=lambda: run.epoch_steps,
        threads=threads,
        cores=cores,
    )


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
