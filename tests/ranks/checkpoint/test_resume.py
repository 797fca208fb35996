"""The same layout goes on bitwise, for every update rule and precision, with dropout, in the data where it was."""

import pytest

from ranks.checkpoint.programs import Case, changed, load_and_save, save_and_train

RULES = [
    (2, Case(stage=2, dropout=0.3)),
    (2, Case(stage=3, dropout=0.3)),
    (1, Case(dropout=0.3)),
    (2, Case(stage=1, dtype="bf16")),
    (2, Case(stage=3, dtype="bf16")),
    (2, Case(stage=2, dtype="fp16")),
    (2, Case(stage=2, optimizer="Lamb")),
    (2, Case(stage=3, optimizer="Lamb")),
    (2, Case(stage=2, optimizer="Muon")),
    (2, Case(stage=1, optimizer="Adafactor")),
    (2, Case(stage=1, optimizer="SGD")),
    (2, Case(stage=0, optimizer="Adagrad")),
    (2, Case(stage=3, frozen=True, tied=True)),
    (2, Case(stage=1, frozen=True, tied=True, scheduler=False)),
]


@pytest.mark.parametrize(("size", "case"), RULES, ids=str)
def test_the_same_layout_goes_on_bitwise(world, tmp_path, size, case):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    losses = world(size).run(save_and_train, case, one, more=3)
    assert world(size).run(load_and_save, case, one, other, more=3) == losses
    assert changed(one, other) == []


@pytest.mark.parametrize("rule", ["Lamb", "Muon", "Adafactor", "SGD"])
def test_states_of_every_rule_move_to_another_number_of_ranks(world, tmp_path, rule):
    one = str(tmp_path / "one")
    losses = world(3).run(save_and_train, Case(stage=2, optimizer=rule), one, more=1)
    for size, stage in ((1, 0), (2, 1)):
        other = str(tmp_path / f"{size}")
        after = world(size).run(load_and_save, Case(stage=stage, optimizer=rule), one, other, more=1)
        assert changed(one, other) == []
        assert after[0] == pytest.approx(losses[0], rel=1e-4)


def test_masters_keep_their_low_bits_between_precisions(world, tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    world(2).run(save_and_train, Case(stage=1, dtype="bf16"), one)
    world(1).run(load_and_save, Case(), one, other)
    assert changed(one, other) == []
