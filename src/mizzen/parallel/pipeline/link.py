"""Messages between the stages of a pipeline: activations one way, their gradients back.

[Note: one message, and a description when it changes]
Both ends of an edge, which is one chunk's output going to the next chunk, remember the description of what went there
last, and with it the size of the next message. So the receiver posts a buffer before it knows what comes, and in a
steady run each activation is one message. It begins with a lead of two numbers: the length of a new description, and
the size of what follows it; both are zero while nothing changes. When something does, the message of the old size
carries the lead alone, and a second message the description and the tensors. Nothing is ever read by an old shape.

A receiver posts one message of an edge at a time, since its size is known once the one before is here. Gradients need
no description: whoever waits for them has sent the tensors that they belong to.

On a device the lead is a message of its own, to the host: nobody waits for the device to learn a shape.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm.backend import PeerMessage
from mizzen.comm.collectives import exchange
from mizzen.comm.communicator import Work
from mizzen.parallel.pipeline.schedule import StageMessage
from mizzen.parallel.pipeline.wire import ALIGNED, Description, TensorFacts, pack, size_of, unpack, up

LEAD: Final = ALIGNED
"""Bytes of a lead: two 64-bit numbers, and zeros up to where a tensor may begin."""
KINDS: Final = 4
"""Messages that one transfer may be made of, each with a number of its own."""


@dataclass(slots=True)
class Edge:
    """What one end remembers of the output of a chunk that goes to the next one."""

    description: Description | None = None
    size: int = 0
    """Bytes of the tensors of that description."""
    waiting: deque[StageMessage] = field(default_factory=deque)
    """At the receiver: those that may be posted once the one before is taken."""
    posted: StageMessage | None = None


@dataclass(slots=True)
class Receipt:
    """Messages that are on their way here."""

    works: Sequence[Work]
    data: Tensor
    lead: Tensor


class Link:
    """All messages of one stage with the others, numbered by chunk and micro-batch."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        """The global rank of each stage."""
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._edges: dict[tuple[bool, int], Edge] = {}
        self._receipts: dict[StageMessage, Receipt] = {}
        self._sent: list[tuple[Work, Sequence[Tensor]]] = []
        """What is on its way from here, with the memory that it needs."""

    # Activations

    def send(self, transfer: StageMessage, description: Description, tensors: Sequence[Tensor]) -> None:
        """Send an output to the stage of the next chunk."""
        edge = self._edge(transfer, is_sent=True)
        size = description.size
        if description == edge.description:
            self._start(transfer, self._envelope(transfer, (0, 0), size, tensors))
            return
        text = description.encode()
        lead = self._envelope(transfer, (len(text), size), edge.size, ())
        body = self._empty(up(len(text)) + size)
        body[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        pack(tensors, body[up(len(text)) :])
        self._start(transfer, [*lead, self._message(transfer, body, 2, is_sent=True)])
        edge.description, edge.size = description, size

    def post(self, transfer: StageMessage) -> None:
        """Let an input come in as soon as the one before it on its edge is here."""
        edge = self._edge(transfer, is_sent=False)
        edge.waiting.append(transfer)
        self._post_next(edge)

    def receive(self, transfer: StageMessage) -> tuple[Description, list[Tensor]]:
        """Wait for an input that was posted."""
        edge = self._edge(transfer, is_sent=False)
        receipt = self._taken(transfer)
        length, size, *_ = receipt.lead.view(torch.int64).tolist()
        data = receipt.data
        if length:
            data = self._empty(up(length) + size)
            for work in self._exchange(transfer, [self._message(transfer, data, 2, is_sent=False)]):
                work.wait()
            edge.description = Description.decode(bytes(data[:length].cpu().numpy()))
            edge.size, data = size, data[up(length) :]
        if edge.description is None:
            raise AssertionError(f"{transfer} came without a description")
        edge.posted = None
        self._post_next(edge)
        return edge.description, unpack(edge.description.tensors, data)

    # Gradients

    def send_gradients(self, transfer: StageMessage, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of an input back to the stage that it came from."""
        if gradients:
            data = self._bytes(gradients)
            self._start(transfer, [self._message(transfer, data, 0, is_sent=True)])

    def post_gradients(self, transfer: StageMessage, facts: Sequence[TensorFacts]) -> None:
        """Let the gradients of an output come in."""
        if facts:
            data = self._empty(size_of(facts))
            works = self._exchange(transfer, [self._message(transfer, data, 0, is_sent=False)])
            self._receipts[transfer] = Receipt(works, data, data[:0])

    def receive_gradients(self, transfer: StageMessage, facts: Sequence[TensorFacts]) -> list[Tensor]:
        """Wait for gradients that were posted."""
        return unpack(facts, self._taken(transfer).data) if facts else []

    # Both

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _edge(self, transfer: StageMessage, *, is_sent: bool) -> Edge:
        return self._edges.setdefault((is_sent, transfer.chunk), Edge())

    def _post_next(self, edge: Edge) -> None:
        if edge.posted is not None or not edge.waiting:
            return
        transfer = edge.posted = edge.waiting.popleft()
        whole, lead, data = self._room(edge.size)
        messages = self._parts(transfer, lead, whole, is_sent=False)
        self._receipts[transfer] = Receipt(self._exchange(transfer, messages), data, lead)

    def _envelope(
        self, transfer: StageMessage, lead: tuple[int, int], size: int, tensors: Sequence[Tensor]
    ) -> list[PeerMessage]:
        """A lead with tensors, or with nothing, in a message of the size that the receiver expects."""
        whole, numbers, data = self._room(size)
        numbers.zero_()
        if any(lead):
            numbers.view(torch.int64)[:2] = torch.tensor(lead)
        pack(tensors, data)
        return self._parts(transfer, numbers, whole, is_sent=True)

    def _room(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for a lead and so many bytes, on the host in one; with it the lead and the bytes alone."""
        if not self._is_on_host:
            whole = self._empty(size)
            return whole, torch.empty(LEAD, dtype=torch.uint8), whole
        whole = self._empty(LEAD + size)
        return whole, whole[:LEAD], whole[LEAD:]

    def _bytes(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients, which nobody else has, as bytes: the memory of a single one, or a copy."""
        first, size = gradients[0], size_of([_facts(each) for each in gradients])
        if len(gradients) == 1 and first.is_contiguous() and first.nbytes == size:
            return first.detach().reshape(-1).view(torch.uint8)
        whole = self._empty(size)
        pack(gradients, whole)
        return whole

    def _parts(self, transfer: StageMessage, lead: Tensor, whole: Tensor, *, is_sent: bool) -> list[PeerMessage]:
        tensors = [(whole, 1)] if self._is_on_host else [(lead, 0), (whole, 1)]
        return [self._message(transfer, each, kind, is_sent=is_sent) for each, kind in tensors if each.numel()]

    def _message(self, transfer: StageMessage, data: Tensor, kind: int, *, is_sent: bool) -> PeerMessage:
        is_gradient = transfer.payload == "gradient"
        # A number is never reused for another edge: chunks are few, micro-batches are many.
        number = ((transfer.micro << 10 | transfer.chunk) << 1 | is_gradient) * KINDS + kind
        return PeerMessage(data, self._ranks[transfer.target if is_sent else transfer.source], number, is_sent)

    def _start(self, transfer: StageMessage, messages: Sequence[PeerMessage]) -> None:
        self._sent = [(work, memory) for work, memory in self._sent if not work.is_completed()]
        memory = [message.tensor for message in messages]
        self._sent += [(work, memory) for work in self._exchange(transfer, messages)]

    def _exchange(self, transfer: StageMessage, messages: Sequence[PeerMessage]) -> list[Work]:
        """Start messages: those of the host and those of the device apart."""
        alike: Iterable[Sequence[PeerMessage]] = (messages,)
        if not self._is_on_host:
            kinds = dict.fromkeys(message.tensor.device.type for message in messages)
            alike = ([message for message in messages if message.tensor.device.type == kind] for kind in kinds)
        works = [exchange(each, self._group, what=str(transfer)) for each in alike]
        return [work for work in works if work is not None]

    def _taken(self, transfer: StageMessage) -> Receipt:
        receipt = self._receipts.pop(transfer)
        for work in receipt.works:
            work.wait()
        return receipt

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)


def _facts(tensor: Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), needs_gradient=False)
