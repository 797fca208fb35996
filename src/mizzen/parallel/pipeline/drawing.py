"""A timeline as a picture: one row for each stage, one bar for each instruction, the bubble in percent. Plain SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from types import MappingProxyType
from typing import Final

from mizzen.parallel.pipeline.schedule import InstructionKind, peak_activations
from mizzen.parallel.pipeline.timeline import TimedInstruction, Timeline

LEFT, RIGHT, TOP, ROW, GAP = 84, 176, 96, 30, 8
"""Pixels beside and above the rows, the height of a row, and what is between two."""
WIDTH: Final = 1240
COLORS: Final = MappingProxyType(
    {
        InstructionKind.FORWARD: ("#9ec5f4", "#4f86c6", "#2d5f9a", "#173f6d"),
        InstructionKind.BACKWARD: ("#a8dcb5", "#4fa56a", "#2f7d49", "#175a30"),
        InstructionKind.BACKWARD_INPUT: ("#b6e3d8", "#3fa793", "#217a69", "#0e5548"),
        InstructionKind.BACKWARD_WEIGHT: ("#f6d29b", "#d99a3d", "#ad711b", "#7d4d08"),
    }
)
"""The colors of the first, second, third and any further chunk of a stage."""
WORDS: Final = MappingProxyType(
    {
        InstructionKind.FORWARD: "forward",
        InstructionKind.BACKWARD: "backward",
        InstructionKind.BACKWARD_INPUT: "gradient of the input",
        InstructionKind.BACKWARD_WEIGHT: "gradients of weights",
    }
)


def draw(line: Timeline, *, unit: str = "", assumed: bool = False) -> str:
    """The picture of a timeline, as the text of an SVG file.

    `unit` is that of the times, such as `ms`. `assumed` says under the title that they were not measured.
    """
    scale = _Scale(line.length or 1.0, WIDTH - LEFT - RIGHT)
    height = TOP + len(line.rows) * (ROW + GAP) + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *_heading(line, unit, assumed),
        *_legend(line),
        *_axis(scale, unit, height - 44),
        _text(LEFT + scale.width + 12, 81, "waits, activations kept", color="#555555"),
    ]
    kept = peak_activations(line.schedule)
    for stage, row in enumerate(line.rows):
        top = TOP + stage * (ROW + GAP)
        busy = sum(each.end - each.start for each in row)
        idle = 100 * (1 - busy / line.length) if line.length else 0.0
        parts += [
            _text(LEFT - 12, top + 20, f"stage {stage}", anchor="end"),
            f'<rect x="{LEFT}" y="{top}" width="{scale.width}" height="{ROW}" fill="#f1f2f4"/>',
            *_bars(line, row, line.schedule.chunks_of(stage), scale, top),
            _text(LEFT + scale.width + 12, top + 20, f"{idle:.1f} %, {kept[stage]}", color="#555555"),
        ]
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """Pixels by time."""

    length: float
    width: int

    def at(self, moment: float) -> float:
        return LEFT + self.width * moment / self.length

    def ticks(self) -> Iterator[float]:
        """Round moments, about ten of them."""
        rough = self.length / 10
        power = 10.0 ** floor(log10(rough))
        step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
        number = 0
        while number * step <= self.length * (1 + 1e-9):
            yield number * step
            number += 1


def _heading(line: Timeline, unit: str, assumed: bool) -> Iterator[str]:
    made = line.schedule
    chunks = "" if made.chunks_per_stage == 1 else f", {made.chunks_per_stage} chunks each"
    yield (
        f'<text x="{LEFT}" y="34" font-size="19" font-weight="600" fill="#1b1f24">{escape(made.name)}: bubble '
        f"{100 * line.bubble:.1f} %</text>"
    )
    size = f"{made.stages} stages{chunks}, {made.micro_batches} micro-batches, {line.length:.4g}{unit and ' '}{unit}"
    yield _text(LEFT, 56, f"{size} long{', with assumed times' if assumed else ''}", color="#555555")


def _legend(line: Timeline) -> Iterator[str]:
    x = float(LEFT)
    used = {each.instruction.kind for row in line.rows for each in row}
    for kind in (kind for kind in InstructionKind if kind in used):
        for number in range(min(line.schedule.chunks_per_stage, len(COLORS[kind]))):
            yield f'<rect x="{x:.0f}" y="70" width="12" height="12" fill="{COLORS[kind][number]}"/>'
            x += 14
        yield _text(x + 4, 81, WORDS[kind], color="#555555")
        x += 24 + 7.2 * len(WORDS[kind])


def _axis(scale: _Scale, unit: str, y: float) -> Iterator[str]:
    for moment in scale.ticks():
        x = scale.at(moment)
        yield f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{y:.1f}" stroke="#d9dce1"/>'
        yield _text(x, y + 18, f"{moment:.4g}", anchor="middle", color="#555555")
    yield _text(LEFT + scale.width + 12, y + 18, f"time{unit and f' ({unit})'}", color="#555555")


def _bars(
    line: Timeline, row: Sequence[TimedInstruction], chunks: Sequence[int], scale: _Scale, top: float
) -> Iterator[str]:
    for each in row:
        one = each.instruction
        number = min(chunks.index(one.chunk), 3)
        x, width = scale.at(each.start), scale.at(each.end) - scale.at(each.start)
        when = f"{each.start:.4g} to {each.end:.4g}"
        told = f"{one}: chunk {one.chunk}, {WORDS[one.kind]} of micro-batch {one.micro}, {when}"
        color = COLORS[one.kind][number]
        yield (
            f'<rect x="{x:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{ROW}" fill="{color}" '
            f'stroke="#ffffff" stroke-width="{1 if width > 6 else 0.2}"><title>{escape(told)}</title></rect>'
        )
        if width >= 8 * len(str(one.micro)) + 2:
            ink = "#ffffff" if number else "#1b1f24"
            yield _text(x + width / 2, top + 20, str(one.micro), anchor="middle", color=ink)


def _text(x: float, y: float, words: str, *, anchor: str = "start", color: str = "#1b1f24") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
