"""The text of a profile: a summary, the heaviest modules of each depth, and the model with the numbers of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mizzen.profiler.tree import BACKWARD, Branch
from mizzen.profiler.words import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

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
