"""Schedules in steps of instructions, as scripts subclass them; `table` makes one a schedule that mizzen runs.

A stage takes turns: in a step it exchanges what the step before has made with its neighbours, then computes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.schedule import BACKWARD, FORWARD, Instruction, Schedule


class PipeInstruction:
    """Something that an engine does in a step; keywords become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Step the optimizer, and clear gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the data-parallel ranks of a stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce the gradients of tied modules over the stages that have them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction that works on one of the stage's buffers."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load a micro-batch into a buffer."""


class ForwardPass(BufferOpInstruction):
    """Compute the forward of what is in a buffer."""


class BackwardPass(BufferOpInstruction):
    """Compute the backward of what is in a buffer, and add gradients up."""


class SendActivation(BufferOpInstruction):
    """Send the output in a buffer to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive an input from the stage before into a buffer."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the input in a buffer to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the output in a buffer from the next stage."""


class PipeSchedule(ABC):
    """What one stage does for a batch: `steps` yields a list of instructions for each step."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """How many buffers the stage has."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The number of this stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches a batch has."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether no stage is before this one."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether no stage is after this one."""
        return self.stage_id == self.stages - 1

    @classmethod
    def table(cls, micro_batches: int, stages: int) -> Schedule:
        """This schedule as a table of mizzen's, checked; its rows as texts are a value of `pipeline.schedule`."""
        rows = [_row(cls(micro_batches, stages, stage), stage) for stage in range(stages)]
        return Schedule.of(rows, name=cls.__name__)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> "PipeSchedule":
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)


def _row(schedule: PipeSchedule, stage: int) -> list[Instruction]:
    """What a stage computes: forwards are of one micro-batch after the other, a backward is of that in its buffer."""
    row, inside, count = [], {}, 0
    for step in schedule.steps():
        for one in step:
            if isinstance(one, ForwardPass):
                inside[one.buffer_id] = count
                row.append(Instruction(FORWARD, stage, count))
                count += 1
            elif isinstance(one, BackwardPass):
                if one.buffer_id not in inside:
                    name = type(schedule).__name__
                    raise PlanError(f"{name}, stage {stage}: {one!r} before a ForwardPass into that buffer")
                row.append(Instruction(BACKWARD, stage, inside.pop(one.buffer_id)))
    return row


class TrainSchedule(PipeSchedule):
    """One forward, one backward. A stage has its forwards in every other step, and its backwards in those between."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each of the 2 * (micro-batches + stages - 1) steps."""
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        before = -1
        for step in range(last + 1):
            micro, is_forward = self._step_to_micro_batch(step)
            commands = self._exchange(micro, before, is_forward)
            if self._valid_micro_batch(micro):
                buffer = self._buffer_idx(micro)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(buffer))
                commands.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == last:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            before = micro
            yield commands

    def num_pipe_buffers(self) -> int:
        """As many as micro-batches are between their forward and their backward at once, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The micro-batch of a step, and whether it is its forward; out of range where the stage has nothing to do."""
        since_first = step_id - self.stage_id
        if since_first % 2 == 0:
            return since_first // 2, True
        return (step_id - (2 * self.stages - 1 - self.stage_id)) // 2, False

    def _exchange(self, micro: int, before: int, is_forward: bool) -> list[PipeInstruction]:
        """What goes to and comes from the neighbour that this step and the one before have to do with."""
        commands: list[PipeInstruction] = []
        if is_forward and self._valid_stage(self.prev_stage):
            if self._valid_micro_batch(before):
                commands.append(SendGrad(self._buffer_idx(before)))
            if self._valid_micro_batch(micro):
                commands.append(RecvActivation(self._buffer_idx(micro)))
        if not is_forward and self._valid_stage(self.next_stage):
            if self._valid_micro_batch(micro):
                commands.append(RecvGrad(self._buffer_idx(micro)))
            if self._valid_micro_batch(before):
                commands.append(SendActivation(self._buffer_idx(before)))
        return commands


class InferenceSchedule(PipeSchedule):
    """Forwards alone, in two buffers: one is sent while the other is filled."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each of the micro-batches + stages - 1 steps."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            own, other = ((step + self.stage_id) % 2, (step + self.stage_id + 1) % 2)
            commands: list[PipeInstruction] = []
            is_here = self._valid_micro_batch(micro)
            if is_here and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(own))
            exchange: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1):
                exchange.append(SendActivation(other))
            if self._valid_stage(self.prev_stage) and is_here:
                exchange.append(RecvActivation(own))
            # Neighbours do it in opposite orders: one receives while the other sends.
            commands += exchange if self.stage_id % 2 == 0 else exchange[::-1]
            if is_here:
                commands.append(ForwardPass(own))
            yield commands

    def num_pipe_buffers(self) -> int:
        """Two."""
        return 2


class DataParallelSchedule(PipeSchedule):
    """No pipeline: forward and backward of each micro-batch, then the step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of each micro-batch."""
        for micro in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1
