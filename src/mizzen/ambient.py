"""The only module-level state of the library, each entry with its reason. Nothing here imports torch.

Public calls that users know (`get_accelerator()`, `comm.all_reduce(t)`, `safe_get_full_grad(p)`) take no handle,
so what they act on has to be found without one. Everything else is handed down as an argument.
"""

from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary


@dataclass(slots=True)
class Ambient:
    """What the process as a whole has, as opposed to one engine or one mesh."""

    accelerator: Any = None
    """`get_accelerator()` takes no argument; the answer must be the same everywhere in a process."""
    comm: Any = None
    """`comm.all_reduce(t)` takes no backend; this is the one that `init_distributed` chose."""
    comm_log: Any = None
    """`comm.log_summary()` takes no logger; this is the one that the collectives write to."""
    progress: Any = None
    """Where this rank is. One record for a process, because another process reads it by name."""
    owners: "WeakKeyDictionary[Any, Any]" = field(default_factory=WeakKeyDictionary)
    """Parameter -> the engine state that owns it: `safe_get_full_grad(p)` gets only the parameter."""
    warned: set[str] = field(default_factory=set)
    """Messages already given, so that each is given once."""


AMBIENT: Final = Ambient()
