"""What goes between two stages: numbered messages of their own, and memory that is used again once it has left."""

import torch
import torch.distributed as dist

from mizzen import comm
from mizzen.parallel.pipeline.link import SPARE, Link
from mizzen.parallel.pipeline.schedule import StageMessage
from mizzen.parallel.pipeline.wire import describe

SHAPES = [(3, 5)] * 8 + [(2, 5)] * 3


def activations():
    """The first stage sends all of its outputs before the second takes one; each has a content of its own."""
    link = Link(dist.group.WORLD, (0, 1), torch.device("cpu"))
    messages = [StageMessage("activation", 1, micro, 0, 1) for micro in range(len(SHAPES))]
    if dist.get_rank() == 0:
        for micro, (message, shape) in enumerate(zip(messages, SHAPES, strict=True)):
            link.send(message, *describe(torch.full(shape, float(micro))))
        comm.barrier()
        link.finish()
        (edge,) = link._edges.values()
        spare = list(edge.spare)
        description, tensors = describe(torch.full(SHAPES[-1], 11.0))
        link.send(StageMessage("activation", 1, 11, 0, 1), description, tensors)
        (sent,) = link._sent
        link.finish()
        return len(spare), sent.reuse[0] in spare
    comm.barrier()
    found = []
    for message in [*messages, StageMessage("activation", 1, 11, 0, 1)]:
        link.post(message)
        _, (tensor,) = link.receive(message)
        found.append((tuple(tensor.shape), tensor.unique().tolist()))
    return found


def test_memory_is_sent_again_only_after_it_has_left(world):
    (kept, is_used_again), found = world(2).run(activations)
    expected = [*((shape, [float(micro)]) for micro, shape in enumerate(SHAPES)), (SHAPES[-1], [11.0])]
    assert found == expected
    assert kept == SPARE and is_used_again


def gradients():
    """One gradient, which is not contiguous, and then two of different dtypes."""
    link = Link(dist.group.WORLD, (0, 1), torch.device("cpu"))
    one, both = (StageMessage("gradient", 0, micro, 1, 0) for micro in range(2))
    first = torch.arange(6.0).view(2, 3).t()
    several = [torch.ones(3), torch.full((2,), 2.0, dtype=torch.float64)]
    if dist.get_rank() == 1:
        link.send_gradients(one, [first])
        link.send_gradients(both, several)
        link.finish()
        return None
    kinds = [describe(tuple(each))[0].tensors for each in ([first], several)]
    for message, facts in zip((one, both), kinds, strict=True):
        link.post_gradients(message, facts)
    return [
        [(g.dtype, g.tolist()) for g in link.receive_gradients(m, f)] for m, f in zip((one, both), kinds, strict=True)
    ]


def test_gradients_come_as_they_were_sent(world):
    found, _ = world(2).run(gradients)
    assert found == [
        [(torch.float32, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])],
        [(torch.float32, [1.0, 1.0, 1.0]), (torch.float64, [2.0, 2.0])],
    ]
