"""Parameters that an update rule has to see whole, at stage 3, where nobody has them: each has one owner for a step.

Before a step every rank sends its shards, of values and of gradients, to the owners, and afterwards these send the new
values back. Between steps an owner keeps the states of its parameters and nothing else, so that owners hold as much as
at the other stages, and a step takes the memory of what they own, twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.tags import Tag
from mizzen.model.piece import Piece, piece_of_whole
from mizzen.optim.lamb import Portion
from mizzen.parallel.zero.full.live import LiveUnit, Share, Trained, joined, rows_of
from mizzen.parallel.zero.full.owners import Owners
from mizzen.parallel.zero.full.units import shard_dim

ROUND: Final = 1 << 24
"""Elements of shards that a rank sends in one message, so that messages take little memory beside what they carry."""


@dataclass(slots=True, eq=False)
class Whole:
    """One such parameter: this rank's shard of it and, on its owner, what the optimizer steps."""

    unit: LiveUnit
    share: Share
    slot: Trained
    owner: int
    stepped: Tensor | None
    """Empty between steps; None on all ranks but the owner."""

    @property
    def value(self) -> Tensor:
        """The shard of the master, flat, padding included."""
        return self.share.master[self.slot.offset : self.slot.offset + self.slot.length]

    @property
    def gradient(self) -> Tensor:
        """The shard of the gradient, likewise."""
        return self.unit.sums.read()[self.slot.start : self.slot.start + self.slot.length]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole parameter."""
        return tuple(self.slot.parameter.shape)


class Wholes:
    """All of them of one store. The store calls these methods where its own have the same names."""

    def __init__(self, units: Sequence[LiveUnit], owners: Owners, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = groups.get_rank(group), groups.get_world_size(group)
        of = dict(owners)
        self.all = tuple(
            Whole(unit, share, slot, of[slot.name], _handle(share) if of[slot.name] == self.rank else None)
            for unit in units
            for share in unit.shares
            if share.is_whole
            for slot in share.trained
        )
        self.step = 0

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, what the optimizer steps) for what this rank owns."""
        return [(each.share.group, tensor) for each, tensor in self._owned()]

    def portions(self) -> dict[Tensor, list[Portion]]:
        """Each of these tensors is a whole parameter."""
        return {tensor: [Portion(each.slot.name, 0, each.slot.parameter.numel())] for each, tensor in self._owned()}

    def attach(self, factor: float) -> None:
        """Bring values and gradients to the owners."""
        for each, value in self._to_owners(lambda each: each.value, "values to owners"):
            _stepped(each).data = value.to(_stepped(each).dtype)
        for each, value in self._to_owners(lambda each: each.gradient, "gradients to owners"):
            gradient = value.to(_stepped(each).dtype)
            _stepped(each).grad = gradient if factor == 1 else gradient.mul_(factor)

    def publish(self) -> None:
        """Bring the new values back to the shards."""
        for wholes in self._rounds():
            mine = [each for each in wholes if each.owner == self.rank]
            rows = [
                rows_of(_stepped(each).detach().to(each.value.dtype), self.ranks, each.slot.length) for each in mine
            ]
            sent = torch.cat(rows, 1).view(-1) if rows else wholes[0].value.new_empty(0)
            received = self._exchange(sent, wholes, "values to shards", back=True)
            at = 0
            for each in sorted(wholes, key=lambda each: each.owner):
                each.value.copy_(received[at : at + each.slot.length])
                at += each.slot.length
        self.step += 1

    def rest(self) -> None:
        """Let go of what only a step needs."""
        for _, tensor in self._owned():
            tensor.grad = None
            tensor.data = tensor.new_empty(0)

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states of another shape are left out."""
        found = ((each, states.get(tensor, {}).get(key)) for each, tensor in self._owned())
        return [
            piece_of_whole(each.slot.name, state)
            for each, state in found
            if isinstance(state, Tensor) and tuple(state.shape) == each.shape
        ]

    def _owned(self) -> Iterator[tuple[Whole, Tensor]]:
        return ((each, each.stepped) for each in self.all if each.stepped is not None)

    def _rounds(self) -> Iterator[list[Whole]]:
        """What travels together: of one dtype, up to a number of elements, in an order that all ranks share."""
        found: list[Whole] = []
        size = 0
        for each in self.all:
            kinds = (each.value.dtype, each.gradient.dtype)
            is_other = bool(found) and kinds != (found[0].value.dtype, found[0].gradient.dtype)
            if found and (is_other or size + each.slot.length > ROUND):
                yield found
                found, size = [], 0
            found.append(each)
            size += each.slot.length
        if found:
            yield found

    def _to_owners(self, shard_of: Callable[[Whole], Tensor], phase: str) -> Iterator[tuple[Whole, Tensor]]:
        for wholes in self._rounds():
            ordered = sorted(wholes, key=lambda each: each.owner)
            sent = torch.cat([shard_of(each) for each in ordered])
            table = self._exchange(sent, wholes, phase, back=False).view(self.ranks, -1)
            at = 0
            for each in ordered:
                if each.owner == self.rank:
                    rows = table[:, at : at + each.slot.length]
                    yield each, joined(rows, each.shape, shard_dim(each.shape, self.ranks))
                    at += each.slot.length

    def _exchange(self, sent: Tensor, wholes: Sequence[Whole], phase: str, *, back: bool) -> Tensor:
        """Send each owner the shards that it owns, or, back, each rank its shards of what this one owns."""
        loads = [0] * self.ranks
        for each in wholes:
            loads[each.owner] += each.slot.length
        outgoing, incoming = loads, [loads[self.rank]] * self.ranks
        if back:
            outgoing, incoming = incoming, outgoing
        received = sent.new_empty(sum(incoming))
        tag = Tag(self.step, wholes[0].slot.name, phase)
        collectives.all_to_all_single(received, sent, incoming, outgoing, group=self.group, tag=tag)
        return received


def _handle(share: Share) -> Tensor:
    """A tensor by which an optimizer knows a parameter; it has content during a step only."""
    return share.stepped.new_empty(0)


def _stepped(each: Whole) -> Tensor:
    if each.stepped is None:
        raise AssertionError(f"'{each.slot.name}' is stepped by rank {each.owner}")
    return each.stepped
