"""Parameters whose gradients are known beforehand, in a store of any stage; and the bytes that are really held."""

import gc
import random
import time

import torch
import torch.distributed as dist
from torch import nn

from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.slots import Tenant, lay_out
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.precision.policy import Policy

SHAPES = {"a": (10, 7), "b": (33,), "scalar": (), "empty": (0, 3), "c": (5, 5, 4), "d": (64,), "e": (129,)}
STAGES = (0, 1, 2)
DTYPES = {"parameters": None, "accumulation": "float32", "wire": None}


class Bag(nn.Module):
    """Parameters, and losses that give each of them a known gradient."""

    def __init__(self, shapes=SHAPES, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def loss(self, rank, step, *, without=(), shuffled=False):
        """The sum of parameters times what their gradients shall be; autograd takes the last term first."""
        names = [name for name in SHAPES if name not in without]
        if shuffled:
            random.Random(f"{rank} {step}").shuffle(names)
        return sum((getattr(self, name).float() * gradient(name, rank, step)).sum() for name in names)


def gradient(name, rank, step):
    """What rank `rank` contributes in backward `step`."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + rank * 100 + step)
    return torch.randn(SHAPES[name], generator=generator)


def mean(name, ranks, steps=1, without=None):
    """The mean over ranks of the sums over steps; `without` has what some ranks leave out."""
    total = torch.zeros(SHAPES[name], dtype=torch.float64)
    for rank in range(ranks):
        if name not in (without or {}).get(rank, ()):
            total += sum(gradient(name, rank, step).double() for step in range(steps))
    return (total / ranks).float()


def hold(module, stage, *, limit=100, held=None, overlap=True, dtypes=None, sparse=(), groups=None, **keys):
    """The module's parameters in a store over all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    tenants = [
        Tenant(
            name,
            tuple(parameter.shape),
            held or str(parameter.dtype).removeprefix("torch."),
            (groups or {}).get(name, 0),
            name in sparse,
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    reduction = Reduction(ranks, **{"after": 1 / ranks, **keys})
    return FlatStore(
        lay_out(tenants, chunks=ranks, bucket_elements=limit),
        dict(module.named_parameters()),
        Holding(stage if ranks > 1 else 0, reduction, Policy(**{**DTYPES, **(dtypes or {})}), overlap),
        dist.group.WORLD if ranks > 1 else None,
    )


def backward(store, loss, last=True):
    """A backward that is announced."""
    store.begin_backward(last)
    loss.backward()
    store.end_backward()


def load_lots(store, factor=1.0):
    """Make everything ready for a step."""
    for lot in store.contents.lots:
        lot.load(factor)


def whole(store, of="gradient"):
    """The values of every parameter, put together from what the ranks hold."""
    found = {}
    for name, parameter in store.contents.trained.items():
        flat = torch.zeros(parameter.shape, dtype=torch.float64)
        for piece in store.pieces(of):
            if piece.name == name:
                for box, data in piece.parts():
                    flat[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = data.double()
        if store.ranks.shard_group is not None:
            dist.all_reduce(flat)
        found[name] = flat.float()
    return found


def ranges(tensors):
    """The memory of some tensors as [begin, end) pairs that do not overlap."""
    spans = sorted({(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()})
    merged = []
    for begin, end in spans:
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def bytes_of(tensors):
    """Bytes that some tensors take; those that share memory count once."""
    return sum(end - begin for begin, end in ranges(tensors))


def live_bytes():
    """Bytes behind every tensor of this process."""
    return bytes_of([thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)])


def at_rest(count, most=None):
    """The least that is counted within a moment, or as soon as it is no more than `most`.

    gloo's threads let go of what was sent soon after the wait for it, if they are not held up.
    """
    least = count()
    for _ in range(5 if most is None else 250):
        if most is not None and least <= most:
            break
        time.sleep(0.02)
        least = min(least, count())
    return least
