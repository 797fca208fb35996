"""The seam under the collectives: what carries them out, and how another one than torch.distributed is registered.

Waiting, naming who is missing, tags and the log are the business of the callers in `collectives.py` and `watchdog.py`;
`torch_backend.py` is the backend that nearly everybody uses. `SignedStore` signs what the ranks put into their store.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch

from mizzen.ambient import AMBIENT
from mizzen.environment import World
from mizzen.errors import CommError
from mizzen.network import PROOF, is_proof, prove


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks of the job, as one of them sees it."""

    name: str
    """One name for all members, and different for every group of the job."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    rank: int
    """The place of this rank in it."""
    title: str
    """What a message calls it."""
    timeout: float | None = None
    """Seconds that one of its collectives may take; None for the job's own limit."""

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True)
class Tag:
    """Where a rank is when it comes to a collective."""

    step: int
    unit: str
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, unit {self.unit!r}, phase {self.phase!r}"


MESSAGES: Final = "messages"
"""The operation that is several messages to and from single ranks, waited for as one."""


class PeerMessage(NamedTuple):
    """A tensor that goes to one rank, or comes from it. The two ends meet by group, direction and number."""

    tensor: torch.Tensor
    peer: int
    """The global rank at the other end."""
    number: int
    is_sent: bool


class Request(NamedTuple):
    """One operation, with torch.distributed's name and arguments except `group` and `async_op`."""

    operation: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}
    payload: Sequence[torch.Tensor] = ()
    """The tensors whose size is the size of the message: the shard for gathers and scatters, all of it elsewhere."""
    peers: tuple[int, ...] = ()
    """The global ranks that take part, where it is not the whole group."""
    detail: str = ""
    """What all ranks must agree on beside the name, such as `from rank 0`."""
    timeout: timedelta | None = None
    """The longest that it may take; None for the limit of the group or of the job."""

    @property
    def title(self) -> str:
        """The operation in words; two ranks whose titles differ are not in the same collective."""
        return f"{self.operation} {self.detail}" if self.detail else self.operation

    @property
    def is_comparable(self) -> bool:
        """Whether the ranks bring anything that has to fit; between two ranks nothing is compared."""
        return not self.peers and self.operation not in ("barrier", "monitored_barrier")


class KeyValueStore(Protocol):
    """What all ranks can write to and read from, such as the store that torch.distributed met at. Any thread calls."""

    def set(self, key: str, value: bytes, /) -> None:
        """Write a value over the one before."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these were written."""

    def get(self, key: str, /) -> bytes:
        """What was last written."""

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Write `desired` where `expected` stands, or nothing where that is empty; what stands there then."""


class Handle(Protocol):
    """One operation under way.

    poll(seconds)    by whoever waits, again and again until it is true
    is_completed()   at any time
    abandon()        instead of a further poll, once we know that it will never end
    """

    def poll(self, seconds: float) -> bool:
        """Wait for at most so long: true when the result may be used. Raises what went wrong."""

    def is_completed(self) -> bool:
        """Whether a poll would return true, or raise, at once."""

    def abandon(self) -> None:
        """Let the process end without waiting for the operation."""


class Backend(Protocol):
    """What carries out collectives.

    initialize(world)      once, by `init_distributed`, unless `is_initialized()`
    store()                once after that: what the ranks tell each other about themselves goes through it
    group(handle)          before each operation; the handle is what `new_group` gave, or None for all ranks
    issue(request, handle) each operation, in the order of the program; it does not wait
    destroy(handle)        at the end, for a group or with None for everything

    An operation that it cannot do is a `NotBuilt` out of `issue`.
    """

    name: str

    def initialize(
        self, world: World, *, timeout: timedelta, init_method: str | None = None, device: torch.device | None = None
    ) -> None:
        """Meet the other ranks."""

    def is_initialized(self) -> bool:
        """Whether operations can be issued now."""

    def store(self) -> KeyValueStore | None:
        """A store that all ranks share, on a connection of its own; None when there is none."""

    def group(self, handle: Any) -> Group | None:
        """Who is in a group; None when this rank is not."""

    def new_group(self, ranks: Sequence[int] | None, timeout: timedelta | None, options: Mapping[str, Any]) -> Any:
        """Form a group; every rank of the job calls this, in the same order."""

    def issue(self, request: Request, handle: Any) -> Handle:
        """Start an operation among the ranks of a group that this rank belongs to."""

    def destroy(self, handle: Any) -> None:
        """Give up a group, or all of them."""


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Let `init_distributed(dist_backend=name)` use a backend of your own; a later registration replaces an earlier."""
    AMBIENT.backends[name] = factory


def registered_backend(name: str) -> Backend | None:
    """A new backend of a registered name; None for the names that torch.distributed knows itself."""
    factory = AMBIENT.backends.get(name)
    return None if factory is None else factory()


class SignedStore:
    """A store of torch whose values are signed: one that somebody else has written is an error, not a value.

    The name of a key is signed with its value, so that a value cannot be moved to another key. Who can reach the store
    may still delete a value, or put an older one back. Without a key, as under other launchers, the signature only
    tells values of ours from others.
    """

    def __init__(self, store: KeyValueStore, key: bytes) -> None:
        self._store, self._key = store, key

    def set(self, key: str, value: str | bytes, /) -> None:
        """Sign a value and write it over the one before."""
        self._store.set(key, self._sign(key, value))

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these were written."""
        return self._store.check(keys)

    def get(self, key: str, /) -> bytes:
        """What was last written; CommError where that was not one of us."""
        return self._read(key, self._store.get(key))

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        """Write `desired` where `expected` stands, or nothing where that is empty; what stands there then."""
        before = self._sign(key, expected) if expected else b""
        return self._read(key, self._store.compare_set(key, before, self._sign(key, desired)))

    def _sign(self, key: str, value: str | bytes) -> bytes:
        body = value.encode() if isinstance(value, str) else value
        return prove(self._key, key.encode(), body) + body

    def _read(self, key: str, found: bytes) -> bytes:
        proof, body = bytes(found[:PROOF]), bytes(found[PROOF:])
        if not is_proof(proof, self._key, key.encode(), body):
            raise CommError(
                f"what the store of this job holds under {key!r} was not written by a rank of this job: somebody else "
                "can reach its port, or the ranks were started with different values of MIZZEN_KEY"
            )
        return body
