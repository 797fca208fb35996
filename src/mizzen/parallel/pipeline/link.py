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
from mizzen.comm.communicator import MessageGroup, MessageWork, Work
from mizzen.parallel.pipeline.schedule import StageMessage
from mizzen.parallel.pipeline.wire import ALIGNED, Description, TensorFacts, pack, size_of, unpack, up

AnyWork = Work | MessageWork
LEAD: Final = ALIGNED
"""Bytes of a lead: two 64-bit numbers, and zeros up to where a tensor may begin."""
KINDS: Final = 4
"""Messages that one transfer may be made of, each with a number of its own."""
SPARE: Final = 2
"""Envelopes that an edge keeps on a host: one is filled while another leaves."""


@dataclass(slots=True, eq=False)
class Envelope:
    """Memory for a lead and tensors: on a host in one, on a device apart."""

    whole: Tensor
    lead: Tensor
    data: Tensor
    places: Sequence[Tensor] = ()
    """Where the tensors of a description go that is sent."""


@dataclass(slots=True)
class Edge:
    """What one end remembers of the output of a chunk that goes to the next one."""

    description: Description | None = None
    size: int = 0
    """Bytes of the tensors of that description."""
    waiting: deque[StageMessage] = field(default_factory=deque)
    """At the receiver: those that may be posted once the one before is taken."""
    posted: StageMessage | None = None
    spare: list[Envelope] = field(default_factory=list)
    """At the sender: envelopes of this description whose messages have left."""


@dataclass(slots=True)
class Receipt:
    """Messages that are on their way here."""

    works: Sequence[AnyWork]
    data: Tensor
    lead: Tensor | None = None


@dataclass(slots=True)
class Sent:
    """Messages that are on their way from here, with the memory that they need."""

    works: Sequence[AnyWork]
    memory: Sequence[PeerMessage]
    reuse: tuple[Envelope, list[Envelope]] | None = None
    """Their envelope, and where it goes when they have left."""


class Link:
    """All messages of one stage with the others, numbered by chunk and micro-batch."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self._group = MessageGroup(group)
        self._ranks = tuple(ranks)
        """The global rank of each stage."""
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._edges: dict[tuple[bool, int], Edge] = {}
        self._receipts: dict[StageMessage, Receipt] = {}
        self._sent: list[Sent] = []

    # Activations

    def send(self, transfer: StageMessage, description: Description, tensors: Sequence[Tensor]) -> None:
        """Send an output to the stage of the next chunk."""
        edge = self._edge(transfer, is_sent=True)
        if description == edge.description:
            envelope = edge.spare.pop() if edge.spare else self._envelope_to_send(description.size, description.tensors)
            for place, tensor in zip(envelope.places, tensors, strict=True):
                place.copy_(tensor.detach())
            reuse = (envelope, edge.spare) if self._is_on_host else None  # new memory of a host has no pages
            self._start(transfer, self._parts(transfer, envelope, is_sent=True), reuse)
            return
        text, size, old = description.encode(), description.size, self._envelope_to_send(edge.size, ())
        old.lead.view(torch.int64)[:2] = torch.tensor((len(text), size))
        body = self._empty(up(len(text)) + size)
        body[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        pack(tensors, body[up(len(text)) :])
        parts = self._parts(transfer, old, is_sent=True)
        self._start(transfer, [*parts, self._message(transfer, body, 2, is_sent=True)])
        edge.description, edge.size, edge.spare = description, size, []

    def post(self, transfer: StageMessage) -> None:
        """Let an input come in as soon as the one before it on its edge is here."""
        edge = self._edge(transfer, is_sent=False)
        edge.waiting.append(transfer)
        self._post_next(edge)

    def receive(self, transfer: StageMessage) -> tuple[Description, list[Tensor]]:
        """Wait for an input that was posted."""
        edge = self._edge(transfer, is_sent=False)
        receipt = self._taken(transfer)
        length, size, *_ = receipt.lead.view(torch.int64).tolist() if receipt.lead is not None else (0, 0)
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

    # Gradients: one travels as it is, several as the bytes of all

    def send_gradients(self, transfer: StageMessage, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of an input, which nobody else has, back to the stage that it came from."""
        if not gradients:
            return
        if len(gradients) == 1:
            data = gradients[0].detach().contiguous()
        else:
            data = self._empty(sum(up(gradient.nbytes) for gradient in gradients))
            pack(gradients, data)
        self._start(transfer, [self._message(transfer, data, 0, is_sent=True)])

    def post_gradients(self, transfer: StageMessage, facts: Sequence[TensorFacts]) -> None:
        """Let the gradients of an output come in."""
        if not facts:
            return
        if len(facts) == 1:
            data = torch.empty(facts[0].shape, dtype=facts[0].torch_dtype, device=self._device)
        else:
            data = self._empty(size_of(facts))
        works = self._exchange(transfer, [self._message(transfer, data, 0, is_sent=False)])
        self._receipts[transfer] = Receipt(works, data)

    def receive_gradients(self, transfer: StageMessage, facts: Sequence[TensorFacts]) -> list[Tensor]:
        """Wait for gradients that were posted."""
        if not facts:
            return []
        data = self._taken(transfer).data
        return [data] if len(facts) == 1 else unpack(facts, data)

    # Both

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for sent in self._sent:
            for work in sent.works:
                work.wait()
        self._let_go()

    def _edge(self, transfer: StageMessage, *, is_sent: bool) -> Edge:
        key = is_sent, transfer.chunk
        edge = self._edges.get(key)
        if edge is None:
            edge = self._edges[key] = Edge()
        return edge

    def _post_next(self, edge: Edge) -> None:
        if edge.posted is not None or not edge.waiting:
            return
        transfer = edge.posted = edge.waiting.popleft()
        envelope = self._empty_envelope(edge.size)
        works = self._exchange(transfer, self._parts(transfer, envelope, is_sent=False))
        self._receipts[transfer] = Receipt(works, envelope.data, envelope.lead)

    def _empty_envelope(self, size: int) -> Envelope:
        """Memory for a lead and so many bytes."""
        if not self._is_on_host:
            data = self._empty(size)
            return Envelope(data, torch.empty(LEAD, dtype=torch.uint8), data)
        whole = self._empty(LEAD + size)
        return Envelope(whole, whole[:LEAD], whole[LEAD:])

    def _envelope_to_send(self, size: int, facts: Sequence[TensorFacts]) -> Envelope:
        """An envelope to be sent, with a lead that says that nothing has changed."""
        envelope = self._empty_envelope(size)
        envelope.lead.zero_()
        envelope.places = unpack(facts, envelope.data)
        return envelope

    def _parts(self, transfer: StageMessage, envelope: Envelope, *, is_sent: bool) -> list[PeerMessage]:
        if self._is_on_host:
            return [self._message(transfer, envelope.whole, 1, is_sent=is_sent)]
        tensors = [(envelope.lead, 0), (envelope.whole, 1)]
        return [self._message(transfer, each, kind, is_sent=is_sent) for each, kind in tensors if each.numel()]

    def _message(self, transfer: StageMessage, data: Tensor, kind: int, *, is_sent: bool) -> PeerMessage:
        is_gradient = transfer.payload == "gradient"
        # A number is never reused for another edge: chunks are few, micro-batches are many.
        number = ((transfer.micro << 10 | transfer.chunk) << 1 | is_gradient) * KINDS + kind
        return PeerMessage(data, self._ranks[transfer.target if is_sent else transfer.source], number, is_sent)

    def _start(
        self,
        transfer: StageMessage,
        messages: Sequence[PeerMessage],
        reuse: tuple[Envelope, list[Envelope]] | None = None,
    ) -> None:
        self._let_go()
        self._sent.append(Sent(self._exchange(transfer, messages), messages, reuse))

    def _let_go(self) -> None:
        """Forget messages that have left, and keep their envelopes for others."""
        before, self._sent = self._sent, []
        for sent in before:
            if not all([work.is_completed() for work in sent.works]):
                self._sent.append(sent)
            elif sent.reuse is not None:
                envelope, spare = sent.reuse
                if len(spare) < SPARE:
                    spare.append(envelope)

    def _exchange(self, transfer: StageMessage, messages: Sequence[PeerMessage]) -> list[AnyWork]:
        """Start messages: those of the host and those of the device apart."""
        alike: Iterable[Sequence[PeerMessage]] = (messages,)
        if not self._is_on_host:
            kinds = dict.fromkeys(message.tensor.device.type for message in messages)
            alike = ([message for message in messages if message.tensor.device.type == kind] for kind in kinds)
        works = [self._group.start(each, transfer) for each in alike]
        return [work for work in works if work is not None]

    def _taken(self, transfer: StageMessage) -> Receipt:
        receipt = self._receipts.pop(transfer)
        for work in receipt.works:
            work.wait()
        return receipt

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)
