"""`mizzen plan`: what would be done to a model on so many ranks, decided on this machine alone."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.cli.config_file import add_source, batch_words, read
from mizzen.cli.parser import Parser, examples, write
from mizzen.config.describe import wrong_names
from mizzen.config.resolve import resolve
from mizzen.config.schema import Config
from mizzen.engine.prepare import choose_optimizer, with_optimizer_groups
from mizzen.errors import PlanError, UsageError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.explain import explain


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
    )
    add_source(parser, "config", required=True, help="number of ranks")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function without arguments that builds the model; it is called on the meta device",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or why there is none."""
    config = read(arguments.config, arguments)
    for wrong in wrong_names(config):
        raise wrong
    resolved = resolve(config, arguments.world)
    sketch = sketch_at(arguments.model, config) if arguments.model else Sketch(parameters=())
    try:
        plan = build(config, arguments.world, sketch, ORDER)
    except PlanError as refusal:
        write(f"layout  {resolved.layout}\nbatch   {batch_words(resolved)}\nrefused")
        write("\n".join(f"  - {reason}" for reason in str(refusal).splitlines()))
        return 2
    write(explain(plan))
    return 0


def sketch_at(address: str, config: Config) -> Sketch:
    """Call `module:function` on the meta device, where tensors have shapes but no memory, and read what it builds."""
    import torch

    function = _function_at(address)
    with _told(address), torch.device("meta"):
        model = function()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"--model {address}: returned a {type(model).__name__}, not a torch.nn.Module")
    sketch = Sketch.of(model)
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
