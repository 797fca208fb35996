"""Parameters that a module's code names although another module holds them, as in `linear(x, self.embed.weight)`.

Which parameters a forward uses may depend on its input, and there is none before training: so code is read, not run.
Found is what is spelled out from `self`, in `forward` and in the methods that it calls on `self`; what is reached
through other variables is not. No torch here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, nn

FACTS: Final = frozenset(
    {
        *("dtype", "device", "shape", "size", "stride", "numel", "nelement", "dim", "ndim", "itemsize", "element_size"),
        *("requires_grad", "is_cuda", "is_meta", "is_floating_point", "data_ptr", "is_contiguous", "grad"),
    }
)
"""What is asked of a parameter without using its values."""

Step = str | int | None
"""An attribute, a place in a list, or any place in it."""


class UseReader:
    """Reads each class once."""

    def __init__(self) -> None:
        self._paths: dict[type, tuple[tuple[Step, ...], ...]] = {}

    def used(self, module: "nn.Module") -> "Iterator[Tensor]":
        """The parameters of other modules that this one's code names."""
        kind = type(module)
        if kind.__module__.partition(".")[0] == "torch":
            return
        if kind not in self._paths:
            self._paths[kind] = tuple(dict.fromkeys(_paths(kind)))
        for path in self._paths[kind]:
            for owner in _reached(module, path[:-1]):
                parameter = _parameters(owner).get(str(path[-1]))
                if owner is not module and parameter is not None:
                    yield parameter


def _paths(kind: type) -> Iterator[tuple[Step, ...]]:
    """Every chain from `self` in `forward` and in what it calls, of two steps and more."""
    wanted, seen = ["forward"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for tree in _definitions(kind, name):
            arguments = [*tree.args.posonlyargs, *tree.args.args]
            if arguments:
                reader = _Chains(arguments[0].arg)
                reader.visit(tree)
                yield from reader.found
                wanted += reader.called


def _definitions(kind: type, name: str) -> Iterator[ast.FunctionDef]:
    """A method as the class and those that it inherits from have it, up to torch's own."""
    for base in kind.__mro__:
        function = inspect.unwrap(vars(base)[name]) if name in vars(base) else None
        if base.__module__.partition(".")[0] == "torch" or not inspect.isfunction(function):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError, ValueError, TokenError):
            continue  # typed into a prompt, or made by other code
        if tree.body and isinstance(tree.body[0], ast.FunctionDef):
            yield tree.body[0]


class _Chains(ast.NodeVisitor):
    """What a function reaches from its first argument."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.found: list[tuple[Step, ...]] = []
        self.called: list[str] = []

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802  (ast's own name)
        """A chain ends here, unless it only asks for a fact."""
        chain = self._chain(node.value) if node.attr in FACTS else self._chain(node)
        if chain is None or node.attr in FACTS:
            if chain is None:
                self.generic_visit(node)
            return
        if isinstance(node.ctx, ast.Load):
            # Of `self.embed.weight.t()` the first two steps are enough; which ones is seen at the module.
            self.found += [chain[:length] for length in range(2, len(chain) + 1)]
        self._visit_places(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        """A method of the module itself, or of what it inherits from."""
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            is_own = isinstance(owner, ast.Name) and owner.id == self.origin
            is_inherited = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if is_own or is_inherited:
                self.called.append(function.attr)
        self.generic_visit(node)

    def _chain(self, node: ast.expr) -> tuple[Step, ...] | None:
        steps: list[Step] = []
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                steps.append(node.attr)
            elif isinstance(node, ast.Subscript):
                steps.append(_place(node.slice))
            else:
                return None
            node = node.value
        return tuple(reversed(steps)) if node.id == self.origin else None

    def _visit_places(self, node: ast.expr) -> None:
        """What stands between brackets may have chains of its own."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Subscript):
                self.visit(node.slice)
            node = node.value


def _place(index: ast.expr) -> Step:
    try:
        found: Any = ast.literal_eval(index)
    except (ValueError, SyntaxError, TypeError):
        return None
    return found if isinstance(found, int | str) else None


def _reached(module: Any, path: tuple[Step, ...]) -> list[Any]:
    """The modules at a path, registered or not; several where a place is not known."""
    found = [module]
    for step in path:
        found = [inner for each in found for inner in _next(each, step)]
    return found


def _next(thing: Any, step: Step) -> list[Any]:
    if isinstance(thing, list | tuple):
        places = range(len(thing)) if step is None else [step] if isinstance(step, int) else []
        return [thing[place] for place in places if -len(thing) <= place < len(thing)]
    if isinstance(thing, dict):
        return list(thing.values()) if step is None else [thing[step]] if step in thing else []
    inner = _modules(thing)
    if step is None:
        return list(inner.values())
    if isinstance(step, int):
        numbered = list(inner.values())
        return [numbered[step]] if -len(numbered) <= step < len(numbered) else []
    held = inner.get(step, vars(thing).get(step)) if "__dict__" in dir(thing) else None
    return [held] if held is not None else []


def _modules(thing: Any) -> dict[str, Any]:
    return dict(thing.named_children()) if "named_children" in dir(thing) else {}


def _parameters(thing: Any) -> "dict[str, Tensor]":
    return dict(thing.named_parameters(recurse=False)) if "named_parameters" in dir(thing) else {}
