"""Questions about this process and its groups, and the forming and ending of groups.

How the world is joined is in `join.py`, named axes are in `mesh.py`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mizzen.ambient import AMBIENT
from mizzen.comm.backend import Group
from mizzen.comm.communicator import Communicator, current, use
from mizzen.comm.torch_backend import TorchBackend, make_backend
from mizzen.environment import World, environ
from mizzen.errors import UsageError
from mizzen.wording import rank_list


def is_available() -> bool:
    """Whether this torch can do anything distributed."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a process group in this process, whoever has made it."""
    comm: Communicator | None = AMBIENT.comm
    return (comm is not None and comm.backend.is_initialized()) or (dist.is_available() and dist.is_initialized())


def _members(group: Any) -> Group | None:
    return current().backend.group(group)


def get_rank(group: Any = None) -> int:
    """The place of this rank in a group; -1 when it is not in it."""
    members = _members(group)
    return members.rank if members else -1


def get_world_size(group: Any = None) -> int:
    """The number of ranks in a group; -1 when this rank is not in it."""
    members = _members(group)
    return len(members.ranks) if members else -1


def get_local_rank() -> int:
    """The place of this rank on its host, as the launcher has said."""
    joined: World | None = AMBIENT.world
    return (joined or World.detect(environ())).local_rank


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of a group, in its order."""
    members = _members(group)
    if members is None:
        raise UsageError("this rank is not in the group and cannot tell who is")
    return list(members.ranks)


def get_global_rank(group: Any, group_rank: int) -> int:
    """The global rank of a place in a group."""
    ranks = get_all_ranks_from_group(group)
    if not 0 <= group_rank < len(ranks):
        raise UsageError(f"the group has {len(ranks)} ranks; there is no place {group_rank} in it")
    return ranks[group_rank]


def root(operation: str, rank: int | None, group_rank: int | None, group: Any, *, default: int | None = None) -> int:
    """The one rank that an operation names: globally, by its place in the group, or by default."""
    if rank is not None and group_rank is not None:
        raise UsageError(f"{operation}: give a rank ({rank}) or a place in the group ({group_rank}), not both")
    if group_rank is not None:
        return get_global_rank(group, group_rank)
    named = default if rank is None else rank
    if named is None:
        raise UsageError(f"{operation} needs a rank to send to or to come from")
    members = _members(group)
    if members is not None and named not in members.ranks:  # gloo would wait for it for ever
        raise UsageError(f"{operation}: rank {named} is not in {members}, which has {rank_list(members.ranks)}")
    return named


def get_world_group() -> Any:
    """The group of all ranks; None stands for it with a backend that has no torch process group."""
    return dist.group.WORLD if isinstance(current().backend, TorchBackend) else None


def get_backend(group: Any = None) -> str:
    """The name of the backend in use."""
    return dist.get_backend(group) if isinstance(current().backend, TorchBackend) else current().backend.name


def set_backend(name: str) -> None:
    """Use another backend, which must be initialized: torch's by its own name, or a registered one."""
    backend = make_backend(name)
    if not backend.is_initialized() or name not in (backend.name, "torch"):
        raise UsageError(f"backend {name!r} is not initialized: call mizzen.init_distributed(dist_backend={name!r})")
    use(backend)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> Any:
    """Form a group. Every rank of the job calls this, also those that will not be in it."""
    options: dict[str, Any] = {
        "backend": backend,
        "pg_options": pg_options,
        "use_local_synchronization": use_local_synchronization,
        "group_desc": group_desc,
        "device_id": device_id,
    }
    if not sort_ranks:
        options["sort_ranks"] = False
    return current().backend.new_group(ranks, timeout, options)


def destroy_process_group(group: Any = None) -> None:
    """Give up a group, or all of them when none is named."""
    comm = current()
    everything = group is None or group is dist.group.WORLD
    if everything:
        comm.close("it has destroyed its process group")
        AMBIENT.comm = None
    else:
        comm.forget(group)
    comm.backend.destroy(None if everything else group)


def exchange_device(group: Any = None) -> torch.device:
    """A device whose tensors the ranks of a group can exchange: the CPU unless the backend is one of devices only."""
    if not isinstance(current().backend, TorchBackend) or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_device_index())
