"""When each instruction of a schedule would run, and how much of the time stages would wait. Arithmetic, no torch.

[Note: the bubble]
The bubble is the share of all stages' time in which they compute nothing: 1 - busy / (stages * length), from the first
start to the last end. With times that are measured it is what a run would lose to waiting; messages cost nothing while
stages compute, and the time that a stage waits for them counts.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mizzen.errors import UsageError
from mizzen.parallel.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Instruction,
    Receive,
    Schedule,
    Send,
    StageMessage,
    input_of,
    transfers,
)

PerChunk: TypeAlias = float | Sequence[float]
"""One time for all chunks, or one for each."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long the work on one micro-batch takes, in any unit: for all chunks alike, or for each of them."""

    forward: PerChunk = 1.0
    backward: PerChunk = 2.0
    """Both gradients."""
    backward_input: PerChunk | None = None
    """The gradient of the input alone; half of `backward` where it is not given."""
    transfer: float = 0.0
    """From the post of a message to its arrival, where the one before it is through."""

    def of(self, one: Instruction) -> float:
        """How long an instruction takes."""
        if one.kind is FORWARD:
            return _at(self.forward, one.chunk)
        backward = _at(self.backward, one.chunk)
        of_input = backward / 2 if self.backward_input is None else _at(self.backward_input, one.chunk)
        shares = {BACKWARD: backward, BACKWARD_INPUT: of_input, BACKWARD_WEIGHT: backward - of_input}
        return shares[one.kind]


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """An instruction with its start and its end."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each stage computes what."""

    schedule: Schedule
    rows: tuple[tuple[TimedInstruction, ...], ...]

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy(self) -> tuple[float, ...]:
        """For how long each stage computes."""
        return tuple(sum(each.end - each.start for each in row) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share of time in which stages wait, from 0 to 1; see [Note: the bubble]."""
        return 1 - sum(self.busy) / (len(self.rows) * self.length) if self.length else 0.0


def timeline(schedule: Schedule, times: Times) -> Timeline:
    """When each instruction would start and end, with these times.

    A stage takes its actions in order. A message sets off when both ends have posted it and the one before it on its
    channel is through; an instruction starts when its message is there.
    """
    _check(schedule, times)
    clocks = [0.0] * schedule.stages
    rows: list[list[TimedInstruction]] = [[] for _ in range(schedule.stages)]
    channels: dict[tuple[int, int], _Channel] = defaultdict(lambda: _Channel(times.transfer))
    actions = [deque(row) for row in transfers(schedule)]
    waiting = deque(range(schedule.stages))
    while waiting:
        stage = waiting.popleft()
        while actions[stage]:
            action = actions[stage][0]
            if isinstance(action, Instruction):
                needed = input_of(action, schedule.placement)
                arrival = channels[needed.source, stage].arrival(needed) if needed else 0.0
                if arrival is None:
                    break
                start = max(clocks[stage], arrival)
                clocks[stage] = start + times.of(action)
                rows[stage].append(TimedInstruction(action, start, clocks[stage]))
            else:
                channel = channels[action.message.source, action.message.target]
                channel.post(action, clocks[stage])
                if isinstance(action, Send):
                    waiting.append(action.message.target)
            actions[stage].popleft()
    return Timeline(schedule, tuple(map(tuple, rows)))


class _Channel:
    """The messages from one stage to another, one after the other."""

    def __init__(self, transfer: float) -> None:
        self._transfer = transfer
        self._sent: deque[tuple[StageMessage, float]] = deque()
        self._awaited: deque[float] = deque()
        self._arrived: dict[StageMessage, float] = {}
        self._free = 0.0

    def post(self, action: Send | Receive, moment: float) -> None:
        if isinstance(action, Send):
            self._sent.append((action.message, moment))
        else:
            self._awaited.append(moment)
        while self._sent and self._awaited:
            message, sent = self._sent.popleft()
            self._free = max(self._free, sent, self._awaited.popleft()) + self._transfer
            self._arrived[message] = self._free

    def arrival(self, message: StageMessage) -> float | None:
        return self._arrived.get(message)


def _at(given: PerChunk, chunk: int) -> float:
    return given if isinstance(given, int | float) else given[chunk]


def _check(schedule: Schedule, times: Times) -> None:
    given = {"forward": times.forward, "backward": times.backward, "backward_input": times.backward_input}
    for name, each in given.items():
        if each is None:
            continue
        values = [each] if isinstance(each, int | float) else list(each)
        if not isinstance(each, int | float) and len(values) != schedule.chunks:
            raise UsageError(f"{name} has {len(values)} times for {schedule.chunks} chunks: give one, or one for each")
        if any(value < 0 for value in values):
            raise UsageError(f"{name} has a time below 0: {min(values)}")
    if times.transfer < 0:
        raise UsageError(f"transfer is {times.transfer}, a time below 0")
    for chunk in range(schedule.chunks):
        if times.of(Instruction(BACKWARD_WEIGHT, chunk, 0)) < 0:
            raise UsageError(
                f"the backward of chunk {chunk} takes {_at(times.backward, chunk)}, less than the gradient of its "
                "input alone"
            )
