"""Same seed, any plan: the loss of one process, in the class that the plan belongs to."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from breadth import FULL, chosen, every_pair, together
from parity.programs import Case, reference, train, train_at

STAGES, WORLDS, ACCUMULATIONS, CLIPS = (0, 1, 2, 3), (1, 2, 4), (1, 4), (0.0, 0.5)
VARIANTS = ("plain", "tied", "frozen", "unused", "groups", "lora", "recompute")
OPTIMIZERS = ("AdamW", "SGD", "Lamb", "Muon")
DTYPES = ("fp32", "bf16", "fp16", "autocast")
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3, "fp16": 1e-3, "autocast": 4e-3, "autocast16": 1e-3}
AXES = (STAGES, WORLDS, ACCUMULATIONS, CLIPS, VARIANTS, DTYPES, OPTIMIZERS)


CASES = [Case(*row, samples=16) for row in every_pair(AXES)]
SCALED = [
    # SGD without clipping: Adam and a clipped norm hide a factor that was forgotten.
    Case(stage, world, 2, 0.0, "tied", dtype, "SGD")
    for stage, world, dtype in product(STAGES, (1, 2), ("fp16", "autocast16"))
]


COPIES = [
    Case(3, 4, *row, samples=16, family="copies")
    for row in (
        (1, 0.0, "plain", "fp32", "AdamW"),
        (4, 0.5, "tied", "bf16", "AdamW"),
        (1, 0.5, "frozen", "fp16", "SGD"),
        (4, 0.0, "unused", "fp32", "Muon"),
        (1, 0.5, "groups", "autocast", "AdamW"),
        (1, 0.5, "lora", "bf16", "Lamb"),
        (1, 0.0, "plain", "fp32", "Lamb"),
        (4, 0.5, "recompute", "fp32", "AdamW"),
    )
]
QUANTIZED = [
    Case(3, world, *row, samples=16, family=family)
    for family, world, row in (
        ("qwz", 2, (1, 0.5, "unused", "fp32", "AdamW")),
        ("qwz", 2, (4, 0.5, "tied", "bf16", "AdamW")),
        ("qgz", 2, (1, 0.5, "plain", "fp32", "AdamW")),
        ("qgz", 2, (4, 0.5, "tied", "bf16", "AdamW")),
        ("zeropp", 4, (1, 0.5, "plain", "fp32", "AdamW")),
        ("zeropp", 4, (4, 0.5, "tied", "bf16", "AdamW")),
        ("zeropp", 4, (1, 0.5, "lora", "fp32", "AdamW")),
        ("zeropp", 4, (1, 0.5, "recompute", "bf16", "AdamW")),
    )
]
RESTING = [
    Case(3, world, *row, samples=16, family=family)
    for family, world, row in (
        ("params", 1, (4, 0.5, "tied", "bf16", "AdamW")),
        ("params", 1, (1, 0.0, "unused", "fp32", "Muon")),
        ("params", 2, (1, 0.5, "lora", "fp32", "AdamW")),
        ("params", 2, (4, 0.0, "recompute", "fp16", "SGD")),
        ("params", 4, (1, 0.5, "groups", "autocast", "AdamW")),
        ("params alone", 1, (1, 0.5, "frozen", "fp32", "AdamW")),
        ("params alone", 2, (4, 0.5, "tied", "fp32", "Lamb")),
        ("params copies", 4, (4, 0.5, "tied", "bf16", "AdamW")),
    )
]
"""Parameters that rest outside the device."""
BAND = 1e-2
"""Of a loss: how far it may be, in the first steps, from that of one process, where messages are quantized."""


SHORT = [*CASES[::2], *(SCALED[number] for number in (2, 6, 11, 15)), COPIES[2], RESTING[0], RESTING[3]]
"""Half of the pairs; a factor that was forgotten, at each stage on two ranks; copies; what rests."""


def place(case: Case) -> str:
    """What cases on the same ranks share: their number, and the device."""
    return f"{case.world}{' behind' if case in RESTING else ''}"


@pytest.mark.parametrize("cases", together([*CASES, *SCALED, *COPIES, *RESTING], place, SHORT))
def test_loss_does_not_depend_on_the_plan(world, cases):
    runs = world(cases[0].world).each(train, [(case,) for case in cases])
    for case, found in zip(cases, runs, strict=True):
        expected, masters = reference(case)
        tolerance = TOLERANCE[case.dtype]
        for losses, values, _ in found:
            assert losses == pytest.approx(expected, rel=tolerance), str(case)
            for name, value in values.items():
                # In the mean: where a gradient is next to nothing, Adam turns its last bit into a whole step.
                assert (value - masters[name]).abs().mean() < tolerance / 4, (str(case), name)


@pytest.mark.parametrize("cases", together(QUANTIZED, place, QUANTIZED[2:3]))
def test_quantized_messages_keep_the_loss_in_a_band(world, cases):
    runs = world(cases[0].world).each(train, [(case,) for case in cases])
    for case, found in zip(cases, runs, strict=True):
        expected, _ = reference(case)
        for losses, values, _ in found:
            assert losses == pytest.approx(expected, rel=BAND), str(case)
            assert losses != pytest.approx(expected, rel=1e-6), str(case)
            assert all(value.isfinite().all() for value in values.values()), str(case)


@pytest.mark.wide  # test_family.py has small ones
@pytest.mark.parametrize(("accumulation", "variant"), [(4, "unused")])
def test_a_second_copy_for_backward_changes_no_bit(world, accumulation, variant):
    case = Case(3, 4, accumulation, 0.5, variant, samples=16)
    runs = world(4).each(train, [(replace(case, family=family),) for family in ("alone", "hpz")])
    for (losses, values, norms), (other_losses, others, other_norms) in zip(*runs, strict=True):
        assert (losses, norms) == (other_losses, other_norms)
        assert all(torch.equal(values[name], others[name]) for name in others)


RULES = [(variant, "AdamW") for variant in VARIANTS] + [("plain", "Lion"), ("tied", "Muon")]
AT_FOUR = RULES if FULL else [("plain", "AdamW"), ("unused", "AdamW"), ("tied", "Muon")]
EXACT = [
    Case(0, world, 1, 0.5, variant, optimizer=rule, deterministic=ordered, samples=16)
    for world, ordered, rules in ((2, False, RULES), (4, True, AT_FOUR))
    for variant, rule in rules
]
EXACT_SHORT = [case for case in EXACT if (case.world, case.variant) == (2, "unused")]
"""Four ranks in order are in tests/ranks/parallel/zero/test_gradients.py, too."""


@pytest.mark.parametrize("cases", together(EXACT, lambda case: case.world, EXACT_SHORT))
def test_stages_agree_to_the_bit(world, cases):
    """At accumulation 1: at world 2, and at any world when sums are taken in the order of the ranks."""
    runs = world(cases[0].world).each(train_at, [(case, STAGES) for case in cases])
    for case, ranks in zip(cases, runs, strict=True):
        first_losses, first_values, first_norms = ranks[0][0]
        for losses, values, norms in (stage for stages in ranks for stage in stages):
            assert losses == first_losses, str(case)
            assert norms == first_norms, str(case)
            assert all(torch.equal(values[name], first_values[name]) for name in first_values), str(case)


def test_stages_0_and_1_agree_to_the_bit_when_accumulating(world):
    runs = world(2).run(train_at, Case(0, 2, 4, 0.5, samples=16), (0, 1))[0]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@pytest.mark.in_parts
def test_train_batch_is_the_open_loop(world):
    stages = chosen(STAGES, (3,))
    cases = [(Case(stage, 2, 4, 0.5, samples=16), is_whole) for stage in stages for is_whole in (True, False)]
    losses = [ranks[0][0] for ranks in world(2).each(train, cases)]
    for at, stage in enumerate(stages):
        assert losses[2 * at] == pytest.approx(losses[2 * at + 1], rel=1e-6), stage


def train_with_tokens_as_data(case: Case) -> list[float]:
    return train(case, True)[0]


def test_a_resumed_seed_gives_the_same_run(world):
    """Twice the same, bit by bit."""
    case = Case(2, 2, 2, 0.5, samples=16)
    first, second = world(2).each(train_with_tokens_as_data, [(case,), (case,)])
    assert first == second
