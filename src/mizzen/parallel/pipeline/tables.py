"""Schedules by name, as tables: who computes what in which order, for any number of stages and micro-batches.

[Note: too few micro-batches]
Some schedules are drawn for a least number of micro-batches. With fewer, the table of that number is drawn and those
that are not there are left out: what is left waits for nothing new, so it still runs.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Final, TypeAlias

from mizzen.errors import PlanError
from mizzen.parallel.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Instruction,
    InstructionKind,
    Schedule,
    loop_placement,
    output_of,
    v_placement,
)

Row: TypeAlias = list[Instruction]


@dataclass(frozen=True, slots=True)
class Table:
    """How a schedule of one name is drawn."""

    draw: Callable[[int, int, int, int], Row]
    """The row of a stage, from its number, the stages, the chunks of each and the micro-batches."""
    usual_chunks: int
    """Chunks of a stage where nobody says how many."""
    most_chunks: int | None
    """Chunks of a stage at most; None where any number is right."""
    placement: Callable[[int, int], tuple[int, ...]] = loop_placement
    least_micro_batches: Callable[[int], int] = lambda stages: 1
    """With fewer, see [Note: too few micro-batches]."""


def make_schedule(
    name: str, stages: int, micro_batches: int, virtual_stages: int | None = None, *, forward_only: bool = False
) -> Schedule:
    """The table of a schedule; `virtual_stages` are the chunks of each stage, None as many as the schedule is for."""
    table = TABLES.get(name)
    if table is None:
        raise PlanError(f"pipeline.schedule: {name!r} is unknown; there are {', '.join(TABLES)}")
    for what, count in (("stages", stages), ("micro-batches", micro_batches)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PlanError(f"schedule '{name}': {count!r} {what} are not possible; it takes at least 1")
    chunks = table.usual_chunks if virtual_stages is None else virtual_stages
    _check_chunks(name, table, chunks)
    placement = table.placement(stages, chunks)
    if forward_only and table.placement is v_placement:
        rows = _forwards_in_a_v(placement, stages, micro_batches)
    elif forward_only:
        rounds = _rounds(stages, micro_batches)
        rows = [_in_rounds(FORWARD, range(stage, stages * chunks, stages), rounds) for stage in range(stages)]
    else:
        drawn = max(micro_batches, table.least_micro_batches(stages))
        drawn_rows = [table.draw(stage, stages, chunks, drawn) for stage in range(stages)]
        rows = [[one for one in row if one.micro < micro_batches] for row in drawn_rows]
    return Schedule(name, stages, chunks, micro_batches, placement, tuple(map(tuple, rows)))


def split_last(made: Schedule) -> Schedule:
    """The table with the last backward of each stage in two halves, where another stage waits for the first.

    That stage has it sooner by the second half. No more activations are kept: those of this micro-batch are the last.
    """
    return replace(made, rows=tuple(_with_last_split(row, made.placement) for row in made.rows))


def _with_last_split(row: tuple[Instruction, ...], placement: Sequence[int]) -> tuple[Instruction, ...]:
    last = row[-1]
    if last.kind is not BACKWARD or output_of(last, placement) is None:
        return row
    return *row[:-1], *(Instruction(kind, last.chunk, last.micro) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT))


def _check_chunks(name: str, table: Table, chunks: int) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise PlanError(f"pipeline.virtual_stages: {chunks!r} is not a number of chunks; it takes at least 1")
    if table.placement is v_placement and chunks != 2:
        raise PlanError(
            f"pipeline.virtual_stages is {chunks}, but schedule '{name}' gives every stage 2 chunks, the model going "
            "forth and back over the stages: set it to 2, or leave it out"
        )
    if table.most_chunks is not None and chunks > table.most_chunks:
        wider = ", ".join(other for other, each in TABLES.items() if each.most_chunks is None)
        raise PlanError(
            f"pipeline.virtual_stages is {chunks}, but schedule '{name}' gives every stage 1 chunk: set it to 1, or "
            f"use one of {wider}"
        )


def _gpipe(stage: int, stages: int, chunks: int, micros: int) -> Row:
    """All forwards, chunk after chunk, then all backwards; keeps the activations of every micro-batch.

    Backwards begin with the first micro-batch, as in all tables: gradients are then added up in the order of the data.
    """
    own = range(stage, stages * chunks, stages)
    forwards = [Instruction(FORWARD, chunk, micro) for chunk in own for micro in range(micros)]
    return forwards + [Instruction(BACKWARD, chunk, micro) for chunk in reversed(own) for micro in range(micros)]


def _one_forward_one_backward(stage: int, stages: int, chunks: int, micros: int) -> Row:
    """Fill the pipeline, alternate, drain it.

    With several chunks, micro-batches go through them in rounds of about as many as there are stages, so that the first
    of a round is through the last stage when the last of it is through the first: no stage waits.
    """
    rounds = _rounds(stages, micros)
    ahead = stages - 1 - stage if chunks == 1 else (chunks - 1) * len(rounds[0]) + 2 * (stages - 1 - stage)
    own = range(stage, stages * chunks, stages)
    return _alternate(_in_rounds(FORWARD, own, rounds), _in_rounds(BACKWARD, own[::-1], rounds), ahead)


def _zero_bubble(stage: int, stages: int, chunks: int, micros: int) -> Row:
    """One forward, one backward, the gradients of weights later: they fill the time in which the pipeline drains.

    A stage has as many of them in arrears as its number, since it holds that many activations fewer than the first one.
    """
    rounds = _rounds(stages, micros)
    ahead = (chunks - 1) * len(rounds[0]) + stages - 1 - stage
    own = range(stage, stages * chunks, stages)
    row, pending = [], deque[Instruction]()
    for one in _alternate(_in_rounds(FORWARD, own, rounds), _in_rounds(BACKWARD_INPUT, own[::-1], rounds), ahead):
        row.append(one)
        if one.kind is BACKWARD_INPUT:
            pending.append(Instruction(BACKWARD_WEIGHT, one.chunk, one.micro))
            if len(pending) > stage:
                row.append(pending.popleft())
    return row + list(pending)


def _rounds(stages: int, micros: int) -> list[range]:
    """Micro-batches in rounds of at least as many as there are stages, all nearly as long; one round if too few."""
    count = max(1, micros // stages)
    bounds = [-(-micros * number // count) for number in range(count + 1)]
    return [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]


def _in_rounds(kind: InstructionKind, chunks: Sequence[int], rounds: Sequence[range]) -> Row:
    return [Instruction(kind, chunk, micro) for micros in rounds for chunk in chunks for micro in micros]


def _alternate(forwards: Row, backwards: Row, ahead: int) -> Row:
    """So many forwards ahead, then a forward and a backward in turn, then the backwards that are left."""
    pairs = zip_longest(forwards[ahead:], backwards)
    return forwards[:ahead] + [one for pair in pairs for one in pair if one is not None]


@dataclass(slots=True)
class _VRow:
    """A row of a stage with two chunks, `first` on the way forth and `second` on the way back.

    Each call takes the next micro-batch of its chunk; weights are taken in the order of their inputs.
    """

    first: int
    second: int
    row: Row = field(default_factory=list)
    pending: deque[Instruction] = field(default_factory=deque)
    done: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, letters: str) -> None:
        """Add instructions, written as `F1 B2 I2 W`: the number is 1 for the first chunk, 2 for the second."""
        for text in letters.split():
            if text == "W":
                if self.pending:
                    self.row.append(self.pending.popleft())
                continue
            kind, chunk = InstructionKind(text[0]), self.first if text[1] == "1" else self.second
            way = "forward" if kind is FORWARD else "backward"
            micro = self.done.get((way, chunk), 0)
            self.done[way, chunk] = micro + 1
            self.row.append(Instruction(kind, chunk, micro))
            if kind is BACKWARD_INPUT:
                self.pending.append(Instruction(BACKWARD_WEIGHT, chunk, micro))

    def count(self, way: str, chunk: int) -> int:
        """How many micro-batches of a chunk have come this way."""
        return self.done.get((way, chunk), 0)


def _zbv(stage: int, stages: int, chunks: int, micros: int) -> Row:
    """Zero bubble in a V (Qi et al., 2024): no stage waits where forward and both gradients take the same time."""
    made = _VRow(stage, 2 * stages - 1 - stage)
    later = stages - stage
    for letters, times in (("F1", 2 * later - 1), ("F2 F1", stage), ("F2 I2 W", later)):
        for _ in range(times):
            made.add(letters)
    while made.count("forward", made.second) < micros:
        made.add("F1 I1 W F2 I2 W" if made.count("forward", made.first) < micros else "I1 W F2 I2 W")
    for _ in range(stage):
        made.add("I1 I2")
    # The inputs of the first chunk are what others wait for; its weights come between, those of the second at the end.
    second = deque(one for one in made.pending if one.chunk == made.second)
    first = deque(one for one in made.pending if one.chunk == made.first)
    for _ in range(later):
        made.pending.clear()
        made.add("I1")
        first.append(made.pending.pop())
        made.row.append(first.popleft())
    return made.row + list(second) + list(first)


def _dualpipev(stage: int, stages: int, chunks: int, micros: int) -> Row:
    """DualPipe in a V (DeepSeek, 2025): a forward of one chunk beside a backward of the other, all the way.

    The pairs may run at once where a runner can; in the table they follow each other.
    """
    made = _VRow(stage, 2 * stages - 1 - stage)
    later = stages - 1 - stage
    phases = (
        ("F1", 2 * later),
        ("F1 F2", stage + 1),
        ("I2 W F2", later),
        ("F1 B2 F2 B1", micros - 2 * stages + stage + 1),
        ("B2 F2 B1", later),
    )
    for letters, times in phases:
        for _ in range(times):
            made.add(letters)
    # While the pipeline drains, weights wait: the first half of the backwards is whole, the second half is split.
    backwards = [text for _ in range(stage + 1) for text in ("2", "1")]
    for number, chunk in enumerate(backwards):
        made.add(f"B{chunk}" if number <= stage else f"I{chunk}")
    for _ in range(later):
        made.add("W I1")
    while made.pending:
        made.add("W")
    return made.row


def _forwards_in_a_v(placement: Sequence[int], stages: int, micros: int) -> list[Row]:
    """An evaluation: at every moment each stage takes the micro-batch that is farthest on its way.

    As many micro-batches are on their way at once as there are chunks, so that none waits in a long queue.
    """
    rows: list[Row] = [[] for _ in range(stages)]
    chunk_of = dict.fromkeys(range(micros), 0)
    while chunk_of:
        on_the_way = list(chunk_of)[: len(placement)]
        free = set(range(stages))
        for micro in sorted(on_the_way, key=lambda each: (-chunk_of[each], each)):
            stage = placement[chunk_of[micro]]
            if stage in free:
                free.remove(stage)
                rows[stage].append(Instruction(FORWARD, chunk_of[micro], micro))
                chunk_of[micro] += 1
        chunk_of = {micro: chunk for micro, chunk in chunk_of.items() if chunk < len(placement)}
    return rows


TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        "1f1b": Table(_one_forward_one_backward, usual_chunks=1, most_chunks=1),
        "gpipe": Table(_gpipe, usual_chunks=1, most_chunks=1),
        "interleaved": Table(_one_forward_one_backward, usual_chunks=2, most_chunks=None),
        "looped_bfs": Table(_gpipe, usual_chunks=2, most_chunks=None),
        "zero_bubble": Table(_zero_bubble, usual_chunks=1, most_chunks=None),
        "zbv": Table(_zbv, 2, 2, v_placement, least_micro_batches=lambda stages: 2 * stages - 1),
        "dualpipev": Table(_dualpipev, 2, 2, v_placement, least_micro_batches=lambda stages: 2 * stages),
    }
)
"""Every schedule that `pipeline.schedule` may name."""
