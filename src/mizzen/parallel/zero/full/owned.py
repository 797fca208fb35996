"""Parameters that an update rule has to see whole, at stage 3, where nobody has them: each has one owner for a step.

Before a step every rank sends its shards, of values and of gradients, to the owners, and afterwards these send the new
values back. Between steps an owner keeps the states of its parameters and nothing else, so that owners hold as much as
at the other stages, and a step takes the memory of what they own, twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.backend import Tag
from mizzen.model.piece import Piece, piece_of_whole
from mizzen.offload.rest import OnDevice
from mizzen.optim.own_rules import Portion
from mizzen.parallel.zero.full.division import Owners
from mizzen.parallel.zero.full.sharded_parameter import joined, rows_of, shard_dim
from mizzen.parallel.zero.full.share import Share, UnitParameter
from mizzen.parallel.zero.full.unit import LiveUnit
from mizzen.plan.parts import Rest

ROUND: Final = 1 << 24
"""Elements of shards that a rank sends in one message, so that messages take little memory beside what they carry."""


@dataclass(slots=True, eq=False)
class Whole:
    """One such parameter: this rank's shard of it and, on its owner, what the optimizer steps."""

    unit: LiveUnit
    share: Share
    slot: UnitParameter
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
        return tuple(self.slot.shape)


class Round:
    """Parameters that travel to their owners together and are stepped together: a `plan.parts.Lot`.

    Every rank has all of them, in one order, also those of which it owns none: it still sends its shards.
    """

    def __init__(self, wholes: Sequence[Whole], group: ProcessGroup) -> None:
        self.wholes = tuple(wholes)
        self.group = group
        self.rank, self.ranks = groups.get_rank(group), groups.get_world_size(group)
        self.step = 0
        self.rest: Rest = OnDevice()
        self.is_loaded = False
        """Whether the owners have values that may be new."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the optimizer steps of what this rank owns."""
        return tuple(tensor for _, tensor in self.owned())

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of their units are summed and nothing more comes before the step."""
        return all(each.unit.is_complete for each in self.wholes)

    def owned(self) -> Iterator[tuple[Whole, Tensor]]:
        """What this rank owns, with what the optimizer steps of it."""
        return ((each, each.stepped) for each in self.wholes if each.stepped is not None)

    def load(self, factor: float = 1.0) -> None:
        """Bring values and gradients to the owners."""
        for each, value in self._to_owners(lambda each: each.value, "values to owners"):
            _stepped(each).data = value.to(_stepped(each).dtype)
        for each, value in self._to_owners(lambda each: each.gradient, "gradients to owners"):
            gradient = value.to(_stepped(each).dtype)
            _stepped(each).grad = gradient if factor == 1 else gradient.mul_(factor)
        self.is_loaded = True

    def write_back(self) -> None:
        """Bring the new values back to the shards."""
        if not self.is_loaded:
            return
        rows = [
            rows_of(tensor.detach().to(each.value.dtype), self.ranks, each.slot.length) for each, tensor in self.owned()
        ]
        sent = torch.cat(rows, 1).view(-1) if rows else self.wholes[0].value.new_empty(0)
        received = self._exchange(sent, "values to shards", back=True)
        at = 0
        for each in sorted(self.wholes, key=lambda each: each.owner):
            each.value.copy_(received[at : at + each.slot.length])
            at += each.slot.length
        self.step += 1
        self.is_loaded = False

    def keep_writes(self) -> None:
        """The shards are the masters."""

    def send(self) -> None:
        """Values go back in `write_back`."""

    def unload(self) -> None:
        """Let go of what only a step needs."""
        self.is_loaded = False
        for tensor in self.tensors:
            tensor.grad = None
            tensor.data = tensor.new_empty(0)

    def _to_owners(self, shard_of: Callable[[Whole], Tensor], phase: str) -> Iterator[tuple[Whole, Tensor]]:
        ordered = sorted(self.wholes, key=lambda each: each.owner)
        sent = torch.cat([shard_of(each) for each in ordered])
        table = self._exchange(sent, phase, back=False).view(self.ranks, -1)
        at = 0
        for each in ordered:
            if each.owner == self.rank:
                rows = table[:, at : at + each.slot.length]
                yield each, joined(rows, each.shape, shard_dim(each.shape, self.ranks))
                at += each.slot.length

    def _exchange(self, sent: Tensor, phase: str, *, back: bool) -> Tensor:
        """Send each owner the shards that it owns, or, back, each rank its shards of what this one owns."""
        loads = [0] * self.ranks
        for each in self.wholes:
            loads[each.owner] += each.slot.length
        outgoing, incoming = loads, [loads[self.rank]] * self.ranks
        if back:
            outgoing, incoming = incoming, outgoing
        received = sent.new_empty(sum(incoming))
        tag = Tag(self.step, self.wholes[0].slot.name, phase)
        collectives.all_to_all_single(received, sent, incoming, outgoing, group=self.group, tag=tag)
        return received


class Wholes:
    """All of them of one store. The store calls these methods where its own have the same names."""

    def __init__(self, units: Sequence[LiveUnit], owners: Owners, group: ProcessGroup) -> None:
        rank, of = groups.get_rank(group), dict(owners)
        everything = [
            Whole(unit, share, slot, of[slot.name], _handle(share) if of[slot.name] == rank else None)
            for unit in units
            for share in unit.shares
            if share.is_whole
            for slot in share.trained
        ]
        self.rounds: Sequence[Round] = tuple(Round(wholes, group) for wholes in _rounds(everything))

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, what the optimizer steps) for what this rank owns."""
        return [(each.share.group, tensor) for each, tensor in self._owned()]

    def portions(self) -> dict[Tensor, list[Portion]]:
        """Each of these tensors is a whole parameter."""
        return {tensor: [Portion(each.slot.name, 0, each.slot.shape.numel())] for each, tensor in self._owned()}

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states of another shape are left out."""
        found = ((each, states.get(tensor, {}).get(key)) for each, tensor in self._owned())
        return [
            piece_of_whole(each.slot.name, state)
            for each, state in found
            if isinstance(state, Tensor) and tuple(state.shape) == each.shape
        ]

    def _owned(self) -> Iterator[tuple[Whole, Tensor]]:
        return (pair for one in self.rounds for pair in one.owned())


def _rounds(wholes: Iterable[Whole]) -> Iterator[list[Whole]]:
    """What travels together: of one dtype, up to a number of elements, in an order that all ranks share."""
    found: list[Whole] = []
    size = 0
    kinds = None
    for each in wholes:
        kind = (each.value.dtype, each.unit.sums.dtype)
        if found and (kind != kinds or size + each.slot.length > ROUND):
            yield found
            found, size = [], 0
        found.append(each)
        size += each.slot.length
        kinds = kind
    if found:
        yield found


def _handle(share: Share) -> Tensor:
    """A tensor by which an optimizer knows a parameter; it has content during a step only."""
    return share.stepped.new_empty(0)


def _stepped(each: Whole) -> Tensor:
    if each.stepped is None:
        raise AssertionError(f"'{each.slot.name}' is stepped by rank {each.owner}")
    return each.stepped
