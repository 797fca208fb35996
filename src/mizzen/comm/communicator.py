"""What every collective goes through: a note of it, its tag, its log entry, and a wait that ends.

The collectives themselves, with the signatures that users know, are in `collectives.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypedDict, cast

import torch
import torch.distributed as dist

from mizzen.ambient import AMBIENT
from mizzen.comm.agreement import digest
from mizzen.comm.backend import MESSAGES, Backend, Group, Handle, PeerMessage, Request, Tag
from mizzen.comm.tags import Comparison, differ_on_device, words
from mizzen.comm.timing import CommLog, Exposure, Lap, Timing
from mizzen.comm.torch_backend import TorchBackend
from mizzen.comm.watchdog import SLICE, Call, Patience, Watchdog
from mizzen.environment import Switches, environ
from mizzen.errors import CommError, UsageError, expect
from mizzen.log import warn_once


class LogExtras(TypedDict, total=False):
    """What every operation takes for the log, beside the arguments of torch.distributed."""

    prof: bool
    """Log it even where the log does not want all."""
    log_name: str
    """The name in the log."""
    debug: str
    """The caller's name in the log, where it is to be logged."""


class Extras(LogExtras, total=False):
    """What a collective takes beside the arguments of torch.distributed."""

    tag: Tag | None
    """Where this rank is; the group compares it."""


class Work:
    """An operation under way. `wait` is ours; everything else is asked of torch's own object."""

    __slots__ = ("_call", "_finish", "_handle", "_is_done", "_lap", "_timing", "_watchdog")

    def __init__(
        self, watchdog: Watchdog, call: Call, handle: Handle, timing: Timing | None, lap: Lap | None = None
    ) -> None:
        self._watchdog = watchdog
        self._call = call
        self._handle = handle
        self._timing = timing
        self._lap = lap
        self._finish: Callable[[], None] | None = None
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result may be used: on a CPU when it is there, on a device when the stream will have it."""
        if self._is_done:
            return True
        if self._lap is not None:
            self._lap.waits()
        limit = timeout or self._call.request.timeout
        self._watchdog.wait(self._call, self._handle, limit.total_seconds() if limit else None)
        self._is_done = True
        if self._lap is not None:
            self._lap.stop()
        if self._finish is not None:
            self._finish()
        if self._timing is not None:
            self._timing.stop()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_done or self._handle.is_completed()

    def then(self, finish: Callable[[], None]) -> "Work":
        """Let a function run at the end of the first `wait`, to put results in their places."""
        self._finish = finish
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle.work, name)  # type: ignore[attr-defined]


class CoalescedWork:
    """Several operations that are waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        return all([work.wait(timeout) for work in self.works])

    def is_completed(self) -> bool:
        """Whether all of them are done."""
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True, slots=True)
class TagHash:
    """All tags of a group's collectives on a device, one after the other, as a hash."""

    hash: int
    device: torch.device


class Communicator:
    """A backend in use: every operation of this process goes through `run`."""

    def __init__(self, backend: Backend, patience: Patience) -> None:
        world = backend.group(None)
        if world is None:
            raise AssertionError(f"backend {backend.name}: this rank is not among all ranks")
        self.backend = backend
        self.watchdog = Watchdog(world.rank, len(world.ranks), backend.store(), patience)
        self._tag_hashes: dict[Any, TagHash] = {}
        """On a device: where the ranks of each group say to have been since that was last compared."""
        self._comparisons: dict[str, Comparison] = {}
        """On a CPU: what the ranks of each group compare, by its name."""
        self.meshes: dict[Any, Any] = {}
        """The meshes of this job, by layout: `comm.mesh` keeps them here, so that they go with the job."""

        self.exposure: Exposure | None = None
        """What measures how long this rank waits, where somebody wants to know."""

    def group(self, handle: Any, operation: str) -> Group | None:
        """Who is in a group, or a word of warning to a rank that is not."""
        group = self.backend.group(handle)
        if group is None:
            warn_once(f"{operation} was called on a rank that is not in the group; it does nothing there")
        return group

    def issue(
        self, request: Request, handle: Any = None, extras: Extras | None = None, *, is_awaited: bool = False
    ) -> Work | None:
        """Start an operation; None on a rank that is not in the group. `is_awaited`: the caller waits for it now."""
        group = self.group(handle, request.operation)
        if group is None:
            return None
        extras = extras or {}
        if extras and not extras.keys() <= Extras.__optional_keys__:
            unknown = min(extras.keys() - Extras.__optional_keys__)
            raise TypeError(f"{request.operation}() got an unexpected keyword argument {unknown!r}")
        for tensor in request.payload:
            if not isinstance(tensor, torch.Tensor):
                expect(tensor, torch.Tensor, f"{request.operation}: a tensor")
        timing = self._timing(request, group, extras) if AMBIENT.comm_log is not None else None
        lap = self._lap(request, group) if self.exposure is not None else None
        tag = extras.get("tag")
        comparison = self._comparison(request, group, handle, tag, is_awaited=is_awaited)
        is_agreed = comparison.is_agreed(request, tag) if comparison is not None else None
        call = self._begin(request, group, tag, is_agreed)
        try:
            if comparison is not None:
                comparison.ensure_agreement(call, tag, is_agreed)
            return Work(self.watchdog, call, self.backend.issue(request, handle), timing, lap)
        except CommError as error:
            call.fail(str(error))
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            self.raise_refusal(call, error)

    def raise_refusal(self, call: Call, error: Exception) -> NoReturn:
        """An operation could not even be issued: say which lost peer is the cause, if one is."""
        if (failure := self.watchdog.refuse(call, error)) is None:
            raise error
        raise failure from error

    @property
    def is_measured(self) -> bool:
        """Whether somebody wants to know how long operations take."""
        log: CommLog | None = AMBIENT.comm_log
        return self.exposure is not None or (log is not None and log.settings.enabled)

    def ensure_usable(self, group: Group) -> None:
        """Refuse a group in which ranks were lost: what is exchanged there now would be taken for something else."""
        comparison = self._comparisons.get(group.name)
        if comparison is not None and comparison.broken:
            raise CommError(f"nothing more can be exchanged in {group}, whose ranks were lost: {comparison.broken}")

    def _lap(self, request: Request, group: Group) -> Lap | None:
        if self.exposure is None or len(group.ranks) == 1:
            return None
        return self.exposure.lap(
            group.name, on_device=bool(request.payload) and request.payload[0].device.type != "cpu"
        )

    def _timing(self, request: Request, group: Group, extras: LogExtras) -> Timing | None:
        log: CommLog | None = AMBIENT.comm_log
        if log is None or not log.settings.enabled:
            return None
        name = log.name_for(
            request.operation,
            prof=extras.get("prof", False),
            log_name=extras.get("log_name", ""),
            debug=extras.get("debug", ""),
        )
        return Timing(log, name, request.operation, request.payload, len(group.ranks)) if name else None

    def _begin(self, request: Request, group: Group, tag: Tag | None, is_agreed: bool | None) -> Call:
        # Who brings what was not agreed on is known to the others by its tag: they may wait in the call that was.
        title = words(request, tag) if is_agreed is False else request.title
        return self.watchdog.begin(request, group, title, tag)

    def _comparison(
        self, request: Request, group: Group, handle: Any, tag: Tag | None, *, is_awaited: bool
    ) -> Comparison | None:
        """What compares the things that the ranks bring, before they exchange them.

        Without a tag only where gloo would abort or be silent, and where the caller waits anyhow: a rank that starts
        an operation and goes on must not wait for the others here.
        """
        self.ensure_usable(group)
        if tag is not None and request.payload and request.payload[0].device.type != "cpu":
            # [Note: trails] Nothing can be compared before a collective without waiting for the device, so it is done
            # once a step, with a hash of all that was said: every unit more would cost a message of its own.
            before = self._tag_hashes.get(handle)
            self._tag_hashes[handle] = TagHash(
                digest(f"{before.hash if before else 0} {words(request, tag)}"), request.payload[0].device
            )
            return None
        if len(group.ranks) == 1 or request.peers:  # between two ranks nothing is compared
            return None
        if tag is None and not (
            is_awaited
            and request.is_comparable
            and isinstance(self.backend, TorchBackend)
            and self.backend.is_by_gloo(request, handle)
        ):
            return None
        comparison = self._comparisons.get(group.name)
        if comparison is None:
            comparison = self._comparisons[group.name] = Comparison(self.backend, self.watchdog, group, handle)
        return comparison

    def take_parted(self) -> torch.Tensor | None:
        """Compare the trails: a flag on the device, or None when there are none."""
        flag = None
        trails, self._tag_hashes = self._tag_hashes, {}
        for handle, trail in trails.items():

            def reduce_max(value: torch.Tensor, handle: Any = handle) -> None:
                self._wait(Request("all_reduce", (value, dist.ReduceOp.MAX), payload=(value,)), handle)

            differs = differ_on_device(trail.hash, trail.device, reduce_max)
            flag = differs if flag is None else flag | differs
        return flag

    def compare_call(self, request: Request, handle: Any, tag: Tag | None = None) -> None:
        """Compare where the ranks of a group are and what they bring, without exchanging anything else."""
        group = self.group(handle, request.operation)
        if group is not None:
            comparison = self._comparison(request, group, handle, tag, is_awaited=True)
            is_agreed = comparison.is_agreed(request, tag) if comparison is not None else None
            call = self._begin(request, group, tag, is_agreed)
            if comparison is not None:
                comparison.ensure_agreement(call, tag, is_agreed)
            call.finish()

    def _wait(self, request: Request, handle: Any) -> None:
        work = self.issue(request, handle)
        if work is not None:
            work.wait()

    def forget(self, handle: Any) -> None:
        """A group is given up."""
        if (group := self.backend.group(handle)) is not None:
            self._comparisons.pop(group.name, None)

    def close(self, reason: str) -> None:
        """Tell the others that this rank takes no further part."""
        self.watchdog.leave(reason)


class MessageWork:
    """Messages under way that are waited for as one."""

    __slots__ = ("_group", "_handle", "_is_done", "_messages", "_what")

    def __init__(self, group: "MessageGroup", messages: Sequence[PeerMessage], what: object, handle: Handle) -> None:
        self._group = group
        self._messages = messages
        self._what = what
        self._handle = handle
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when they have come, or left; on a device when the stream will have it so."""
        if not self._is_done:
            try:
                is_there = self._handle.poll(SLICE)
            except RuntimeError:
                is_there = False  # it says so again below, and there in our words
            if not is_there:
                self._group.wait_long(self._messages, self._what, self._handle, timeout)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_done or self._handle.is_completed()


class MessageGroup:
    """The ranks of a group as they send each other single messages, which take no part in the order of its collectives.

    A pipeline does so many times in a step, between computations that leave nothing of the interpreter in the caches of
    the processor. So what only a long wait, an error or the log needs of a message is made for these.
    """

    def __init__(self, handle: Any = None) -> None:
        self._comm = current()
        self._handle = handle
        self._group = self._comm.group(handle, MESSAGES)

    def start(
        self, messages: Sequence[PeerMessage], what: object = "", extras: LogExtras | None = None
    ) -> Work | MessageWork | None:
        """Start messages that are waited for as one; `what`, as text, says what they carry. None where there are none.

        A message that is sent waits for its receiver alone, never for another message.
        """
        comm, group = self._comm, self._group
        if not messages or group is None:
            return None
        if comm.is_measured or not isinstance(comm.backend, TorchBackend):
            return comm.issue(_message_request(messages, what), self._handle, cast(Extras, extras or {}))
        comm.ensure_usable(group)
        try:
            return MessageWork(self, messages, what, comm.backend.start_messages(messages, self._handle))
        except (RuntimeError, ValueError, TypeError) as error:
            comm.raise_refusal(comm.watchdog.begin(_message_request(messages, what), group), error)

    def wait_long(
        self, messages: Sequence[PeerMessage], what: object, handle: Handle, timeout: timedelta | None
    ) -> None:
        """Wait for messages that did not come within a moment, so that others see where this rank is."""
        if self._group is None:
            raise AssertionError("a rank that is not in a group has started messages there")
        call = self._comm.watchdog.begin(_message_request(messages, what), self._group)
        self._comm.watchdog.wait(call, handle, timeout.total_seconds() if timeout else None)


def _message_request(messages: Sequence[PeerMessage], what: object) -> Request:
    """Messages as one operation, in words for other ranks."""
    ends = {(message.is_sent, message.peer): None for message in messages}
    detail = " and ".join([f"to rank {peer}" if is_sent else f"from rank {peer}" for is_sent, peer in ends])
    return Request(
        MESSAGES,
        (tuple(messages),),
        payload=[message.tensor for message in messages],
        peers=tuple({peer: None for _, peer in ends}),
        detail=f"{detail}, {said}" if (said := str(what)) else detail,
    )


def use(backend: Backend, patience: Patience | None = None) -> Communicator:
    """Make an initialized backend the one that all collectives of this process go through."""
    before: Communicator | None = AMBIENT.comm
    if before is not None:
        before.close("it has joined another job")
    comm = AMBIENT.comm = Communicator(backend, patience or default_patience())
    return comm


def default_patience() -> Patience:
    """The patience that the environment asks for."""
    minutes = Switches.read(environ()).timeout_minutes
    return Patience(timeout=60 * minutes) if minutes else Patience()


def current() -> Communicator:
    """The backend in use; a process group that somebody else has made is adopted."""
    comm: Communicator | None = AMBIENT.comm
    if comm is not None and comm.backend.is_initialized():
        return comm
    backend = TorchBackend()
    if not backend.is_initialized():
        raise UsageError("there is no process group in this process: call mizzen.init_distributed() first")
    return use(backend)


def run(request: Request, group: Any, *, async_op: bool = False, extras: Extras | None = None) -> Work | None:
    """Carry out an operation, or start it; None where there is nothing to wait for."""
    work = current().issue(request, group, extras, is_awaited=not async_op)
    if work is None or async_op:
        return work
    work.wait()
    return None


def compare_tags(tag: Tag, group: Any, *payload: torch.Tensor) -> None:
    """Compare where the ranks of a group are, and what sizes they bring, before they exchange it in their own way."""
    current().compare_call(Request("exchange", payload=payload), group, tag)


def compare_sizes(operation: str, group: Any, payload: Sequence[torch.Tensor]) -> None:
    """Compare what the ranks bring to an operation that is made of several, before the first of them."""
    current().compare_call(Request(operation, payload=tuple(payload)), group)


def take_parted() -> torch.Tensor | None:
    """Whether tags have differed on a device since the last call: a flag there, or None when there were none.

    All ranks call this at the same place, as they call a collective.
    """
    return current().take_parted()


def set_patience(**seconds: float) -> Patience:
    """Change how long this rank waits for others (`timeout`, `look`, `silence`, `beat`); all ranks do so alike."""
    watchdog = current().watchdog
    watchdog.patience = replace(watchdog.patience, **seconds)
    return watchdog.patience
