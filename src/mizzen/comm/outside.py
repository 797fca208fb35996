"""Calls of torch.distributed that a script makes itself: seen from another thread, by the stack of the main one.

An operation that was started with `async_op=True` and is waited for later leaves no such frame, and is not seen.
"""

import sys
import threading
from types import FrameType
from typing import Final

import torch.distributed as dist

from mizzen.comm.whereabouts import Outside

MESSAGES: Final = {"send": "dst", "recv": "src"}
ROOTED: Final = {
    **MESSAGES,
    "broadcast": "src",
    "broadcast_object_list": "src",
    "scatter": "src",
    "scatter_object_list": "src",
    "reduce": "dst",
    "gather": "dst",
    "gather_object": "dst",
}
"""Operations with one rank that all others wait for, and the argument that names it."""
JOINT: Final = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "new_group",
    "reduce_scatter",
    "reduce_scatter_tensor",
}
"""Operations that end when every rank has come."""
OTHER_NAMES: Final = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def outside_call() -> Outside | None:
    """The call in which the main thread of this process is now; None when it is elsewhere, or in a call of ours."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), None
    while frame is not None and _module(frame).startswith("torch.distributed."):
        found = frame if _operation(frame) in ROOTED.keys() | JOINT else found
        frame = frame.f_back
    if found is None or frame is None or _module(frame).startswith("mizzen."):
        return None
    while frame.f_back is not None and _module(frame).startswith("torch."):
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition("/")[2]
    return _describe(found, f"{file}:{frame.f_lineno}")


def _describe(frame: FrameType, place: str) -> Outside | None:
    given, operation = dict(frame.f_locals), _operation(frame)
    group = given.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    peers: tuple[int, ...] | None = ranks
    if operation in ROOTED:
        root = given.get(f"group_{ROOTED[operation]}")
        named = ranks[root] if isinstance(root, int) else given.get(ROOTED[operation])
        if not isinstance(named, int):
            return None
        # The root itself waits for all others, unless it is a message.
        peers = (named,) if named != dist.get_rank() or operation in MESSAGES else ranks
    if peers == ranks and group is dist.group.WORLD:
        peers = None
    return Outside(operation, place, group.group_name, peers, operation in MESSAGES)


def _operation(frame: FrameType) -> str:
    return OTHER_NAMES.get(frame.f_code.co_name, frame.f_code.co_name)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
