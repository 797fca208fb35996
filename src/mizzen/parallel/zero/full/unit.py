"""A unit with its tensors on this rank: its shards, the memory that they are gathered into, and its gradients.

A unit is gathered by one collective for each dtype, and freed again. The objects that the model computes with stay the
same: their storage is filled and emptied, so that whatever autograd has saved of them is good again after a gather.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mizzen.comm import groups
from mizzen.comm.backend import Tag
from mizzen.offload.away import check_here
from mizzen.offload.shards import Shards
from mizzen.parallel.zero.full.division import Unit
from mizzen.parallel.zero.full.sharded_parameter import joined
from mizzen.parallel.zero.full.share import Share, UnitParameter, UnitSums
from mizzen.parallel.zero.live import copy_all
from mizzen.parallel.zero.reduce import Finish
from mizzen.parallel.zero.stock import Stock
from mizzen.plan.parts import Rest


class Gather(Protocol):
    """How the shards of all ranks come together."""

    def __call__(self, rows: Tensor, mine: Tensor, group: ProcessGroup, tag: Tag | None) -> Finish:
        """Start to fill `rows`, one for each rank; the call that is returned finishes it."""


@dataclass(slots=True, eq=False)
class Message:
    """Shards that travel in one collective, as values of one dtype or as the bytes of packed ones."""

    parameters: tuple[UnitParameter, ...]
    flats: tuple[Tensor, ...]
    """What this rank sends of them, one after the other, or what stands for it."""
    dtype: torch.dtype
    rests: tuple[Shards | None, ...]
    """Where each of these rests; None on the device."""
    is_packed: bool = False
    length: int = field(init=False)
    """Elements that a rank sends."""
    second: Tensor | None = None
    """Some ranks' rows of the last gather, kept until backward where a second copy was asked for."""

    def __post_init__(self) -> None:
        self.length = sum(flat.numel() for flat in self.flats)

    def sent(self, row: Tensor | None) -> Tensor:
        """What this rank sends: one piece of the right dtype as it is; else a copy in a row, which may be given."""
        for flat in self.flats:
            check_here(flat, f"'{self.parameters[0].name}', with others,")
        flats = [
            flat if rest is None else rest.here()[: flat.numel()]
            for flat, rest in zip(self.flats, self.rests, strict=True)
        ]
        if len(flats) == 1 and flats[0].dtype == self.dtype:
            return flats[0]
        row = flats[0].new_empty(self.length, dtype=self.dtype) if row is None else row
        at = 0
        for flat in flats:
            row[at : at + flat.numel()].copy_(flat)
            at += flat.numel()
        return row

    def fetch(self) -> None:
        """Start to bring what rests outside the device; a second copy is there already."""
        for rest in self.rests:
            if rest is not None and self.second is None:
                rest.fetch()

    def let_go(self) -> None:
        """Forget what was fetched."""
        for rest in self.rests:
            if rest is not None:
                rest.let_go()

    def received(self, rows: Tensor) -> None:
        """Put the rows of all ranks together in the memory of the parameters."""
        for each in self.parameters:
            storage = each.memory.untyped_storage()
            storage.resize_(each.memory.numel() * each.memory.element_size())
        table = rows.view(-1, self.length)
        if self.is_packed:
            at = 0
            for each in self.parameters:
                packed: Any = each.stand
                messages = table[:, at : at + packed.held.numel()]
                each.memory.copy_(packed.unpacked(messages))
                at += packed.held.numel()
            return
        lengths = [each.length for each in self.parameters]
        parts = [each.memory.view(len(table), -1) for each in self.parameters]
        aside = {at for at, each in enumerate(self.parameters) if each.dim}
        for at in aside:
            parts[at] = torch.empty_like(parts[at])
        if any(rest is not None for rest in self.rests):
            # The other call sends a list of addresses to the device, behind all copies that are on their way there.
            copy_all(parts, list(torch.split(table, lengths, 1)))
        else:
            torch.split_with_sizes_copy(table, lengths, 1, out=parts)
        for at in aside:
            each = self.parameters[at]
            each.memory.view(each.shape).copy_(joined(parts[at], each.shape, each.dim))


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """Who shares the shards of a unit."""

    mesh: DeviceMesh
    sharers: ProcessGroup
    """The ranks of the mesh as a group."""
    copies: ProcessGroup | None
    """The ranks that hold the same shards; None where nobody else does."""
    everyone: ProcessGroup
    """All over which gradients are averaged."""
    second: ProcessGroup | None = None
    """The ranks that share a second copy for backward; None where there is none."""
    others: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """For each axis that cuts some parameters, the ranks that have the rest of them."""


@dataclass(slots=True, eq=False)
class LiveUnit:
    """Parameters that travel together."""

    plan: Unit
    module: Any
    parameters: dict[str, UnitParameter]
    """All of them by name, in the order in which they travel."""
    shares: tuple[Share, ...]
    messages: tuple[Message, ...]
    sums: UnitSums
    """Of the gradients of this rank's shards, one after the other."""
    ranks: UnitRanks
    stock: Stock
    gather_rows: Gather
    finite: Tensor | None = None
    """For each trained parameter, whether this rank's own gradient was finite before it was summed. None: all are."""
    has_unannounced: bool = False
    """Whether gradients are among the sums that came from a backward which nobody announced."""
    open: int = 0
    """How many contexts hold it gathered."""
    is_complete: bool = False
    """Whether its gradients are summed and nothing more comes before the step."""
    is_gathered: bool = False
    in_backward: bool = False
    """Whether a backward has reached it and not left it yet."""
    reduce: Callable[[], None] = lambda: None
    """Sends the gradients that lie on its parameters to their owners; set once there is a store."""
    trained: list[UnitParameter] = field(init=False)
    """The trained parameters in the order in which they travel."""
    _coming: list[Callable[[], Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trained = [each for each in self.parameters.values() if each.is_trained]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.stock.device

    @property
    def is_root(self) -> bool:
        """Whether this is what the model itself has: it stays gathered from forward to backward."""
        return not self.plan.path

    @property
    def count(self) -> int:
        """Elements of its gradients on this rank."""
        return self.sums.count

    @property
    def gradient(self) -> Tensor:
        """The sums without the padding; zeros where none has come."""
        return self.sums.read()[: self.count]

    def complete(self) -> None:
        """The gradients are summed, and nothing more comes before the step."""
        self.is_complete = True
        self.sums.settle(is_last=True, must=True)
        for share in self.shares:
            is_there = self.sums.is_away and share.rest.is_stepped_on_host
            if not share.is_whole and not is_there:
                share.rest.leave(partial(share.gradient, self.sums))

    def bring_masters(self) -> None:
        """Start to bring masters and states that pass through the device for a step, while backward goes on."""
        for share in self.shares:
            if not share.is_whole and not share.rest.is_stepped_on_host:
                share.rest.leave(partial(share.gradient, self.sums))

    def forget(self) -> None:
        """Let go of the gradients."""
        self.sums.forget()
        for share in self.shares:
            share.rest.forget()
        self.finite, self.has_unannounced, self.is_complete = None, False, False

    def note_finite(self, flags: Tensor) -> None:
        """Remember which of this rank's own gradients are finite."""
        self.finite = flags if self.finite is None else self.finite & flags

    def fetch(self) -> None:
        """Start to bring shards that rest outside the device, ahead of a gather."""
        if not self.is_gathered and not self._coming:
            for message in self.messages:
                message.fetch()

    def start_gather(self, tag: Tag) -> None:
        """Let the shards of all ranks begin to come together, unless they have."""
        if self.is_gathered or self._coming:
            return
        self.fetch()
        ranks = self.ranks.mesh.size()
        for message in self.messages:
            if ranks == 1:  # nobody else has any: they are used when they are here
                self._coming.append(partial(_arrive_alone, message))
                continue
            mine, group = message.second, self.ranks.second
            rows = self.stock.take(ranks * message.length, message.dtype)
            if mine is None or group is None:  # its own row of what all ranks send is where a copy can be
                own = rows.view(ranks, -1)[self.ranks.mesh.get_local_rank()]
                mine, group = message.sent(own), self.ranks.sharers
            finish = self.gather_rows(rows, mine, group, tag)
            self._coming.append(_arrival(message, rows, finish))

    def gather(self, tag: Tag, *, keep_second: bool = False) -> None:
        """Let the parameters be whole."""
        if self.is_gathered:
            return
        self.start_gather(tag)
        coming, self._coming = self._coming, []
        with torch.no_grad():
            for finish, message in zip(coming, self.messages, strict=True):
                rows = finish()
                if keep_second and self.ranks.second is not None:
                    message.second = _second_of(rows, self.ranks.second)
                self.stock.give(rows)
        for each in self.parameters.values():
            each.show_whole()
        self.is_gathered = True

    def free(self) -> None:
        """Keep the shards alone, unless a context holds the unit gathered."""
        if self.open:
            return
        coming, self._coming = self._coming, []
        for finish in coming:  # gathered ahead of a use that did not come
            self.stock.give(finish())
        for message in self.messages:
            message.let_go()
        if self.is_gathered or coming:
            self.is_gathered = False
            for each in self.parameters.values():
                each.show_shard()

    def drop_second(self) -> None:
        """Forget the second copy: its values are old."""
        for message in self.messages:
            message.second = None


def _arrival(message: Message, rows: Tensor, finish: Finish) -> Callable[[], Tensor]:
    def arrive() -> Tensor:
        finish()
        message.received(rows)
        return rows

    return arrive


def _arrive_alone(message: Message) -> Tensor:
    rows = message.sent(None)
    message.received(rows)
    return rows


def _second_of(rows: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the rows, which the ranks of a smaller group share."""
    return rows.chunk(groups.get_world_size(group))[groups.get_rank(group)].clone()


@dataclass(frozen=True, slots=True, eq=False)
class ShareLot:
    """A share of a unit as it is stepped: a `plan.parts.Lot`."""

    unit: LiveUnit
    share: Share

    @property
    def rest(self) -> Rest:
        """Where its masters and states rest."""
        return self.share.rest

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the optimizer steps."""
        return (self.share.stepped,)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of its unit are summed and nothing more comes before the step."""
        return self.unit.is_complete

    def keep_writes(self) -> None:
        """Let a master that lies apart have what somebody has written to the shards."""
        self.share.keep_writes()

    def load(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        self.keep_writes()
        share, sums, dtype = self.share, self.unit.sums, self.share.stepped.dtype
        resting = self.rest.resting_gradient if sums.is_away else None
        found = self.rest.gradient(share.gradient(sums)) if resting is None else resting.for_step()
        gradient = found.to(dtype)
        share.stepped.data = self.rest.values(share.master).to(dtype)
        share.stepped.grad = gradient if factor == 1 else gradient.mul_(factor)

    def write_back(self) -> None:
        """Bring what was stepped to the master, unless it is the master itself, or at rest."""
        share = self.share
        if share.stepped.numel() and share.stepped.data_ptr() != share.master.data_ptr():
            self.rest.put([(share.master, share.stepped)])

    def send(self) -> None:
        """Start to bring what was stepped to the shards, where these are not the masters."""
        self.share.send()

    def unload(self) -> None:
        """Let go of what only a step needs."""
        share = self.share
        share.stepped.grad = None
        is_apart = share.master.is_meta or share.stepped.dtype != share.master.dtype
        share.stepped.data = share.stepped.new_empty(0) if is_apart else share.master
