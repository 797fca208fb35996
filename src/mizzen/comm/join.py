"""Joining the world: find out who we are, meet the other ranks, and make the backend that collectives go through.

`discover.py` says who this process is, `rendezvous.py` where the ranks meet and who has come: a job that cannot start
says which rank is missing, where it was waited for, and what to do. The mesh of groups is `mesh.py`'s business.
Nothing is written to the environment.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from mizzen.accelerator.registry import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.comm.backend import registered_backend
from mizzen.comm.communicator import set_patience, use
from mizzen.comm.discover import find_world, interface_problem, with_store_address
from mizzen.comm.groups import get_rank, get_world_size, is_initialized
from mizzen.comm.rendezvous import TIMEOUT, JoinOptions, Members, StoreLost, reach_store, store_address, wait_for_ranks
from mizzen.comm.report import configure
from mizzen.comm.torch_backend import TorchBackend, check_name
from mizzen.comm.watchdog import Patience
from mizzen.environment import Switches, World, environ
from mizzen.errors import CommError, DeviceError, UsageError
from mizzen.log import get_logger
from mizzen.wording import counted

AGAIN: Final = timedelta(seconds=30)
"""How long a rank that has lost the store waits for it to come back."""


class Identity(TypedDict, total=False):
    """Who this process is, where no variable says it."""

    rank: int
    world_size: int


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    **identity: Unpack[Identity],
) -> World:
    """Join the other ranks of this job, once; a process group that exists already is adopted. Every rank calls this.

    `timeout` is for the meeting and for every collective after it: the argument, else MIZZEN_TIMEOUT in minutes, else
    ten minutes. `dist_init_required=False` says that somebody else has made the process group.
    """
    if config is not None:
        configure(config)
    if is_initialized():
        if timeout is not None:
            set_patience(timeout=_limit(timeout).total_seconds())
        AMBIENT.world = _adopted()
    elif dist_init_required is False:
        raise UsageError("dist_init_required is false, but no process group exists: make one first, or leave it out")
    else:
        options = JoinOptions(
            dist_backend,
            launchers=auto_mpi_discovery,
            port=distributed_port,
            timeout=_limit(timeout),
            init_method=init_method,
            rank=identity.get("rank", -1),
            size=identity.get("world_size", -1),
            is_verbose=verbose,
        )
        AMBIENT.world = join(options)
    world: World = AMBIENT.world
    return world


def _limit(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        minutes = Switches.read(environ()).timeout_minutes
        timeout = TIMEOUT if minutes is None else timedelta(minutes=minutes)
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise UsageError(f"timeout={timeout!r}: use a datetime.timedelta above zero, such as timedelta(minutes=10)")
    return timeout


def _adopted() -> World:
    """The world of a process group that exists already; the variables can only add the local rank to it."""
    rank, size = get_rank(), get_world_size()
    for known in (AMBIENT.world, World.detect(environ())):
        if known is not None and (known.rank, known.size) == (rank, size):
            return known
    return World(rank, size)


def join(options: JoinOptions) -> World:
    """Meet the other ranks and make the backend that all collectives of this process go through."""
    backend = registered_backend(options.backend) if options.backend else None
    if options.backend and backend is None:
        check_name(options.backend)
    world = find_world(environ(), rank=options.rank, size=options.size, launchers=options.launchers)
    if backend is None:
        world = join_torch(world, options)
        backend = TorchBackend()
    else:
        world = with_store_address(world, environ(), options.port)
        backend.initialize(world, timeout=options.timeout, init_method=options.init_method)
    use(backend, Patience(timeout=options.timeout.total_seconds()))
    return world


def join_torch(world: World, options: JoinOptions) -> World:
    """Make torch's default process group among all ranks of the job."""
    env, started = environ(), time.monotonic()
    store, world, members = _gather(world, env, options)
    where, world = store_address(world, options), members.with_local_rank(world, env)
    if members.host_count > 1 and (problem := interface_problem(world.master_addr, env)):
        get_logger().warning("rank %d: %s", world.rank, problem)
    name, device = take_device(world, options.backend)
    try:
        dist.init_process_group(
            name,
            store=PrefixStore(f"mizzen/{members.name}", store),
            rank=world.rank,
            world_size=world.size,
            timeout=options.timeout,
            device_id=device,
        )
    except RuntimeError as error:
        raise CommError(
            f"all {world.size} ranks met at {where}, but rank {world.rank} could not connect to the others by {name}: "
            f"{error}. Where hosts have several networks, set MIZZEN_INTERFACE and start with `mizzen run`"
        ) from error
    if world.rank == 0 and options.is_verbose:
        took = time.monotonic() - started
        get_logger().info(
            f"{world.size} ranks on {members.host_count} hosts joined at {where} by {name} in {took:.1f} s"
        )
    return world


def _gather(world: World, env: Mapping[str, str], options: JoinOptions) -> tuple[Store, World, Members]:
    """Reach the store and be counted there. One that goes away meanwhile may be that of an earlier world, whose host
    has not left it yet: the next is waited for a little."""
    store, world = reach_store(world, env, options)
    try:
        return store, world, wait_for_ranks(store, world, options.timeout, store_address(world, options))
    except StoreLost as lost:
        try:
            store, world = reach_store(world, env, replace(options, timeout=min(options.timeout, AGAIN)))
        except CommError:
            raise lost from None
        return store, world, wait_for_ranks(store, world, options.timeout, store_address(world, options))


def take_device(world: World, backend: str | None) -> tuple[str, torch.device | None]:
    """Make this rank's device current; the name of the backend, and the device to bind it to.

    Beside the backend of a device there is always gloo for tensors on the host: what ranks tell each other about
    themselves needs no device, and must get through when the device hangs.
    """
    accelerator = get_accelerator()
    name = backend or accelerator.comm_backend
    if accelerator.name == "cpu" or name == "gloo" or name != accelerator.comm_backend:
        accelerator.set_device(world.local_rank if accelerator.name == "cpu" else _index(world, shared=True))
        return name, None
    accelerator.set_device(_index(world, shared=False))
    return f"cpu:gloo,{accelerator.name}:{name}", accelerator.device(accelerator.current_device())


def _index(world: World, *, shared: bool) -> int:
    """The device of this rank. NCCL and its like refuse to put two ranks on one of them; gloo does not mind."""
    accelerator = get_accelerator()
    count, variable = accelerator.device_count(), accelerator.visible_devices
    ranks = max(world.local_size, world.local_rank + 1)
    # A launcher may let each rank see its own device only: then it is number 0 for all of them.
    if ranks > count and not shared and not (count == 1 and variable in environ()):
        raise DeviceError(
            f"rank {world.rank} is one of {ranks} on its host, but it sees "
            f"{counted(count, f'{accelerator.name} device')}: start at most {count} on a host, or check {variable}"
        )
    return world.local_rank % count
