"""The collectives and the messages, with torch.distributed's signatures.

Each takes `prof`, `log_name` and `debug` for the log beside torch's own arguments, and each collective a `tag`. What
happens to all of them alike is in `communicator.py`, questions about groups are in `groups.py`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Unpack, cast

import torch
from torch.distributed import ReduceOp

from mizzen.backport import gloo_exchanges_lists
from mizzen.comm.backend import PeerMessage, Request
from mizzen.comm.communicator import (
    CoalescedWork,
    Extras,
    LogExtras,
    MessageGroup,
    MessageWork,
    Work,
    compare_sizes,
    run,
)
from mizzen.comm.groups import get_global_rank, get_rank, root

Tensors = list[torch.Tensor]


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Reduce a tensor over the group; every rank has the result in it."""
    request = Request("all_reduce", (tensor, op), payload=(tensor,), detail=_by(op))
    return run(request, group, async_op=async_op, extras=extras)


def _by(op: Any) -> str:
    """A reduction in words, for all ranks to agree on; the usual one goes without."""
    kind, _, name = str(op).rpartition(".")
    return f"by {name}" if kind == "RedOpType" and name != "SUM" else ""


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **extras: Unpack[Extras],
) -> Work | None:
    """Reduce a tensor over the group; only `dst` has the result."""
    dst = root("reduce", dst, group_dst, group)
    request = Request("reduce", (tensor, dst, op), payload=(tensor,), detail=f"to rank {dst} {_by(op)}".rstrip())
    return run(request, group, async_op=async_op, extras=extras)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **extras: Unpack[Extras],
) -> Work | None:
    """Copy the tensor of `src` to every rank of the group."""
    src = root("broadcast", src, group_src, group)
    request = Request("broadcast", (tensor, src), payload=(tensor,), detail=f"from rank {src}")
    return run(request, group, async_op=async_op, extras=extras)


def all_gather(
    tensor_list: Tensors, tensor: torch.Tensor, group: Any = None, async_op: bool = False, **extras: Unpack[Extras]
) -> Work | None:
    """Gather the tensors of all ranks into a list."""
    request = Request("all_gather", (tensor_list, tensor), payload=(tensor,))
    return run(request, group, async_op=async_op, extras=extras)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Gather the tensors of all ranks into one."""
    request = Request("all_gather_into_tensor", (output_tensor, input_tensor), payload=(input_tensor,))
    return run(request, group, async_op=async_op, extras=extras)


def all_gather_coalesced(
    output_tensor_lists: Tensors | list[Tensors],
    input_tensor_list: Tensors,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> CoalescedWork | None:
    """Gather several tensors, which are under way at the same time: each into one, or into a list per rank."""
    outputs, gather_one = cast(list[Any], output_tensor_lists), cast(Any, all_gather_into_tensor)
    if outputs and not isinstance(outputs[0], torch.Tensor):
        outputs, gather_one = [list(parts) for parts in zip(*outputs, strict=True)], all_gather
    if not async_op:
        compare_sizes("all_gather_coalesced", group, input_tensor_list)
    pairs = zip(outputs, input_tensor_list, strict=True)
    return _together([gather_one(into, tensor, group, True, **extras) for into, tensor in pairs], async_op)


def all_reduce_coalesced(
    tensors: Tensors,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> CoalescedWork | None:
    """`all_reduce` of several tensors, which are under way at the same time."""
    if not async_op:
        compare_sizes(f"all_reduce_coalesced {_by(op)}".rstrip(), group, tensors)
    return _together([all_reduce(tensor, op, group, True, **extras) for tensor in tensors], async_op)


def _together(works: Sequence[Work | None], async_op: bool) -> CoalescedWork | None:
    joined = CoalescedWork([work for work in works if work is not None])
    if not async_op:
        joined.wait()
    return joined if async_op and joined.works else None


def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Reduce a list of tensors over the group; each rank has the one at its own place."""
    request = Request("reduce_scatter", (output, input_list, op), payload=(output,), detail=_by(op))
    return run(request, group, async_op=async_op, extras=extras)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Reduce a tensor over the group; each rank has its own part of the result."""
    request = Request("reduce_scatter_tensor", (output, input, op), payload=(output,), detail=_by(op))
    return run(request, group, async_op=async_op, extras=extras)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Send each rank its part of a tensor, and gather what all have sent to this one."""
    arguments = (output, input, output_split_sizes, input_split_sizes)
    request = Request("all_to_all_single", arguments, payload=(input,))
    return run(request, group, async_op=async_op, extras=extras)


def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Any = None,
    async_op: bool = False,
    **extras: Unpack[Extras],
) -> Work | None:
    """Send each rank its tensor of a list, and gather what all have sent to this one."""
    if input_tensor_list[0].device.type == "cpu" and not gloo_exchanges_lists():
        return _all_to_all_as_one(output_tensor_list, input_tensor_list, group, async_op, extras)
    request = Request("all_to_all", (output_tensor_list, input_tensor_list), payload=tuple(input_tensor_list))
    return run(request, group, async_op=async_op, extras=extras)


def _all_to_all_as_one(outputs: Tensors, inputs: Tensors, group: Any, async_op: bool, extras: Extras) -> Work | None:
    sizes = [tensor.numel() for tensor in outputs]
    received = inputs[0].new_empty(sum(sizes))
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])

    def put_in_place() -> None:
        for tensor, part in zip(outputs, torch.split(received, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    counts = [tensor.numel() for tensor in inputs]
    work = all_to_all_single(received, sent, sizes, counts, group, async_op, **extras)
    if work is not None:
        return work.then(put_in_place)
    if not async_op and get_rank(group) >= 0:
        put_in_place()
    return None


def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    **extras: Unpack[Extras],
) -> Work | None:
    """Gather the tensors of all ranks into a list on `dst`."""
    dst = root("gather", dst, group_dst, group, default=0)
    request = Request("gather", (tensor, gather_list, dst), payload=(tensor,), detail=f"to rank {dst}")
    return run(request, group, async_op=async_op, extras=extras)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    **extras: Unpack[Extras],
) -> Work | None:
    """Give each rank its tensor of a list on `src`."""
    src = root("scatter", src, group_src, group, default=0)
    request = Request("scatter", (tensor, scatter_list, src), payload=(tensor,), detail=f"from rank {src}")
    return run(request, group, async_op=async_op, extras=extras)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
    **extras: Unpack[Extras],
) -> Work | None:
    """Wait until every rank of the group is here, for `timeout` at most."""
    options = {} if device_ids is None else {"device_ids": device_ids}
    return run(Request("barrier", options=options, timeout=timeout), group, async_op=async_op, extras=extras)


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False, **extras: Unpack[Extras]
) -> None:
    """A barrier that names the ranks which have not come within `timeout`."""
    options = {"timeout": timeout, "wait_all_ranks": wait_all_ranks}
    run(Request("monitored_barrier", options=options), group, extras=extras)


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    **extras: Unpack[LogExtras],
) -> Work | None:
    """Start to send a tensor to one rank."""
    dst = root("isend", dst, group_dst, group)
    request = Request("send", (tensor, dst), {"tag": tag}, payload=(tensor,), peers=(dst,), detail=f"to rank {dst}")
    return run(request, group, async_op=True, extras=cast(Extras, extras))


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    **extras: Unpack[LogExtras],
) -> Work | None:
    """Start to receive a tensor from one rank, or from any when no source is given."""
    if src is None and group_src is None:
        detail, peers = "from any rank", (get_rank(),)
    else:
        src = root("irecv", src, group_src, group)
        detail, peers = f"from rank {src}", (src,)
    request = Request("recv", (tensor, src), {"tag": tag}, payload=(tensor,), peers=peers, detail=detail)
    return run(request, group, async_op=True, extras=cast(Extras, extras))


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    **extras: Unpack[LogExtras],
) -> None:
    """Send a tensor to one rank and wait until it may be written to again."""
    work = isend(tensor, dst, group, tag, group_dst, **extras)
    if work is not None:
        work.wait()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
    **extras: Unpack[LogExtras],
) -> int:
    """Receive a tensor and return the rank that has sent it; -1 on a rank that is not in the group."""
    work = irecv(tensor, src, group, tag, group_src, **extras)
    if work is None:
        return -1
    work.wait()
    if src is None and group_src is None:
        # Borrowed from torch (docs/borrowed.md): the public `source_rank` warns that it will go.
        return get_global_rank(group, work._source_rank())
    return root("recv", src, group_src, group)


def exchange(
    messages: Sequence[PeerMessage], group: Any = None, *, what: object = "", **extras: Unpack[LogExtras]
) -> Work | MessageWork | None:
    """Start several messages to and from single ranks, which are waited for as one; `what` says what they carry."""
    for message in messages:
        root("exchange", message.peer, None, group)
    return MessageGroup(group).start(messages, what, extras)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
    **extras: Unpack[Extras],
) -> None:
    """Copy the pickled objects of `src` (rank 0 when not given) to every rank of the group."""
    src = root("broadcast_object_list", src, group_src, group, default=0)
    options = {"device": device, **_unpickling(weights_only)}
    detail = f"of {len(object_list)} objects from rank {src}"
    request = Request("broadcast_object_list", (object_list, src), options, detail=detail)
    run(request, group, extras=extras)


def _unpickling(weights_only: bool) -> dict[str, bool]:
    return {"weights_only": True} if weights_only else {}


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False, **extras: Unpack[Extras]
) -> None:
    """Gather pickled objects of all ranks into a list."""
    run(Request("all_gather_object", (object_list, obj), _unpickling(weights_only)), group, extras=extras)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    **extras: Unpack[Extras],
) -> None:
    """Gather pickled objects of all ranks into a list on `dst` (rank 0 when not given)."""
    dst = root("gather_object", dst, group_dst, group, default=0)
    arguments = (obj, object_gather_list, dst)
    request = Request("gather_object", arguments, _unpickling(weights_only), detail=f"to rank {dst}")
    run(request, group, extras=extras)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    weights_only: bool = False,
    **extras: Unpack[Extras],
) -> None:
    """Give each rank its pickled object of a list on `src` (rank 0 when not given)."""
    src = root("scatter_object_list", src, group_src, group, default=0)
    arguments = (scatter_object_output_list, scatter_object_input_list, src)
    request = Request("scatter_object_list", arguments, _unpickling(weights_only), detail=f"from rank {src}")
    run(request, group, extras=extras)
