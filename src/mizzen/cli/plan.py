"""`mizzen plan`: what would be done to a model on so many ranks, decided on this machine alone."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.api import sketch_of
from mizzen.cli.config_file import add_source, batch_words, read
from mizzen.cli.parser import Parser, examples, write
from mizzen.config.describe import wrong_names
from mizzen.config.resolve import Resolved, at_world, resolve
from mizzen.config.schema import Config
from mizzen.engine.prepare import choose_optimizer, with_optimizer_groups
from mizzen.errors import PlanError, UsageError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.pipeline.cut import ScheduleChoice
from mizzen.parallel.pipeline.drawing import draw
from mizzen.parallel.pipeline.timeline import Times, timeline
from mizzen.plan.build import build
from mizzen.plan.explain import explain
from mizzen.plan.matrix import render_matrix


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Print layout, batch, the changes to the model in their order, and the memory of one rank.\n"
        "Nothing is started, no GPU is needed. What cannot be done is refused here, with the reason."
    )
    parser.epilog = examples(
        "mizzen plan config.json --world 512",
        "mizzen plan config.json --world 8 --model train:build_model",
        "mizzen plan trainer.json --world 8 --batch 4 --drop-in",
        "mizzen plan --matrix",
        "mizzen plan config.json --world 8 --schedule timeline.svg --times measured.json",
    )
    add_source(parser, "config", required=True, help="number of ranks")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function without arguments that builds the model; it is called on the meta device",
    )
    parser.add_argument(
        "--schedule", metavar="FILE.svg", help="draw the schedule of a pipeline over time, with the bubble in percent"
    )
    parser.add_argument(
        "--times",
        metavar="FILE.json",
        help="measured times for --schedule: forward, backward, backward_input and transfer, the first three as one "
        "number or one for each chunk, and their unit; without it a backward is taken to be two forwards long",
    )
    parser.add_argument(
        "--matrix", action=_PrintMatrix, help="print what goes together, and why the rest is refused; needs no CONFIG"
    )
    parser.set_defaults(run=run)


class _PrintMatrix(argparse.Action):
    """Prints the matrix of what goes together, and ends the command, as `--help` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        write(render_matrix())
        parser.exit()


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or why there is none."""
    config = at_world(read(arguments.config, arguments), arguments.world)
    for wrong in wrong_names(config):
        raise wrong
    resolved = resolve(config, arguments.world)
    if arguments.times and not arguments.schedule:
        raise UsageError(f"--times {arguments.times}: these are for --schedule FILE.svg, which is not there")
    if arguments.schedule:
        write(draw_schedule(resolved, Path(arguments.schedule), arguments.times))
    sketch = sketch_at(arguments.model, config) if arguments.model else Sketch(parameters=())
    try:
        plan = build(config, arguments.world, sketch, ORDER)
    except PlanError as refusal:
        write(f"layout  {resolved.layout}\nbatch   {batch_words(resolved)}\nrefused")
        write("\n".join(f"  - {reason}" for reason in str(refusal).splitlines()))
        return 2
    write(explain(plan))
    return 0


def draw_schedule(resolved: Resolved, path: Path, times: str | None) -> str:
    """Write the picture of a pipeline's schedule; what it shows in one line."""
    stages = resolved.layout.pp
    if stages == 1:
        raise UsageError(f"--schedule {path}: there is one stage, which has no schedule; set pipeline_parallel_size")
    made = ScheduleChoice.of(resolved.config, stages).table(resolved.batch.accumulation)
    measured, unit = read_times(Path(times)) if times else (Times(), "")
    line = timeline(made, measured)
    path.write_text(draw(line, unit=unit, assumed=times is None), encoding="utf8")
    source = f"times of {times}" if times else "assumed times"
    return f"schedule {made.name}: bubble {100 * line.bubble:.1f} % with {source}, drawn to {path}"


def read_times(path: Path) -> tuple[Times, str]:
    """The times of a JSON file, and their unit."""
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except ValueError as error:
        raise UsageError(f"--times {path}: this is not JSON: {error}") from None
    names = ("forward", "backward", "backward_input", "transfer", "unit")
    if not isinstance(found, dict) or not {"forward", "backward"} <= found.keys() or found.keys() - set(names):
        raise UsageError(f"--times {path}: it has forward and backward, and may have {', '.join(names[2:])}")
    unit = found.pop("unit", "")
    numbers = [each for given in found.values() for each in (given if isinstance(given, list) else [given])]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        raise UsageError(f"--times {path}: times are numbers, or lists with one number for each chunk")
    if isinstance(found.get("transfer"), list):
        raise UsageError(f"--times {path}: transfer is one number")
    return Times(**found), str(unit)


def sketch_at(address: str, config: Config) -> Sketch:
    """Call `module:function` on the meta device, where tensors have shapes but no memory, and read what it builds."""
    import torch

    function = _function_at(address)
    with _told(address), torch.device("meta"):
        model = function()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"--model {address}: returned a {type(model).__name__}, not a torch.nn.Module")
    sketch = sketch_of(model, config)
    if config.optimizer is None:
        return sketch
    return with_optimizer_groups(sketch, model, choose_optimizer(None, config, model, sketch))


def _function_at(address: str) -> Callable[[], Any]:
    module, colon, name = address.partition(":")
    if not (module and colon and name):
        raise UsageError(f"--model {address}: write it as module:function, such as train:build_model")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        with _told(address):
            # Many packages import what is behind a name only when it is asked for: hence not vars().
            found: Any = getattr(importlib.import_module(module), name, None)
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise UsageError(f"--model {address}: {module} has no function '{name}'")
    return found  # type: ignore[no-any-return]


@contextmanager
def _told(address: str) -> Iterator[None]:
    """Any error of the user's own code as one line that names the package which is missing, if that is what it is."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"--model {address}: {_cause(error, address.partition(':')[0])}") from error


def _cause(error: Exception, module: str) -> str:
    each: BaseException | None = error
    while each is not None and not (isinstance(each, ModuleNotFoundError) and each.name):
        each = each.__cause__ or each.__context__
    absent = each.name if isinstance(each, ModuleNotFoundError) and isinstance(error, ImportError) else None
    if not absent:
        return f"{type(error).__name__}: {error} (--debug shows where)"
    if f"{module}.".startswith(f"{absent}."):
        return f"there is no module '{absent}', neither in this folder nor among the installed packages"
    return f"{module} needs the package '{absent}', which is not installed (--debug shows where)"
