"""A profile for people: numbers with their units, a page of text, and a picture.

The text is a summary, the heaviest modules of each depth, and the model with the numbers of each. In the picture each
module is as wide as its share of the operations, and stands on what it is part of.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from mizzen.profiler.tree import BACKWARD, Branch

TITLE: Final = "mizzen Flops Profiler"
WIDTH: Final = 80
NOTES: Final = (
    "Operations are those of matrix products, convolutions and attention on this rank,",
    "two for each multiply-add (MAC). Parameters are whole ones. Times are of the",
    "counted step, which counting makes slower and in which compiled blocks run",
    "uncompiled: compare them with each other.",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a profile is of, where an engine knows more than the model."""

    step: int = 1
    world: int = 1
    data_parallel: int = 1
    model_parallel: int = 1
    micro_batch: int | None = None
    recompute_factor: float = 0.0
    """The share of forward that backward computes again, where no backward was seen."""
    forward_seconds: float | None = None
    """By the device's clock; absent takes that of the model's own forward."""
    backward_seconds: float = 0.0
    step_seconds: float = 0.0
    """The optimizer's part."""
    samples: int = 0
    """Of all ranks."""


def backward_of(tree: Branch, setting: Setting) -> tuple[float, bool]:
    """Operations of backward, and whether they were counted: where none was seen, what a backward usually has."""
    if tree.backward:
        return tree.backward, True
    return (BACKWARD + setting.recompute_factor) * tree.forward, False


def summary(tree: Branch, setting: Setting) -> list[str]:
    """Names and values, in two columns."""
    backward, is_counted = backward_of(tree, setting)
    forward_seconds = tree.seconds if setting.forward_seconds is None else setting.forward_seconds
    seconds = forward_seconds + setting.backward_seconds + setting.step_seconds
    total = tree.forward + backward
    how = "" if is_counted else f" (not seen: {BACKWARD} x fwd + {setting.recompute_factor:g} x fwd)"
    rows: list[tuple[str, str | int | None]] = [
        ("world size", setting.world),
        ("data parallel size", setting.data_parallel),
        ("model parallel size", setting.model_parallel),
        ("batch size per GPU", setting.micro_batch),
        ("params of model", params_to_string(tree.parameters)),
        ("fwd MACs per GPU", macs_to_string(tree.macs)),
        ("fwd flops per GPU", number_to_string(tree.forward).strip()),
        (f"bwd flops per GPU{how}", number_to_string(backward).strip()),
        ("recomputed in bwd, of fwd", f"{_share(tree.recomputed, tree.forward)}"),
        ("fwd latency", duration_to_string(forward_seconds)),
        ("fwd FLOPS per GPU", _rate(tree.forward, forward_seconds)),
        ("bwd latency", _duration(setting.backward_seconds)),
        ("bwd FLOPS per GPU", _rate(backward, setting.backward_seconds)),
        (
            "fwd+bwd FLOPS per GPU",
            _rate(total, setting.backward_seconds and forward_seconds + setting.backward_seconds),
        ),
        ("step latency", _duration(setting.step_seconds)),
        ("iter latency", _duration(setting.step_seconds and seconds)),
        ("FLOPS per GPU", _rate(total, setting.step_seconds and seconds)),
        ("samples/second", f"{setting.samples / seconds:.2f}" if setting.samples and setting.step_seconds else None),
    ]
    return [f"{name + ':':<60}{value}" for name, value in rows if value is not None]


def aggregated(tree: Branch, depth: int = -1, top: int = 1) -> list[str]:
    """For each depth, the kinds of modules that have most parameters, operations and time."""
    branches = list(tree.walk())
    deepest = max(branch.depth for branch in branches)
    wanted = range(deepest + 1) if depth == -1 else [min(depth, deepest)]
    measures: Sequence[tuple[str, Callable[[Branch], float], Callable[[float], str]]] = (
        ("params", lambda branch: branch.parameters, params_to_string),
        ("MACs", lambda branch: branch.macs, macs_to_string),
        ("fwd latency", lambda branch: branch.seconds, duration_to_string),
    )
    lines = [f"Top {top} kinds of modules in params, MACs or fwd latency at each depth:"]
    for level in wanted:
        lines.append(f"depth {level}:")
        for title, measure, in_words in measures:
            sums: dict[str, float] = {}
            for branch in branches:
                if branch.depth == level:
                    sums[branch.kind] = sums.get(branch.kind, 0) + measure(branch)
            best = sorted(sums.items(), key=lambda item: -item[1])[:top]
            lines.append(f"    {title:<12}- {{{', '.join(f'{kind!r}: {in_words(value)!r}' for kind, value in best)}}}")
    return lines


def detailed(tree: Branch, depth: int = -1) -> list[str]:
    """The model as torch prints it, with the numbers of each module down to a depth."""
    return list(_lines(tree, tree, depth))


def _lines(branch: Branch, whole: Branch, depth: int) -> Iterator[str]:
    indent = "  " * branch.depth
    name = f"({branch.name}): " if branch.depth else ""
    numbers = [
        f"{params_to_string(branch.parameters)} = {_share(branch.parameters, whole.parameters)} Params",
        f"{macs_to_string(branch.macs)} = {_share(branch.macs, whole.macs)} MACs",
        f"{duration_to_string(branch.seconds)} = {_share(branch.seconds, whole.seconds)} latency",
        flops_to_string(branch.forward / branch.seconds if branch.seconds else 0.0),
    ]
    if whole.backward:
        numbers.append(f"bwd {number_to_string(branch.backward).strip()} = {_share(branch.backward, whole.backward)}")
    text = f"{indent}{name}{branch.kind}({', '.join(numbers)}{f', {branch.label}' if branch.label else ''}"
    if not branch.inside or branch.depth == depth:
        yield f"{text})"
        return
    yield text
    for inner in branch.inside:
        yield from _lines(inner, whole, depth)
    yield f"{indent})"


def page(
    tree: Branch, setting: Setting, *, module_depth: int = -1, top_modules: int = 1, detailed_too: bool = True
) -> str:
    """All of it."""
    parts = [
        f"{f' {TITLE} ':-^{WIDTH}}",
        f"Profile Summary at step {setting.step}:",
        *NOTES,
        "",
        *summary(tree, setting),
        "",
        f"{' Aggregated Profile per GPU ':-^{WIDTH}}",
        *aggregated(tree, module_depth, top_modules),
    ]
    if detailed_too:
        parts += ["", f"{' Detailed Profile per GPU ':-^{WIDTH}}", *detailed(tree, module_depth)]
    return "\n".join([*parts, "-" * WIDTH, ""])


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0%"


def _rate(operations: float, seconds: float) -> str | None:
    return flops_to_string(operations / seconds) if seconds else None


def _duration(seconds: float) -> str | None:
    return duration_to_string(seconds) if seconds else None


PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
PRECISION: Final = 2


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 G`: scaled by its size, or to the prefix that is given."""
    for factor, prefix in PREFIXES:
        if prefix == units if units is not None else abs(num) >= factor:
            return f"{round(num / factor, precision):g} {prefix}"
    return f"{round(num, precision):g} {units or ''}"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GMACs`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GFLOPS`; with a unit such as `GFLOPS`, in that."""
    units = units.replace("FLOPS", "") if units is not None else None
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 GB`."""
    units = units.replace("B", "") if units is not None else None
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 G`, or `B` for what is counted in billions when that is asked for."""
    if units == "B":
        return number_to_string(params_num, "G", precision).replace("G", "B")
    return number_to_string(params_num, units, precision).strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`1.5 ms`."""
    units = units.removesuffix("s") if units is not None else None
    return f"{number_to_string(duration, units, precision)}s"


SVG_WIDTH, ROW, TOP, MARGIN = 960, 30, 46, 12
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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {height}" width="{SVG_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{SVG_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="26" font-size="15" fill="#1c2733">{escape(title)}</text>',
        *_boxes(tree, tree, float(MARGIN), depth, colors),
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _boxes(branch: Branch, whole: Branch, left: float, depth: int, colors: dict[str, str]) -> Iterator[str]:
    share = _all(branch) / (_all(whole) or 1)
    width = share * (SVG_WIDTH - 2 * MARGIN)
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
        left += _all(inner) / (_all(whole) or 1) * (SVG_WIDTH - 2 * MARGIN)


def _all(branch: Branch) -> int:
    return branch.forward + branch.backward
