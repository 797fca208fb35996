"""Collectives by torch.distributed, on whatever backend its process groups have (nccl, gloo, mpi, xccl, ...).

What is ours here is only how a result is waited for: gloo's in slices, a device's by its stream.
"""

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist

from mizzen.ambient import AMBIENT
from mizzen.backport import all_gather_single, check_options, reduce_scatter_single
from mizzen.comm.backend import (
    MESSAGES,
    Backend,
    Group,
    Handle,
    KeyValueStore,
    PeerMessage,
    Request,
    SignedStore,
    registered_backend,
)
from mizzen.environment import World, environ, ranks_key
from mizzen.errors import NotBuilt, UsageError
from mizzen.wording import rank_list

COLLECTIVES: Final[Mapping[str, Callable[..., Any]]] = {
    "all_reduce": dist.all_reduce,
    "reduce": dist.reduce,
    "broadcast": dist.broadcast,
    "all_gather": dist.all_gather,
    "all_gather_into_tensor": all_gather_single(),
    "reduce_scatter": dist.reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_single(),
    "all_to_all": dist.all_to_all,
    "all_to_all_single": dist.all_to_all_single,
    "gather": dist.gather,
    "scatter": dist.scatter,
    "barrier": dist.barrier,
}
"""Those that return at once with `async_op=True`."""
SINGLE: Final[Mapping[str, Callable[..., Any]]] = {"send": dist.isend, "recv": dist.irecv}
"""Single messages."""
OBJECTS: Final[Mapping[str, Callable[..., Any]]] = {
    "broadcast_object_list": dist.broadcast_object_list,
    "all_gather_object": dist.all_gather_object,
    "gather_object": dist.gather_object,
    "scatter_object_list": dist.scatter_object_list,
}
BLOCKING: Final[Mapping[str, Callable[..., Any]]] = {**OBJECTS, "monitored_barrier": dist.monitored_barrier}
"""Those that torch offers only as calls that wait."""
ENDLESS: Final = timedelta(days=1)
"""A limit for torch where the limit is ours: each wait is sliced."""


class Sliced:
    """A gloo collective: its wait may time out and be taken up again, without harm to the operation."""

    def __init__(self, work: dist.Work, group: Any) -> None:
        self.work = work
        self._group = group

    def poll(self, seconds: float) -> bool:
        """Wait in C++, without the interpreter's lock."""
        limit = timedelta(seconds=max(seconds, 0.001))  # in whole milliseconds; none means for ever
        try:
            return self.work.wait(limit)
        except RuntimeError:
            if not self.work.is_completed():
                return False
        # It may have ended well just after the slice had: only now its own answer is certain.
        return self.work.wait(limit)

    def is_completed(self) -> bool:
        """Whether gloo is done with it, well or badly."""
        return self.work.is_completed()

    def abandon(self) -> None:
        """Keep the group for ever: its destructor would wait for the operation, and the process could not end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


class SlicedAll:
    """Several gloo collectives that make one operation."""

    def __init__(self, works: Sequence[dist.Work], group: Any) -> None:
        self.work = works[-1]
        self._parts = [Sliced(work, group) for work in works]

    def poll(self, seconds: float) -> bool:
        """Wait for one after the other."""
        end = time.monotonic() + seconds
        while self._parts and self._parts[0].poll(end - time.monotonic()):
            del self._parts[0]
        return not self._parts

    def is_completed(self) -> bool:
        """Whether gloo is done with all of them."""
        return all(part.is_completed() for part in self._parts)

    def abandon(self) -> None:
        """As for one."""
        for part in self._parts:
            part.abandon()


class Streamed:
    """An operation on a device: waiting puts it before later work of the current stream and does not stop the host."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def poll(self, seconds: float) -> bool:
        """Order the current stream after the operation."""
        self.work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return self.work.is_completed()

    def abandon(self) -> None:
        """Nothing holds the process here."""


class StreamedAll:
    """Several operations on a device that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.work = works[-1]
        self._works = tuple(works)

    def poll(self, seconds: float) -> bool:
        """Order the current stream after all of them."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the device is done with all of them."""
        return all(work.is_completed() for work in self._works)

    def abandon(self) -> None:
        """Nothing holds the process here."""


class Finished:
    """An operation that was waited for when it was issued."""

    def poll(self, seconds: float) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def abandon(self) -> None:
        """Nothing to leave behind."""


Jobs = SimpleQueue[Callable[[], None] | None]
"""Calls for one thread; None ends it."""


class Waiters:
    """Threads that make one call after the other, since to start one costs more than most messages take.

    One whose call never returns is left behind; the next call goes to another.
    """

    def __init__(self) -> None:
        self._idle: deque[Jobs] = deque()

    def run(self, call: Callable[[], None]) -> None:
        """Make a call in a thread that has nothing to do."""
        try:
            jobs = self._idle.pop()
        except IndexError:  # asked for rather than looked at: another thread may take the last one in between
            jobs = self._start()
        jobs.put(call)

    def _start(self) -> Jobs:
        jobs: Jobs = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs, self._idle), name="mizzen-comm", daemon=True).start()
        return jobs

    def __del__(self) -> None:
        for jobs in self._idle:
            jobs.put(None)


def _serve(jobs: Jobs, idle: deque[Jobs]) -> None:
    while (call := jobs.get()) is not None:
        call()
        del call  # with what it holds, such as the memory of a message
        idle.append(jobs)


class Threaded:
    """A call that can only be waited for whole, such as a gloo receive: a time limit on it would break the connection.

    So another thread waits, and it may be left behind.
    """

    def __init__(
        self, wait: Callable[[], Any], group: Any, work: dist.Work | None = None, waiters: Waiters | None = None
    ) -> None:
        self.work = work
        self._wait = wait
        self._group = group
        self._waiters = waiters
        """Who waits; None is a thread for this call alone."""
        self._running = threading.Lock()
        """Held from now until the call has returned: cheaper than an event, and there is one for each message."""
        self._running.acquire()
        self._is_started = False
        self._error: BaseException | None = None

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # noqa: BLE001  it is raised again in the thread that polls
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._running.release()

    def start(self) -> None:
        """Let the other thread wait from now on; whoever polls starts it, too."""
        if not self._is_started:
            self._is_started = True
            if self._waiters is not None:
                self._waiters.run(self._run)
            else:
                threading.Thread(target=self._run, name="mizzen-comm", daemon=True).start()

    def poll(self, seconds: float) -> bool:
        """Wait for the other thread."""
        self.start()
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()  # for whoever polls again
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the other thread has come back."""
        self.start()
        return not self._running.locked()

    def abandon(self) -> None:
        """As for `Sliced`."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


class SideChannel:
    """Connections of their own between the ranks of a group of gloo: what goes through them meets nothing of the group.

    Torch's own way to make a second group needs every rank of the job, or the same number of groups on each of them.
    """

    def __init__(self, group: Any, name: str) -> None:
        """Connect; every rank of the group does so, with the same name. It waits for the others."""
        group, store = group or dist.group.WORLD, dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        shared = dist.PrefixStore(f"mizzen/{group.group_name}/{name}", store)  # type: ignore[attr-defined]
        self._gloo: Any = dist.ProcessGroupGloo(shared, dist.get_rank(group), dist.get_world_size(group), ENDLESS)

    def all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> Handle:
        """Stack the rows of all ranks."""
        return Sliced(self._gloo.allgather([list(rows)], [row]), self._gloo)


class TorchBackend:
    """torch.distributed with its default process group, whoever has made it."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or "torch"
        self._world: Callable[[], Any] = lambda: None
        self._waiters = Waiters()
        self._groups: dict[str, Group] = {}
        self._timeouts: dict[str, float] = {}
        self._backends: dict[str, dict[str, str]] = {}
        if dist.is_available() and dist.is_initialized():
            self._adopt()

    def _adopt(self) -> None:
        # Only a weak reference: a process group is gone when the user destroys it, and a new one is not this one.
        self._world = weakref.ref(dist.group.WORLD)
        self.name = dist.get_backend()

    def initialize(
        self, world: World, *, timeout: timedelta, init_method: str | None = None, device: torch.device | None = None
    ) -> None:
        """Make the default process group, as torch does it; `join.py` has the way that says who is missing."""
        name = None if self.name == "torch" else self.name
        method = init_method or f"tcp://{world.master_addr}:{world.master_port}"
        dist.init_process_group(
            name, init_method=method, timeout=timeout, rank=world.rank, world_size=world.size, device_id=device
        )
        self._adopt()

    def is_initialized(self) -> bool:
        """Whether the default process group is still the one that was adopted."""
        world = self._world()
        return world is not None and world is dist.group.WORLD

    def store(self) -> KeyValueStore | None:
        """A further connection to the store that the ranks met at."""
        world: Any = dist.group.WORLD
        if world.size() == 1 or self.name == "fake":
            return None
        shared: Any = dist.PrefixStore("mizzen", world.get_group_store().clone())  # type: ignore[attr-defined]
        return SignedStore(shared, ranks_key(environ()))

    def group(self, handle: Any) -> Group | None:
        """Asked of torch once per group."""
        if handle is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        handle = handle or dist.group.WORLD
        name: str = handle.group_name
        found = self._groups.get(name)
        if found is None:
            found = self._groups[name] = self._describe(name, handle)
        return found if found.rank >= 0 else None

    def _describe(self, name: str, handle: Any) -> Group:
        ranks = tuple(dist.get_process_group_ranks(handle))
        if handle is dist.group.WORLD:
            title = "all ranks"
        elif handle.group_desc in ("", "undefined"):
            title = f"the group of {rank_list(ranks)}"
        else:
            title = f"group {handle.group_desc!r} of {rank_list(ranks)}"
        return Group(name, ranks, dist.get_rank(handle), title, self._timeouts.get(name))

    def new_group(self, ranks: Sequence[int] | None, timeout: timedelta | None, options: Mapping[str, Any]) -> Any:
        """As torch does it."""
        check_options(dist.new_group, options)
        handle = dist.new_group(list(ranks) if ranks is not None else None, timeout, **options)
        if timeout is not None and handle is not dist.GroupMember.NON_GROUP_MEMBER:
            self._timeouts[handle.group_name] = timeout.total_seconds()
        return handle

    def issue(self, request: Request, handle: Any) -> Handle:
        """Hand the operation to torch."""
        handle = handle or dist.group.WORLD
        sliced = self.is_by_gloo(request, handle)
        name, arguments, options = request.operation, request.arguments, request.options
        if name == "monitored_barrier" and not sliced:
            name, options = "barrier", {}  # torch has the monitored one for gloo only
        if name == MESSAGES:
            return self.start_messages(arguments[0], handle)
        if name in SINGLE:
            work = SINGLE[name](*arguments, group=handle, **options)
            return Threaded(work.wait, handle, work, self._waiters) if sliced else Streamed(work)
        if name in BLOCKING:
            check_lists(request, handle)
            check_options(BLOCKING[name], options)
            call = partial(BLOCKING[name], *arguments, group=handle, **options)
            if sliced:
                return Threaded(call, handle, waiters=self._waiters)
            call()  # in this thread, because a thread has its own current device
            return Finished()
        if name not in COLLECTIVES:
            raise NotBuilt(f"torch.distributed has no operation {name!r}; there are {', '.join(sorted(COLLECTIVES))}")
        if name == "barrier" and not sliced and request.timeout:  # nothing but torch can stop the wait for a device
            options = {**options, "timeout": request.timeout}
            check_options(dist.barrier, options)
        if sliced and name == "all_gather_into_tensor":
            whole, part = arguments
            if is_worth_spreading(whole, part, dist.get_world_size(handle)):
                return SlicedAll(spread(whole, part, handle), handle)
        work = COLLECTIVES[name](*arguments, group=handle, async_op=True, **options)
        return Sliced(work, handle) if sliced else Streamed(work)

    def start_messages(self, messages: Sequence[PeerMessage], handle: Any) -> Handle:
        """Start messages to and from single ranks: on a device as one group, which no order of its parts can stop.

        Somebody waits for those of gloo from the start: whoever asks for one that is here goes on at once.
        """
        if self._backends_of(handle).get(messages[0].tensor.device.type) != "gloo":
            calls = [
                dist.P2POp(dist.isend if each.is_sent else dist.irecv, each.tensor, each.peer, handle, each.number)
                for each in messages
            ]
            return StreamedAll(dist.batch_isend_irecv(calls))
        works: list[Any] = [
            (dist.isend if is_sent else dist.irecv)(tensor, peer, handle, number)
            for tensor, peer, number, is_sent in messages
        ]
        wait = works[0].wait if len(works) == 1 else lambda: [work.wait() for work in works]
        found = Threaded(wait, handle or dist.group.WORLD, works[-1], self._waiters)
        found.start()
        return found

    def is_by_gloo(self, request: Request, handle: Any) -> bool:
        """Whether gloo will carry it out; every other backend is waited for as torch does."""
        if request.payload:
            return self._backends_of(handle).get(request.payload[0].device.type) == "gloo"
        if request.operation in OBJECTS:
            return self._backends_of(handle).get("cpu") == "gloo"  # torch pickles to the CPU where the group has it
        return self.is_all_gloo(handle)

    def is_all_gloo(self, handle: Any) -> bool:
        """Whether gloo carries out all that the ranks of a group do."""
        return set(self._backends_of(handle).values()) == {"gloo"}

    def _backends_of(self, handle: Any) -> dict[str, str]:
        """The backend of each type of device."""
        handle = handle or dist.group.WORLD
        backends = self._backends.get(handle.group_name)
        if backends is None:
            backends = dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))
            self._backends[handle.group_name] = backends
        return backends

    def destroy(self, handle: Any) -> None:
        """As torch does it; a group's name is never given to another while the job lasts."""
        for known in (self._groups, self._timeouts, self._backends) if handle is not None else ():
            known.pop(handle.group_name, None)
        dist.destroy_process_group(handle)


def check_lists(request: Request, group: Any) -> None:
    """Refuse a list without a place for every rank; torch would find out when all is exchanged."""
    lists = {"all_gather_object": 0, "gather_object": 1}
    if request.operation in lists:
        places, size = request.arguments[lists[request.operation]], dist.get_world_size(group)
        if places is not None and len(places) < size:
            raise UsageError(f"{request.operation}: the list has {len(places)} places, and the group {size} ranks")


# [Note: an all-gather on gloo]
# torch gives gloo's all-gather memory of its own and copies the result out of it. A broadcast from every rank works in
# place, and takes half the time of the processor. Small messages, or many of them, are better off as one.
SPREAD_BYTES: Final = 1 << 16
SPREAD_RANKS: Final = 16


def is_worth_spreading(whole: torch.Tensor, part: torch.Tensor, ranks: int) -> bool:
    """Whether an all-gather is done by broadcasts. All ranks come to the same answer."""
    is_fit = whole.is_contiguous() and part.is_contiguous() and whole.dtype is part.dtype
    return is_fit and part.nbytes >= SPREAD_BYTES and ranks <= SPREAD_RANKS and whole.nbytes == ranks * part.nbytes


def spread(whole: torch.Tensor, part: torch.Tensor, group: Any) -> list[dist.Work]:
    """Start a broadcast from every rank into its place of the whole, as bytes."""
    places = torch.split(whole.detach().view(-1).view(torch.uint8), part.nbytes)
    mine = places[dist.get_rank(group)]
    if mine.data_ptr() != part.data_ptr():
        mine.copy_(part.detach().view(-1).view(torch.uint8))
    works = [dist.broadcast(place, group=group, group_src=rank, async_op=True) for rank, place in enumerate(places)]
    return [work for work in works if work is not None]


def check_name(name: str) -> None:
    """Refuse a backend that neither is registered nor in this torch; `cpu:gloo,cuda:nccl` names one per device."""
    there = [each for each in dist.Backend.backend_list if each != "undefined" and dist.is_backend_available(each)]
    for part in name.lower().split(",") if isinstance(name, str) else [name]:
        if not isinstance(part, str) or part.rpartition(":")[2] not in there:
            known = ", ".join(sorted({*there, *AMBIENT.backends}))
            raise UsageError(
                f"there is no backend {name!r} for collectives: this torch and what was registered have {known}; "
                "mizzen.comm.register_backend adds one"
            )


def make_backend(name: str | None) -> Backend:
    """The backend of a name: one that was registered, or torch's own of that name."""
    return (registered_backend(name) if name else None) or TorchBackend(name)
