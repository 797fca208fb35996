"""What the ranks of one group bring to their collectives, compared before anything is exchanged.

What is compared, and in which words, is in `tags.py`.
"""

import secrets
from typing import Any, Final

import torch

from mizzen.comm.account import Call
from mizzen.comm.backend import Backend, Group, Request
from mizzen.comm.tags import EXCHANGES, UNEVEN, CallOrder, Tag, compare, compare_parts, is_even, parts, sizes, words
from mizzen.comm.torch_backend import SideChannel, Threaded, TorchBackend
from mizzen.comm.watch import Watch
from mizzen.errors import CommError

ORDERED_RANKS: Final = 64
"""The largest group whose order of calls is learnt: it takes a second connection between any two of its ranks."""
PARTS_RANKS: Final = 16
"""The largest group whose ranks send the parts of an exchange with every digest, not in a message of their own."""


class Comparison:
    """What the ranks of one group compare.

    is_agreed(request, tag)       before a call is accounted for
    settle(call, tag, is_agreed)  after that: returns at once where the ranks have agreed on the call, else compares
    """

    def __init__(self, backend: Backend, watch: Watch, group: Group, handle: Any) -> None:
        self._backend, self._watch, self._group, self._handle = backend, watch, group, handle
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

    def settle(self, call: Call, tag: Tag | None, is_agreed: bool | None) -> None:
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
            self._watch.wait_for_part(call, self._backend.issue(part, self._handle))
            return rows
        try:
            self._watch.wait_for_part(call, self._channel.all_gather(rows, row))
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
        self._watch.wait_for_part(call, work)
        self._channel = opened[0]
