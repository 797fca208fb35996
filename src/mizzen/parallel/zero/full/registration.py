"""What a user says of a model before it is planned: which modules are one unit, who uses whose parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError, expect
from mizzen.log import warn_once
from mizzen.parallel.zero.full.sharded_parameter import find_record


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
            raise UsageError(f"no module of {type(model).__name__} has the {how} {_words(entry)}")
        found |= {id(module): module for module in matches}
    return list(found.values())


def _matches(name: str, module: nn.Module, entry: type | str, how: str) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    kind = type(module)
    if how == "class":
        return entry in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return name == entry or (how == "suffix" and name.endswith(entry))


def _words(entry: type | str) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)
