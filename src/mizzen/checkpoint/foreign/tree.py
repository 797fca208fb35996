"""Looking into a tree that came from a file: what is not as it should be is an error with file and key."""

from collections.abc import Mapping
from typing import TypeVar

from mizzen.checkpoint.foreign.values import Inert, TensorRef
from mizzen.checkpoint.manifest import LONGEST
from mizzen.errors import CheckpointError

Kind = TypeVar("Kind")


def expect(value: object, kind: type[Kind], where: str) -> Kind:
    """The value, which must be of a kind."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{where}: a {kind.__name__} was expected, not {type(value).__name__}")
    return value


def is_name(value: object) -> bool:
    """Whether it is a text that may be a name: of one that is long, each use would cost."""
    return isinstance(value, str) and len(value) <= LONGEST


def name_in(value: object, where: str) -> str:
    """A name."""
    found = expect(value, str, where)
    if not is_name(found):
        raise CheckpointError(f"{where}: a name of {len(found):,} characters; at most {LONGEST:,} are read")
    return found


def entries(value: object, where: str) -> Mapping[str, object]:
    """A dict with names for keys; None is an empty one."""
    found = {} if value is None else expect(value, dict, where)
    if not all(map(is_name, found)):
        raise CheckpointError(f"{where}: has keys that are no names, or names of more than {LONGEST:,} characters")
    return found


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A shape: some sizes."""
    found = value if isinstance(value, list) else expect(value, tuple, where)
    if len(found) > 64 or not all(type(size) is int and 0 <= size < 2**62 for size in found):
        raise CheckpointError(f"{where}: is no shape")
    return tuple(found)


def count_of(value: object, where: str) -> int:
    """A number of things."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointError(f"{where}: is no number of elements")
    return value


def number_in(value: object) -> object:
    """The value of an enumeration's placeholder, or the value itself."""
    return value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value


def tensors(value: object, where: str) -> tuple[dict[str, TensorRef], list[str]]:
    """The tensors of a state dict, and the names of what else is in it."""
    found = entries(value, where)
    return (
        {name: ref for name, ref in found.items() if isinstance(ref, TensorRef)},
        [name for name, ref in found.items() if not isinstance(ref, TensorRef)],
    )
