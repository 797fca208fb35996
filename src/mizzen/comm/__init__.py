"""Communication between ranks: a drop-in for `torch.distributed` whose waits end, and whose errors name the rank.

`import mizzen.comm as dist`. This face holds no logic: joining the world is in `join.py`, named axes in `mesh.py`, the
collectives in `collectives.py`, groups in `groups.py`, the log in `report.py`.
"""

from torch.distributed import ReduceOp

from mizzen.comm.backend import Backend, PeerMessage, Tag, register_backend
from mizzen.comm.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    exchange,
    gather,
    gather_object,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    scatter_object_list,
    send,
)
from mizzen.comm.communicator import Work, set_patience, take_parted
from mizzen.comm.groups import (
    destroy_process_group,
    get_all_ranks_from_group,
    get_backend,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
    set_backend,
)
from mizzen.comm.join import init_distributed
from mizzen.comm.mesh import Mesh
from mizzen.comm.report import (
    configure,
    log_summary,
    reset_log,
)

__all__ = [
    "Backend",
    "Mesh",
    "PeerMessage",
    "ReduceOp",
    "Tag",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "exchange",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "register_backend",
    "reset_log",
    "scatter",
    "scatter_object_list",
    "send",
    "set_backend",
    "set_patience",
    "take_parted",
]
