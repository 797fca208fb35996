"""The only module-level state of the library, each entry with its reason. Nothing here imports torch.

Public calls that users know (`get_accelerator()`, `comm.all_reduce(t)`, `safe_get_full_grad(p)`) take no handle,
so what they act on has to be found without one. Everything else is handed down as an argument.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import ref


class Owners:
    """Objects and who owns them, by identity: tensors compare element by element, so an ordinary dict will not do.

    Neither is kept alive by this: an owner holds the thing it owns, so keeping the owner would keep both for ever.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Any], ref[Any]]] = {}

    def set(self, thing: Any, owner: Any) -> None:
        """Note an owner for as long as both live."""
        key = id(thing)
        self._entries[key] = (ref(thing, lambda _: self._entries.pop(key, None)), ref(owner))

    def remove(self, thing: Any) -> None:
        """Forget it."""
        self._entries.pop(id(thing), None)

    def get(self, thing: Any) -> Any:
        """The owner of a thing, or None."""
        found = self._entries.get(id(thing))
        return found[1]() if found is not None and found[0]() is thing else None

    def owners(self) -> list[Any]:
        """All owners that live."""
        return [owner for _, kept in self._entries.values() if (owner := kept()) is not None]


@dataclass(slots=True)
class Ambient:
    """What the process as a whole has, as opposed to one engine or one mesh."""

    accelerator: Any = None
    """`get_accelerator()` takes no argument; the answer must be the same everywhere in a process."""
    accelerator_factories: dict[str, Any] = field(default_factory=dict)
    """Name -> factory: an application registers its own kind of device before anything else is called."""
    comm: Any = None
    """`comm.all_reduce(t)` takes no backend; this is the one that `init_distributed` chose."""
    world: Any = None
    """Who this process is, as `init_distributed` has found out: `comm.get_local_rank()` takes no argument."""
    backends: dict[str, Any] = field(default_factory=dict)
    """Name -> factory: `init_distributed(dist_backend="ccl")` names a backend that other code has registered."""
    comm_log: Any = None
    """`comm.log_summary()` takes no logger; this is the one that the collectives write to."""
    progress: Any = None
    """Where this rank is. One record for a process, because another process reads it by name."""
    opening: Any = field(default_factory=threading.RLock)
    """Held while that record is made: the thread that trains and the one that tells of it may both come first."""
    file_hook: Any = None
    """A test's hook must see every file operation of a save, also of those in threads that the save has started."""
    checkpointing: Any = None
    """`checkpointing.checkpoint(f, x)` takes no engine: how inputs are kept, and the named random streams."""
    owners: Owners = field(default_factory=Owners)
    """Parameter -> the engine state that owns it: `safe_get_full_grad(p)` gets only the parameter."""
    guard: Any = None
    """The hook that sees every optimizer step: torch's hooks belong to the process, and one does for all engines."""
    building: Any = None
    """The `zero.Init` in force: a context inside another is part of it, wherever it is entered."""
    leaves: Owners = field(default_factory=Owners)
    """Module -> itself, where it is pinned as a unit: `set_z3_leaf_modules(model, ...)` comes before any engine."""
    externals: Owners = field(default_factory=Owners)
    """Parameter -> a module that uses it without holding it: models register this in their `__init__`."""
    warned: set[str] = field(default_factory=set)
    """Messages already given, so that each is given once."""


AMBIENT: Final = Ambient()
