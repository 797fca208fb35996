"""A profile as a picture: each module is as wide as its share of the operations, and stands on what it is part of."""

from collections.abc import Iterator
from html import escape
from typing import Final

from mizzen.profiler.tree import Branch
from mizzen.profiler.words import number_to_string, params_to_string

WIDTH, ROW, TOP, MARGIN = 960, 30, 46, 12
LETTER: Final = 6.6
"""The width of a letter, on average."""
COLORS: Final = ("#dbe4f0", "#8fb8de", "#f2c879", "#a7d3a6", "#e3a6a1", "#c3b1e1", "#9fd3cf", "#d9c6a5")


def picture(tree: Branch, *, depth: int = -1) -> str:
    """An SVG of the operations of forward and backward, down to a depth."""
    branches = [branch for branch in tree.walk() if depth == -1 or branch.depth <= depth]
    kinds = list(dict.fromkeys(branch.kind for branch in branches))
    colors = {kind: COLORS[number % len(COLORS)] for number, kind in enumerate(kinds)}
    rows = 1 + max(branch.depth for branch in branches if _all(branch))
    height = TOP + rows * ROW + MARGIN
    title = (
        f"{tree.kind}: {number_to_string(_all(tree)).strip()} operations in a step, forward and backward; "
        f"{params_to_string(tree.parameters)} parameters"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="26" font-size="15" fill="#1c2733">{escape(title)}</text>',
        *_boxes(tree, tree, float(MARGIN), depth, colors),
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _boxes(branch: Branch, whole: Branch, left: float, depth: int, colors: dict[str, str]) -> Iterator[str]:
    share = _all(branch) / (_all(whole) or 1)
    width = share * (WIDTH - 2 * MARGIN)
    if not width:
        return
    top = TOP + branch.depth * ROW
    name = f"{branch.name}: {branch.kind}" if branch.depth else branch.kind
    yield (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{colors[branch.kind]}" '
        f'stroke="#ffffff"><title>{escape(branch.path or branch.kind)}: {share:.2%}</title></rect>'
    )
    room = int((width - 8) / LETTER)
    if room >= 4:
        words = (f"{name}, {share:.1%}", name, branch.name)
        shown = next((text for text in words if text and len(text) <= room), f"{name[: room - 1]}…")
        yield f'<text x="{left + 5:.1f}" y="{top + 19}" fill="#1c2733">{escape(shown)}</text>'
    if branch.depth == depth:
        return
    for inner in branch.inside:
        yield from _boxes(inner, whole, left, depth, colors)
        left += _all(inner) / (_all(whole) or 1) * (WIDTH - 2 * MARGIN)


def _all(branch: Branch) -> int:
    return branch.forward + branch.backward
