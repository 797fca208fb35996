"""Tags: the ranks of a group compare where they are before they exchange data, so that those who parted ways find out.

On a CPU the comparison comes before the collective, because gloo aborts the process when sizes differ, or writes a part
of the result in silence. A call that comes where the ranks have agreed on it before is not compared again: see the note
on a repeated order. On a device it is one small reduction whose outcome stays there, as a flag for the step's own
reduction, and only a collective that is given a tag pays for it.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from mizzen.comm.agreement import Gather, differing_texts
from mizzen.comm.backend import Backend, Group, Request, Tag
from mizzen.comm.torch_backend import SideChannel, Threaded, TorchBackend
from mizzen.comm.watchdog import Call, Watchdog
from mizzen.errors import CommError
from mizzen.wording import rank_list

TEXT: Final = 256
"""Bytes of a tag in words, as they are exchanged once tags differ."""
EXCHANGES: Final = ("all_to_all", "all_to_all_single")
"""Collectives in which every two ranks have a size of their own."""
UNEVEN: Final = (*EXCHANGES, "gather", "scatter")
"""Collectives to which the ranks may bring messages of different sizes; gloo takes only exchanges of them."""
REMEMBERED: Final = (1 << 16) - 1
"""Different calls, and places in their order, of a group; with more, the order is learnt anew."""


def sizes(request: Request, *, is_tagged: bool = False, uneven: Sequence[str] = UNEVEN) -> tuple[Any, ...]:
    """What the ranks must agree on of the tensors that they bring: counts of elements and dtypes, or dtypes alone."""
    if request.operation in uneven and not (is_tagged and is_even(request)):
        return tuple(dict.fromkeys(tensor.dtype for tensor in request.payload)) if uneven is EXCHANGES else ()
    return tuple([each for tensor in request.payload for each in (tensor.numel(), tensor.dtype)])


def words(request: Request, tag: Tag | None = None, *, uneven: Sequence[str] = UNEVEN) -> str:
    """All that the ranks must agree on: the tag, the operation, and the sizes where these have to be equal."""
    found = ""
    for each in sizes(request, is_tagged=tag is not None, uneven=uneven):
        found += f"{' + ' if found and not found.endswith(' ') else ''}{each}{' ' if isinstance(each, int) else ''}"
    what = f"{request.title} of {found}" if found else request.title
    return what if tag is None else f"{tag}: {what}"


def is_even(request: Request) -> bool:
    """Whether an exchange is one of equal parts. All ranks answer alike where they bring equal tags."""
    return request.operation == "all_to_all_single" and request.arguments[2:] == (None, None)


# [Note: a repeated order]
# A training step issues the calls of the step before it, in the same order. So a rank remembers, for the last few calls
# of a group, which call the ranks have agreed on next. A rank that comes with that call goes on without asking: the
# others either bring the same call, or one that was not agreed on. A rank that brings such a call asks for a comparison
# through connections that nothing else uses (`SideChannel`), and puts nothing into the group before all have
# answered. If all bring it, they learn it. If some do not, these wait in the collective and the others in the
# comparison: neither ends, nothing is exchanged, and each is told of the other by the watchdog.
# The memory is the same on every rank, since only what all have agreed on changes it.
class CallOrder:
    """Which call of one group comes after which, as far as its ranks have agreed on it."""

    __slots__ = ("_history", "_next", "_number", "_numbers", "_step")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Learn all anew; every rank does so at the same call."""
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next: dict[int, int] = {}
        self._history = 0
        """The numbers of the last four calls, in 16 bits each."""
        self._number = 0
        self._step: int | None = None

    def expects(self, call: tuple[Any, ...], step: int | None) -> bool | None:
        """Whether this call was agreed on here; None where nothing was.

        The number of the step is compared once. After that, its growth from call to call is a part of the call.
        """
        if step is not None:
            if self._step is not None:
                call = (*call, step - self._step)
            self._step = step
        number = self._numbers.get(call)
        if number is None:
            number = self._numbers[call] = len(self._numbers) + 1
        self._number = number
        agreed = self._next.get(self._history)
        return None if agreed is None else agreed == number

    def agree(self) -> None:
        """All ranks have made the call that was asked about last."""
        if len(self._numbers) >= REMEMBERED or len(self._next) >= REMEMBERED:
            step = self._step
            self.forget()
            self._step = step
            return
        self._next[self._history] = self._number
        self._history = (self._history << 16 | self._number) & 0xFFFFFFFFFFFFFFFF


def parts(request: Request, ranks: int) -> list[int]:
    """How many elements an exchange sends to each rank, and then expects of each; -1 where its arguments do not say."""
    received, sent, *splits = request.arguments
    if request.operation == "all_to_all":
        sends, expects = ([tensor.numel() for tensor in tensors] for tensors in (sent, received))
    else:
        expects, sends = _split(received, splits[0], ranks), _split(sent, splits[1], ranks)
    unknown = [-1] * ranks
    return [*(sends if len(sends) == ranks else unknown), *(expects if len(expects) == ranks else unknown)]


def _split(tensor: torch.Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    if not rows:
        return [tensor.numel() // ranks] * ranks
    width = tensor.numel() // max(len(tensor), 1)
    return [count * width for count in rows]


def compare_parts(rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
    """Raise on every rank alike when one sends another more, or less, than that one expects.

    The row of a rank has what it sends to each, and then what it expects of each.
    """
    size = len(ranks)
    for place, row in enumerate(rows):
        for other, (sent, expected) in enumerate(zip(row[:size], (each[size + place] for each in rows), strict=True)):
            if sent != expected and -1 not in (sent, expected):
                raise CommError(
                    f"the parts of an exchange do not fit; nothing was exchanged. Rank {ranks[place]} sends "
                    f"{sent} elements to rank {ranks[other]}, which expects {expected}"
                )


def compare(text: str, ranks: Sequence[int], gather: Gather, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Raise on every rank alike when the texts of the group's ranks differ; the numbers that each sends along."""
    texts, along = differing_texts(text, gather, numbers=numbers, longest=TEXT)
    if not texts:
        return along
    places: dict[str, list[int]] = {}
    for place, rank in enumerate(ranks):
        places.setdefault(texts.get(place, "yet other places"), []).append(rank)
    raise CommError(
        "the ranks have parted ways; nothing was exchanged. "
        + "; ".join(f"{rank_list(members)} at {place}" for place, members in places.items())
    )


def differ_on_device(value: int, device: torch.device, reduce_max: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """A flag on the device that is true when the ranks' hashes differ; the host is not synchronised."""
    # `full` passes the number with the kernel, where copying a host tensor would wait for the stream.
    both = torch.cat([torch.full((1,), number, dtype=torch.int64, device=device) for number in (value, -value)])
    reduce_max(both)
    return both.sum() != 0  # the largest digest minus the smallest


ORDERED_RANKS: Final = 64
"""The largest group whose order of calls is learnt: it takes a second connection between any two of its ranks."""
PARTS_RANKS: Final = 16
"""The largest group whose ranks send the parts of an exchange with every digest, not in a message of their own."""


class Comparison:
    """What the ranks of one group compare.

    is_agreed(request, tag)       before a call is noted
    ensure_agreement(call, ...)   after that: returns at once where the ranks have agreed on the call, else compares
    """

    def __init__(self, backend: Backend, watchdog: Watchdog, group: Group, handle: Any) -> None:
        self._backend, self._watchdog, self._group, self._handle = backend, watchdog, group, handle
        is_by_gloo = isinstance(backend, TorchBackend) and backend.is_all_gloo(handle)
        self._order = CallOrder() if is_by_gloo and len(group.ranks) <= ORDERED_RANKS else None
        self._channel: SideChannel | None = None
        """Where calls are compared once some of them no longer are."""
        self.broken = ""
        """Why nothing more can be exchanged in this group."""

    def is_agreed(self, request: Request, tag: Tag | None) -> bool | None:
        """Whether the ranks have agreed on this call here; None where they have not agreed on any."""
        if self._order is None:
            return None
        brought = sizes(request, is_tagged=tag is not None, uneven=EXCHANGES)
        if tag is None:
            return self._order.expects((request.operation, request.detail, *brought), None)
        return self._order.expects((request.operation, request.detail, tag.unit, tag.phase, *brought), tag.step)

    def ensure_agreement(self, call: Call, tag: Tag | None, is_agreed: bool | None) -> None:
        """Return when the ranks are known to bring the same; raise a CommError that names those who do not."""
        if is_agreed is not None and self._channel is None:
            self._connect(call)
        has_parts = call.request.operation in EXCHANGES and not (tag is not None and is_even(call.request))
        if not is_agreed or has_parts:
            self._compare(call, tag, has_parts=has_parts)
        if self._order is not None:
            self._order.agree()

    def _compare(self, call: Call, tag: Tag | None, *, has_parts: bool) -> None:
        request, ranks = call.request, self._group.ranks
        is_by_gloo = isinstance(self._backend, TorchBackend) and self._backend.is_by_gloo(request, self._handle)
        text = words(request, tag, uneven=EXCHANGES if is_by_gloo else UNEVEN)
        wanted = parts(request, len(ranks)) if has_parts and is_by_gloo else None
        along = [0] * (2 * len(ranks)) if is_by_gloo and len(ranks) <= PARTS_RANKS else []

        def gather(row: torch.Tensor) -> torch.Tensor:
            return self._gather(call, row)

        try:
            rows = compare(text, ranks, gather, wanted if wanted and along else along)
            if wanted is not None:
                compare_parts(rows if along else gather(torch.tensor(wanted)).tolist(), ranks)
        except CommError:
            if self._order is not None:
                self._order.forget()
            raise

    def _gather(self, call: Call, row: torch.Tensor) -> torch.Tensor:
        rows = row.new_empty(len(self._group.ranks), row.numel())
        if self._channel is None:
            part = Request("all_gather_into_tensor", (rows.view(-1), row), payload=(row,))
            self._watchdog.wait_for_part(call, self._backend.issue(part, self._handle))
            return rows
        try:
            self._watchdog.wait_for_part(call, self._channel.all_gather(rows, row))
        except CommError as error:
            # Others may wait in the collective itself: what this rank exchanged in the group now would be taken for it.
            self.broken = str(error)
            raise
        return rows

    def _connect(self, call: Call) -> None:
        """Open the side channel. All ranks come here at the same call, and nothing else is under way in their order."""
        name = self._gather(call, torch.tensor([secrets.randbits(62)]))[0].item()
        backend, handle = self._backend, self._handle
        if not isinstance(backend, TorchBackend):
            raise AssertionError(f"the order of calls is learnt for gloo alone, not for {backend.name}")
        opened: list[SideChannel] = []
        work = Threaded(lambda: opened.append(SideChannel(handle, str(name))), handle)
        self._watchdog.wait_for_part(call, work)
        self._channel = opened[0]
