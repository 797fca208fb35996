"""Functions that a compiler leaves to Python.

`torch.compiler.disable` loads the whole compiler at the moment it is applied, which costs seconds in a run that
compiles nothing. This is the only file that may use torch's own lazy form of it (docs/borrowed.md).
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untraced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A function that is never traced, nor what it calls; the compiler is loaded by the first call."""
    return _disable_dynamo(function)
