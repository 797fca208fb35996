"""A pipeline's schedule as data: who computes what in which order, and the transfers that follow from it. No torch.

A model is cut into chunks, numbered along the forward. `placement[chunk]` is the stage that holds a chunk: a stage is
a rank along the pipeline, and holds one chunk or several. `rows[stage]` is what the stage computes, in order. Nothing
else is said, because everything else follows: the output of a chunk's forward goes to the stage of the next chunk, the
gradient of its input to the stage of the chunk before; between two chunks of one stage nothing is sent.

A `Schedule` cannot be made unless it can be run: `check` is part of making one. Tables by name are in `tables.py`,
times and the bubble in `timeline.py`.

[Note: how transfers meet]
`transfers` is what a stage does, in order. A send is posted after the instruction that makes its value, and nobody
waits for it before the end of the batch. A receive is posted ahead of the instruction that uses its value, and that
instruction waits for it. The messages from one stage to another are a channel of their own, apart from those of the
opposite direction: the n-th send of a channel is met by the n-th receive, so both ends post them in one order, the one
in which the sender makes the values. Where a stage uses them in another order, it has posted those before as well.
That is enough for back ends that look at the order alone (NCCL) and for those that look at tags (gloo).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final, Literal, TypeAlias

from mizzen.errors import PlanError
from mizzen.wording import and_more


class InstructionKind(Enum):
    """What a stage computes for one micro-batch; the values are the letters of a printed table."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients, of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """The gradient of a chunk's input alone, which the chunk before waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the weights, after that of the input; nobody waits for them before the step."""


FORWARD: Final = InstructionKind.FORWARD
BACKWARD: Final = InstructionKind.BACKWARD
BACKWARD_INPUT: Final = InstructionKind.BACKWARD_INPUT
BACKWARD_WEIGHT: Final = InstructionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Instruction:
    """One chunk computes one micro-batch; written `2F0`: chunk 2, forward, micro-batch 0."""

    kind: InstructionKind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """An instruction from its text, such as `2F0`."""
        for kind in InstructionKind:
            chunk, letter, micro = text.partition(kind.value)
            if letter and chunk.isdecimal() and micro.isdecimal():
                return cls(kind, int(chunk), int(micro))
        letters = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in InstructionKind)
        raise PlanError(
            f"{text!r} is no instruction: write chunk, letter and micro-batch, as 2F0; letters are {letters}"
        )


@dataclass(frozen=True, slots=True)
class StageMessage:
    """One value that goes from a stage to another: the input of `chunk`'s forward, or the gradient of its output."""

    payload: Literal["activation", "gradient"]
    chunk: int
    """The chunk that uses the value."""
    micro: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.payload} of micro-batch {self.micro} for chunk {self.chunk} ({self.source} -> {self.target})"


@dataclass(frozen=True, slots=True)
class Send:
    """Post a message to another stage, and go on."""

    message: StageMessage


@dataclass(frozen=True, slots=True)
class Receive:
    """Post a message from another stage, and go on; the instruction that uses its value waits for it."""

    message: StageMessage


Action: TypeAlias = Instruction | Send | Receive


@dataclass(frozen=True)
class Schedule:
    """The table of one batch; made only if `check` finds that it can be run."""

    name: str
    stages: int
    chunks_per_stage: int
    micro_batches: int
    placement: tuple[int, ...]
    """The stage that holds each chunk."""
    rows: tuple[tuple[Instruction, ...], ...]
    """What each stage computes, in order."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(
        cls,
        rows: Sequence[str | Iterable[Instruction | str]],
        *,
        placement: Literal["loop", "v"] | Sequence[int] = "loop",
        name: str = "custom",
    ) -> "Schedule":
        """A schedule from one list of instructions for each stage, or one line of text such as `0F0 0F1 0B0 0B1`.

        `placement` is `loop` (chunk 0 on stage 0, and round again), `v` (forth, then back) or the stage of each chunk.
        """
        read = tuple(tuple(_instructions(row)) for row in rows)
        if not any(read):
            raise PlanError("a schedule without instructions: give one list of instructions for each stage")
        chunks = 1 + max(one.chunk for row in read for one in row)
        per_stage = max(1, chunks // len(read))
        places = {"loop": loop_placement, "v": v_placement}
        if isinstance(placement, str) and placement not in places:
            raise PlanError(f"placement {placement!r} is unknown: use 'loop', 'v' or the stage of each chunk")
        return cls(
            name=name,
            stages=len(read),
            chunks_per_stage=per_stage,
            micro_batches=1 + max(one.micro for row in read for one in row),
            placement=places[placement](len(read), per_stage) if isinstance(placement, str) else tuple(placement),
            rows=read,
        )

    @property
    def chunks(self) -> int:
        """How many chunks the model is cut into."""
        return len(self.placement)

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether nothing is trained: the table of an evaluation."""
        return all(one.kind is FORWARD for row in self.rows for one in row)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a stage holds, in the order of the forward."""
        return tuple(chunk for chunk, owner in enumerate(self.placement) if owner == stage)

    def __str__(self) -> str:
        title = f"{self.name}: {self.stages} stages, {self.chunks} chunks, {self.micro_batches} micro-batches"
        rows = (f"  {stage}: {' '.join(map(str, row))}" for stage, row in enumerate(self.rows))
        return "\n".join((title, *rows))


def loop_placement(stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk after chunk on stage after stage, and again from the first one."""
    return tuple(range(stages)) * chunks_per_stage


def v_placement(stages: int, chunks_per_stage: int) -> tuple[int, ...]:
    """Chunk after chunk on stage after stage, then back: a turn needs no transfer."""
    there = tuple(range(stages))
    return tuple(stage for turn in range(chunks_per_stage) for stage in (there[::-1] if turn % 2 else there))


def check(schedule: Schedule) -> None:
    """Refuse a table that is not whole, or that would stop half-way."""
    _check_shape(schedule)
    kept = [_check_row(schedule, stage) for stage in range(schedule.stages)]
    if len({whole for each in kept for whole in each}) > 1:
        raise PlanError(
            f"schedule '{schedule.name}': some micro-batches have a backward and some have none; a schedule trains "
            "all of them, or none (an evaluation)"
        )
    follow(schedule, lambda stage, action: None)


def transfers(schedule: Schedule, *, ahead: int = 1) -> tuple[tuple[Action, ...], ...]:
    """What each stage does, in order: instructions, sends and receives; see [Note: how transfers meet].

    A receive is posted `ahead` instructions before the one that uses it, so that it comes in while the stage computes.
    """
    channels: dict[tuple[int, int], list[StageMessage]] = defaultdict(list)
    for row in schedule.rows:
        for one in row:
            if sent := output_of(one, schedule.placement):
                channels[sent.source, sent.target].append(sent)
    return tuple(_merged(schedule, stage, channels, ahead) for stage in range(schedule.stages))


def input_of(one: Instruction, placement: Sequence[int]) -> StageMessage | None:
    """What an instruction waits for from another stage; None where it has everything."""
    if one.kind is FORWARD and one.chunk > 0:
        payload: Literal["activation", "gradient"] = "activation"
        source = placement[one.chunk - 1]
    elif one.kind in (BACKWARD, BACKWARD_INPUT) and one.chunk < len(placement) - 1:
        payload, source = "gradient", placement[one.chunk + 1]
    else:
        return None
    target = placement[one.chunk]
    return None if source == target else StageMessage(payload, one.chunk, one.micro, source, target)


def output_of(one: Instruction, placement: Sequence[int]) -> StageMessage | None:
    """What an instruction makes for another stage; None where the next chunk is at hand, or nobody waits."""
    if one.kind is FORWARD:
        follower = Instruction(FORWARD, one.chunk + 1, one.micro)
    elif one.kind is BACKWARD_WEIGHT:
        return None
    else:
        follower = Instruction(BACKWARD, one.chunk - 1, one.micro)
    return input_of(follower, placement) if 0 <= follower.chunk < len(placement) else None


def follow(schedule: Schedule, told: Callable[[int, Action], None]) -> None:
    """Let all stages go through their actions as far as they come, telling of each; refuse a table that stops.

    A message arrives when both ends have posted it and those before it on its channel have arrived.
    """
    actions = transfers(schedule)
    places = [0] * schedule.stages
    posted: Counter[tuple[type, StageMessage]] = Counter()
    waiting: deque[int] = deque(range(schedule.stages))
    while waiting:
        stage = waiting.popleft()
        while places[stage] < len(actions[stage]):
            action = actions[stage][places[stage]]
            if isinstance(action, Instruction):
                needed = input_of(action, schedule.placement)
                if needed and not (posted[Send, needed] and posted[Receive, needed]):
                    break
            else:
                posted[type(action), action.message] += 1
                if isinstance(action, Send):
                    waiting.append(action.message.target)
            told(stage, action)
            places[stage] += 1
    if stuck := [stage for stage in range(schedule.stages) if places[stage] < len(actions[stage])]:
        raise PlanError(_words_of_deadlock(schedule, {stage: actions[stage][places[stage]] for stage in stuck}))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches whose activations a stage keeps at once, each chunk of its own counted.

    They are kept from the forward until the last of their backward. An evaluation keeps the one it computes.
    """
    return tuple(max(_kept(row, schedule.is_forward_only), default=0) for row in schedule.rows)


def peak_received(schedule: Schedule) -> tuple[int, ...]:
    """The most receives that a stage has posted and not used at once: as many buffers are there for them."""
    open_ones, peaks = [0] * schedule.stages, [0] * schedule.stages

    def count(stage: int, action: Action) -> None:
        if isinstance(action, Receive):
            open_ones[stage] += 1
            peaks[stage] = max(peaks[stage], open_ones[stage])
        elif isinstance(action, Instruction) and input_of(action, schedule.placement):
            open_ones[stage] -= 1

    follow(schedule, count)
    return tuple(peaks)


def _kept(row: Iterable[Instruction], is_forward_only: bool) -> Iterator[int]:
    kept = 0
    for one in row:
        kept += one.kind is FORWARD
        yield kept
        kept -= is_forward_only or one.kind in (BACKWARD, BACKWARD_WEIGHT)


def _merged(
    schedule: Schedule, stage: int, channels: Mapping[tuple[int, int], Sequence[StageMessage]], ahead: int
) -> tuple[Action, ...]:
    row, places = schedule.rows[stage], schedule.placement
    orders = {source: iter(sent) for (source, target), sent in channels.items() if target == stage}
    actions: list[Action] = []
    posted: set[StageMessage] = set()

    def post(needed: StageMessage) -> None:
        for earlier in orders.get(needed.source, iter(())):
            actions.append(Receive(earlier))
            posted.add(earlier)
            if earlier == needed:
                return

    next_to_post = 0
    for number, one in enumerate(row):
        for later in row[next_to_post : number + ahead + 1]:
            needed = input_of(later, places)
            if needed and needed not in posted:
                post(needed)
        next_to_post = max(next_to_post, number + ahead + 1)
        actions.append(one)
        if sent := output_of(one, places):
            actions.append(Send(sent))
    return tuple(actions)


def _instructions(row: str | Iterable[Instruction | str]) -> Iterator[Instruction]:
    for one in row.split() if isinstance(row, str) else row:
        yield Instruction.parse(one) if isinstance(one, str) else one


def _check_shape(schedule: Schedule) -> None:
    stages, per_stage = schedule.stages, schedule.chunks_per_stage
    named = f"schedule '{schedule.name}'"
    for what, count in (("stages", stages), ("chunks_per_stage", per_stage), ("micro_batches", schedule.micro_batches)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PlanError(f"{named}: {what} is {count!r}; it is a whole number of at least 1")
    if len(schedule.rows) != stages:
        raise PlanError(f"{named} has {len(schedule.rows)} rows for {stages} stages: one row for each is wanted")
    held = Counter(schedule.placement)
    if sorted(held) != list(range(stages)) or set(held.values()) != {per_stage}:
        raise PlanError(
            f"{named}: placement {list(schedule.placement)} does not give {per_stage} of {stages * per_stage} chunks "
            f"to each of the stages 0 to {stages - 1}"
        )


def _check_row(schedule: Schedule, stage: int) -> set[bool]:
    """Whether the micro-batches of a stage have a backward; refused unless each is whole and in order."""
    named = f"schedule '{schedule.name}', stage {stage}"
    row = schedule.rows[stage]
    seen: dict[Instruction, int] = {}
    for number, one in enumerate(row):
        if not 0 <= one.chunk < schedule.chunks or not 0 <= one.micro < schedule.micro_batches:
            raise PlanError(
                f"{named}: {one} is out of range: there are {schedule.chunks} chunks and {schedule.micro_batches} "
                "micro-batches, numbered from 0"
            )
        if (owner := schedule.placement[one.chunk]) != stage:
            raise PlanError(f"{named}: {one} is of chunk {one.chunk}, which stage {owner} holds")
        if one in seen:
            raise PlanError(f"{named}: {one} is there twice")
        seen[one] = number
    found = set()
    for chunk in schedule.chunks_of(stage):
        for micro in range(schedule.micro_batches):
            kinds = {kind for kind in InstructionKind if Instruction(kind, chunk, micro) in seen}
            if kinds not in WHOLE:
                raise PlanError(
                    f"{named}: chunk {chunk} has {_letters(kinds)} of micro-batch {micro}; a micro-batch has F and B, "
                    "or F, I and W, or in an evaluation F alone, each once"
                )
            order = [seen[Instruction(kind, chunk, micro)] for kind in InstructionKind if kind in kinds]
            if order != sorted(order):
                words = " ".join(str(row[place]) for place in sorted(order))
                raise PlanError(f"{named}: {words} is the wrong order; it is F, then B, or F, then I, then W")
            found.add(len(kinds) > 1)
    for one, place in seen.items():
        for before in _local_needs(one, schedule.placement):
            if all(seen.get(each, place) >= place for each in before):
                raise PlanError(f"{named}: {one} comes before {before[0]}, whose result it takes")
    return found


def _local_needs(one: Instruction, placement: Sequence[int]) -> Iterator[tuple[Instruction, ...]]:
    """What of the same stage has to come before an instruction: one of each tuple."""
    if one.kind is FORWARD and one.chunk > 0 and placement[one.chunk - 1] == placement[one.chunk]:
        yield (Instruction(FORWARD, one.chunk - 1, one.micro),)
    has_next = one.kind in (BACKWARD, BACKWARD_INPUT) and one.chunk + 1 < len(placement)
    if has_next and placement[one.chunk + 1] == placement[one.chunk]:
        yield tuple(Instruction(kind, one.chunk + 1, one.micro) for kind in (BACKWARD, BACKWARD_INPUT))


WHOLE: Final = ({FORWARD}, {FORWARD, BACKWARD}, {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
"""What one chunk may do with one micro-batch, all in all."""


def _letters(kinds: Iterable[InstructionKind]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds)) or "nothing"


def _words_of_deadlock(schedule: Schedule, stuck: Mapping[int, Action]) -> str:
    waits = []
    for stage, action in stuck.items():
        needed = input_of(action, schedule.placement) if isinstance(action, Instruction) else None
        if needed is None:
            raise AssertionError(f"stage {stage} stops at {action}, which waits for nobody")
        waits.append(f"stage {stage} at {action} for the {needed.payload} from stage {needed.source}")
    return (
        f"schedule '{schedule.name}' would stop half-way, with stages that wait for each other: "
        f"{and_more(waits, 4, separator='; ')}. "
        "A stage has to come to what others wait for before it waits itself"
    )
