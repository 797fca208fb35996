"""From the configuration to the observers of a run: the only place that knows them all."""

from collections.abc import Callable, Mapping
from typing import Any

from mizzen.accelerator import Memory, get_accelerator
from mizzen.config.schema import Config
from mizzen.environment import World
from mizzen.monitor.output import OutputGuard
from mizzen.monitor.rank_record import RankRecord
from mizzen.monitor.report import Observer
from mizzen.monitor.sinks import CometSink, CsvSink, JsonlSink, RunMonitor, Sink, TensorboardSink, WandbSink
from mizzen.monitor.terminal import Printer, PrintOptions, ProgressLine, Screen, SkippedSteps

Make = Callable[[], Sink]


def build_observers(config: Config, world: World, plan: Mapping[str, Any] | None = None) -> tuple[Observer, ...]:
    """What this rank tells of each step. Only rank 0 writes numbers; others have a monitor without sinks, if any.

    Beside the numbers of `jsonl_monitor` every rank keeps a record of its own; that of rank 0 shows the plan.
    """
    asked = _asked(config)
    if world.rank != 0:
        return (RunMonitor({}, enabled=True), *_records(config, world, None)) if asked else ()
    screen = Screen()
    monitors = [_monitor(config, asked)] if asked else []
    return (SkippedSteps(screen), *_progress(config, screen), *monitors, *_records(config, world, plan))


def _records(config: Config, world: World, plan: Mapping[str, Any] | None) -> list[Observer]:
    section = config.jsonl_monitor
    return [RankRecord(section, world, _memory, plan)] if section.enabled else []


def _memory() -> Memory:
    return get_accelerator().memory()


def _progress(config: Config, screen: Screen) -> list[Observer]:
    """At most one kind of progress: lines at the steps the user asks for, else one line, else a few."""
    every = config.steps_per_print
    is_silenced = every is None and config.is_given("steps_per_print")
    is_shown = config.progress.enabled and every is None and not is_silenced
    rate = config.timers.throughput.enabled
    found: list[Observer] = []
    if is_shown and screen.can_redraw:
        interval, total = config.progress.interval, total_steps(config)
        found.append(ProgressLine(screen, _memory, interval=interval, total=total, has_rate=rate))
        is_shown = False
    lines = PrintOptions(
        every=every,
        progress=is_shown or every is not None,
        phases=config.wall_clock_breakdown,
        memory=config.memory_breakdown,
        loss_scale=config.computes_in_fp16,
        rate=rate,
    )
    if lines.progress or lines.phases or lines.memory:
        found.append(Printer(screen, _memory, lines))
    return found


def total_steps(config: Config) -> int | None:
    """The steps of the whole run, where the schedule of the learning rate knows them."""
    total = config.scheduler.params.get("total_num_steps") if config.scheduler is not None else None
    return int(total) if isinstance(total, int | float) and total > 0 else None


def _asked(config: Config) -> dict[str, Make]:
    """The sinks that the configuration asks for, by the name of their section."""
    makers: dict[str, Make] = {
        "jsonl_monitor": lambda: JsonlSink(config.jsonl_monitor, _memory),
        "csv_monitor": lambda: CsvSink(config.csv_monitor),
        "tensorboard": lambda: TensorboardSink(config.tensorboard),
        "wandb": lambda: WandbSink(config.wandb),
        "comet": lambda: CometSink(config.comet),
    }
    return {name: make for name, make in makers.items() if config.at(f"{name}.enabled")}


def _monitor(config: Config, makers: Mapping[str, Make]) -> RunMonitor:
    """The monitor, with every sink that could be opened."""
    sinks: dict[str, Sink] = {}
    for name, make in makers.items():
        with OutputGuard(name):
            sinks[name] = make()
    rate = config.timers.throughput.enabled
    return RunMonitor(sinks, enabled=True, has_loss_scale=config.computes_in_fp16, has_rate=rate)
