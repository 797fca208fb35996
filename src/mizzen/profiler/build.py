"""From the configuration to what measures a run: the only place that knows all of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mizzen.accelerator import Accelerator
from mizzen.comm.communicator import current
from mizzen.comm.mesh import Mesh
from mizzen.comm.timing import Exposure
from mizzen.config.resolve import Resolved
from mizzen.config.schema import Config
from mizzen.log import warn_once
from mizzen.monitor.report import MemoryUse, Meter, Observer, PhaseTimes, Rates
from mizzen.profiler.recording import RecordedSteps, Recorder, Snapshot, Trace
from mizzen.profiler.render import Setting
from mizzen.profiler.step import ProfiledStep, peak_of


@dataclass(frozen=True, slots=True)
class Instruments:
    """What looks on while a run goes."""

    around: tuple[Callable[[str], AbstractContextManager[None]], ...]
    """Goes around each phase of a step."""
    meters: tuple[Meter, ...]
    observers: tuple[Observer, ...]


def build_instruments(
    resolved: Resolved, model: nn.Module, mesh: Mesh, accelerator: Accelerator, *, is_written: bool
) -> Instruments:
    """All that the configuration asks for, on this rank; `is_written` says that somebody keeps the measures."""
    config = resolved.config
    meters: list[Meter] = []
    if is_written or config.memory_breakdown:  # it takes a tenth of a millisecond
        meters.append(MemoryUse(accelerator.memory))
    if config.timers.throughput.enabled:
        meters.append(Rates())
    if config.wall_clock_breakdown:
        exposure = current().exposure = Exposure(mesh.titles(), accelerator)
        meters += [PhaseTimes(), exposure]
    profiled = [_profiled(resolved, model, mesh, accelerator)] if config.flops_profiler.enabled else []
    recordings = list(_recordings(config, mesh.rank, accelerator))
    return Instruments(tuple(each.around for each in profiled), (*meters, *profiled), (*profiled, *recordings))


def _profiled(resolved: Resolved, model: nn.Module, mesh: Mesh, accelerator: Accelerator) -> ProfiledStep:
    layout = resolved.layout
    setting = Setting(
        world=layout.world,
        data_parallel=layout.dp,
        model_parallel=layout.tp * layout.pp,
        micro_batch=resolved.batch.micro,
    )
    config = resolved.config
    return ProfiledStep(
        config.flops_profiler,
        model,
        accelerator,
        setting,
        peak=_peak(config, accelerator),
        is_shown=mesh.rank == 0,
    )


def _peak(config: Config, accelerator: Accelerator) -> float | None:
    """TFLOPS: the user's word, or that of the table, which is for 16 bits."""
    if config.profile.peak_tflops is not None:
        return config.profile.peak_tflops
    is_narrow = config.fp16.enabled or config.bf16.enabled or config.torch_autocast.enabled
    return peak_of(accelerator.describe().name) if is_narrow else None


def _recordings(config: Config, rank: int, accelerator: Accelerator) -> Iterator[RecordedSteps]:
    trace, snapshot = config.profile.trace, config.profile.memory_snapshot

    def recorded(section: str, recorder: Recorder, folder: str, start: int, steps: int) -> RecordedSteps:
        path = Path(folder).absolute() / f"rank{rank}.{recorder.ending}"
        return RecordedSteps(f"profile.{section}", recorder, path, start=start, steps=steps)

    if trace.enabled and rank in (trace.ranks or (rank,)):
        yield recorded("trace", Trace(trace), trace.output_path, trace.start_step, trace.steps)
    if snapshot.enabled and accelerator.name != "cuda":
        warn_once(f"profile.memory_snapshot has no effect here: it needs a CUDA device, this is {accelerator.name}")
    elif snapshot.enabled and rank in (snapshot.ranks or (rank,)):
        yield recorded("memory_snapshot", Snapshot(snapshot), snapshot.output_path, snapshot.start_step, snapshot.steps)
