"""Which kinds of training go together, as data: axes, their options, and the few combinations that are refused.

A combination takes one option of every axis. It is a yes, which a parity test has to prove (the house tests
look), unless it has all options of a `RefusedCombination`, whose sentence is the plan's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from types import MappingProxyType
from typing import Any, Final

Combination = tuple[str, ...]
"""One option of every axis, by its name, in the order of `AXES_OF_MATRIX`."""


@dataclass(frozen=True, slots=True)
class MatrixOption:
    """One way to train along an axis, and the keys that ask for it."""

    name: str
    keys: Mapping[str, Any]
    data_ranks: int = 1
    """A multiple of this many data ranks is needed for it to be what it is called."""


@dataclass(frozen=True, slots=True)
class MatrixAxis:
    """What can be chosen by itself."""

    name: str
    options: tuple[MatrixOption, ...]


@dataclass(frozen=True, slots=True)
class RefusedCombination:
    """Options that do not go together, and what the plan says of them."""

    options: tuple[str, ...]
    sentence: str


def _axis(name: str, **options: Mapping[str, Any]) -> MatrixAxis:
    """An axis by its options' keys; underscores of names are blanks."""
    found = (MatrixOption(title.replace("_", " "), MappingProxyType({**keys})) for title, keys in options.items())
    return MatrixAxis(name, tuple(found))


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


COPIES: Final = 2
"""Copies of the sharded state in HSDP and MiCS, of two data ranks each."""
AXES_OF_MATRIX: Final = (
    MatrixAxis(
        "ZeRO",
        (
            *(MatrixOption(f"stage {stage}", _zero(stage), 2) for stage in range(4)),
            MatrixOption("HSDP", _zero(3) | {"data_parallel_replicate_size": COPIES}, 4),
            MatrixOption("MiCS", _zero(3, mics_shard_size=2), 4),
            *(
                MatrixOption(f"stage {stage} in copies", _zero(stage) | {"data_parallel_replicate_size": COPIES}, 4)
                for stage in (1, 2)
            ),
        ),
    ),
    _axis("pipeline", pp_1={}, pp_2={"pipeline_parallel_size": 2}),
    _axis(
        "tensor",
        tp_1={},
        tp_2={"tensor_parallel": {"autotp_size": 2}},
        tp_2_with_cut_sequences={"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}},
    ),
    _axis("accumulation", one_micro_batch={}, accumulated={"gradient_accumulation_steps": 2}),
    _axis(
        "recompute",
        kept={},
        recomputed={"activation_checkpointing": {"mode": "full"}},
        recomputed_from_the_host={"activation_checkpointing": {"mode": "full", "cpu_checkpointing": True}},
        recomputed_from_parts={"activation_checkpointing": {"mode": "full", "partition_activations": True}},
    ),
    _axis("compile", eager={}, compiled={"compile": {"enabled": True}}),
    _axis("fused", plain={}, fused={"fused": {"head_loss": True, "rms_norm": True, "swiglu": True}}),
)
REFUSED: Final = (
    *(
        RefusedCombination(
            (f"stage {stage} in copies",),
            f"zero_optimization.stage {stage} in {COPIES} copies: sharding inside copies (mics_shard_size, "
            "data_parallel_replicate_size) needs stage 3",
        )
        for stage in (1, 2)
    ),
    *(
        RefusedCombination(
            (cut, "recomputed from parts"),
            "activation_checkpointing.partition_activations over tp=2: splitting inputs over tensor-parallel ranks is "
            "not built yet; leave the key out",
        )
        for cut in ("tp 2", "tp 2 with cut sequences")
    ),
    RefusedCombination(
        ("compiled", "recomputed from the host"),
        "compile.enabled with activation_checkpointing.mode full: the compiler decides itself what it keeps, so inputs "
        "cannot rest in host memory: leave activation_checkpointing.cpu_checkpointing out, or do not compile",
    ),
)


def combinations_of_matrix() -> Iterator[Combination]:
    """All of them, accepted or not."""
    return product(*(tuple(option.name for option in axis.options) for axis in AXES_OF_MATRIX))


def refusals_of(combination: Combination) -> tuple[str, ...]:
    """What the plan says of a combination; nothing where it is a yes."""
    return tuple(each.sentence for each in REFUSED if {*each.options} <= {*combination})


def keys_of(combination: Combination) -> dict[str, Any]:
    """The keys of a configuration that ask for a combination."""
    return {key: value for option in _options(combination) for key, value in option.keys.items()}


def ranks_of(combination: Combination) -> int:
    """The fewest ranks on which a combination is what it is called."""
    keys = keys_of(combination)
    cut = keys.get("pipeline_parallel_size", 1) * keys.get("tensor_parallel", {}).get("autotp_size", 1)
    return int(cut * max(option.data_ranks for option in _options(combination)))


def _options(combination: Combination) -> Iterator[MatrixOption]:
    for axis, name in zip(AXES_OF_MATRIX, combination, strict=True):
        yield next(option for option in axis.options if option.name == name)


def render_matrix() -> str:
    """The matrix as text: the options with their keys, every two of them, and the sentences of what is refused."""
    names = [option.name for axis in AXES_OF_MATRIX for option in axis.options]
    numbers = {name: number for number, name in enumerate(names, 1)}
    width = max(map(len, names))
    lines = ["option, and the keys that ask for it"]
    for axis in AXES_OF_MATRIX:
        lines.append(f"{axis.name}:")
        lines += [f"  {numbers[each.name]:2} {each.name:{width}}  {_words(each.keys)}" for each in axis.options]
    lines += ["", "every two together: yes, or the letter of a refusal", ""]
    sentences = dict.fromkeys(each.sentence for each in REFUSED)
    letters = {sentence: chr(ord("a") + at) for at, sentence in enumerate(sentences)}
    lines.append(" " * (width + 4) + " ".join(f"{numbers[name]:3}" for name in names))
    for name in names:
        cells = (_cell(name, other, letters) for other in names)
        lines.append(f"{numbers[name]:3} {name:{width}} {' '.join(f'{cell:>3}' for cell in cells)}".rstrip())
    lines += ["", *(f"{letter}. {sentence}" for sentence, letter in letters.items())]
    count = sum(not refusals_of(each) for each in combinations_of_matrix())
    total = sum(1 for _ in combinations_of_matrix())
    lines += ["", f"{count} of {total} combinations are a yes"]
    return "\n".join(lines)


def _cell(name: str, other: str, letters: Mapping[str, str]) -> str:
    axes = [{option.name for option in axis.options} for axis in AXES_OF_MATRIX]
    if name != other and any({name, other} <= axis for axis in axes):
        return "-"
    found = [letters[each.sentence] for each in REFUSED if {*each.options} <= {name, other}]
    return found[0] if found else "yes"


def accepted_pairs(among: Iterator[Combination] | None = None) -> set[tuple[str, str]]:
    """Every two options that some combination has which is a yes; among these, or among all."""
    found = combinations_of_matrix() if among is None else among
    return {pair for each in found if not refusals_of(each) for pair in combinations(each, 2)}


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}: {value}" for path, value in _flat(keys)) or "nothing"


def _flat(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in keys.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)
