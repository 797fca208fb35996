"""Counts that guard against decay: lines of files and functions, parameters, methods, and the library as a whole."""

import ast
import warnings
from collections.abc import Iterable

from house.tree import FACES, Module, made_up, modules

FILE_LINES = 500
FUNCTION_LINES = 60
"""Longer functions are warned of, unless they are in `LONG`: one that reads well in one go is not cut for a count."""
LONG = {
    "api.py initialize": "the signature that users know, then one call after the other",
    "engine/build.py build_engine": "what an engine is made of, in the order in which one thing needs another",
}
"""`file function` -> why it is long."""
PARAMETERS = 8
METHODS = 20
WIDE = {
    "accelerator/cpu.py Cpu": "every method of the protocol `Accelerator`, and how it is made",
    "plan/parts.py Rest": "every call that a lot and a step make to a resting place, with when each comes",
    "offload/rest_host.py OnHost": "every call that a lot makes to its resting place, and how copies go both ways",
}
"""`file class` -> why it has more methods."""
TOTAL_LINES = 61_327
"""Raised in the commit that needs it, never in advance."""


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many values a call can give by position or name, without self and cls."""
    names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(names) - (bool(names) and names[0].arg in ("self", "cls"))


def oversized(files: Iterable[Module]) -> list[str]:
    """What is too large, as `engine/engine.py:10 step has 75 lines`."""
    found = []
    for module in files:
        if module.name in FACES:
            continue
        if (lines := len(module.text.splitlines())) > FILE_LINES:
            found.append(f"{module.name}:1 the file has {lines} lines")
        for function in module.functions() if module.unit != "kernels" else ():
            if (count := parameters(function)) > PARAMETERS:
                found.append(f"{module.name}:{function.lineno} {function.name} has {count} parameters")
        for owner in module.classes():
            count = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in owner.body)
            if count > METHODS and f"{module.name} {owner.name}" not in WIDE:
                found.append(f"{module.name}:{owner.lineno} {owner.name} has {count} methods")
    return found


def long_functions(files: Iterable[Module]) -> dict[str, int]:
    """`engine/engine.py step` -> lines, of functions that are longer than most should be."""
    return {
        f"{module.name} {function.name}": lines
        for module in files
        if module.unit != "kernels"
        for function in module.functions()
        if (lines := function.end_lineno - function.lineno + 1) > FUNCTION_LINES
    }


def test_long_functions_are_warned_of():
    found = long_functions(modules())
    assert set(LONG) <= set(found), "a function of the list is short now, or gone: take it from the list"
    for name in sorted(set(found) - set(LONG)):
        warnings.warn(f"{name} has {found[name]} lines: shorten it, or say in LONG why not", stacklevel=1)


def test_nothing_is_too_large():
    assert oversized(modules()) == []


def test_the_library_stays_small():
    assert sum(len(module.text.splitlines()) for module in modules()) <= TOTAL_LINES


def test_what_is_counted(tmp_path):
    long_function = "def long():\n" + "    x = 1\n" * 60
    wide_function = "def wide(a, b, c, d, e, /, f, g, *, h, i):\n    pass\n"
    big_class = "class Big:\n" + "".join(
        f"    def m{number}(self, a, b, c, d, e, f, g, h): ...\n" for number in range(21)
    )
    made = made_up(
        tmp_path,
        {
            "a.py": long_function + wide_function + big_class,
            "b.py": "x = 1\n" * 501,
            "zero.py": "x = 1\n" * 501 + long_function + wide_function + big_class,
            "kernels/fused.py": long_function + wide_function,
        },
    )
    assert long_functions(made) == {"a.py long": 61, "zero.py long": 61}
    assert oversized(made) == [
        "a.py:62 wide has 9 parameters",
        "a.py:64 Big has 21 methods",
        "b.py:1 the file has 501 lines",
    ]
