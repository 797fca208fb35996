"""Gradients of what several ranks of a cut axis hold, such as key heads that are fewer than the ranks of a matrix."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout, Partition
from mizzen.model.box import Box
from mizzen.model.home import Home, Site
from mizzen.model.sketch import Drafts

GradientHook = Callable[[Tensor], Tensor]
"""What a gradient becomes on its way to its parameter."""


@dataclass(frozen=True, slots=True)
class TwinSum:
    """Adds up, as a gradient comes, the parts of it that others hold too.

    They are added before anything else is done with the gradient, so it does not matter how it is kept and summed over
    the data ranks. All of these ranks run the same backward, and so come here in the same order.
    """

    parts: Sequence[tuple[ProcessGroup, Sequence[Box]]]

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient with the sums in it."""
        found = gradient.to_dense() if gradient.is_sparse else gradient.clone()
        whole = Box.whole(found.shape)
        for group, boxes in self.parts:
            places = [found[box.slices(whole)] for box in boxes]
            flat = torch.cat([place.reshape(-1) for place in places])
            total = flat.to(torch.promote_types(flat.dtype, torch.float32))
            collectives.all_reduce(total, group=group)
            at = 0
            for place in places:
                place.copy_(total[at : at + place.numel()].view(place.shape))
                at += place.numel()
        return found


def twin_sums(sites: Mapping[str, Site], mesh: Mesh) -> dict[str, GradientHook]:
    """What adds up the gradient of each parameter of which others hold parts too."""
    found: dict[str, GradientHook] = {}
    for name, site in sites.items():
        parts: dict[tuple[int, ...], list[Box]] = {}
        for each in site.shared:
            parts.setdefault(each.ranks, []).append(each.place)
        if parts:
            found[name] = TwinSum([(mesh.group_of(ranks), boxes) for ranks, boxes in parts.items()])
    return found


def twin_groups(drafts: Drafts, layout: Layout) -> Iterator[Partition]:
    """The ranks that hold the same part of a cut parameter, for every such parameter."""
    for home, shape in _shared_homes(drafts, layout):
        sites = (Site(shape, home, layout, rank) for rank in range(layout.world) if home.is_at(layout, rank))
        together = (each.ranks for site in sites for each in site.shared)
        yield from _disjoint(dict.fromkeys(together))


def _shared_homes(drafts: Drafts, layout: Layout) -> Iterable[tuple[Home, tuple[int, ...]]]:
    every = ((p.home, p.shape) for draft in drafts for p in draft.parameters if p.is_trained)
    return dict.fromkeys((home, shape) for home, shape in every if home.is_shared(layout))


def _disjoint(groups: Iterable[tuple[int, ...]]) -> Iterator[Partition]:
    """Groups in as few partitions as needed: runs of one parameter may have different numbers of parts."""
    left = list(groups)
    while left:
        taken: list[tuple[int, ...]] = []
        for ranks in left:
            if all(set(ranks).isdisjoint(other) for other in taken):
                taken.append(ranks)
        yield tuple(taken)
        left = [ranks for ranks in left if ranks not in taken]
