"""The same layout goes on bitwise, for every update rule and precision, with dropout, in the data where it was."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from breadth import choice, chosen
from mizzen.checkpoint.read import Reader
from mizzen.errors import CheckpointError
from ranks.checkpoint.programs import Case, build, changed, load_and_save, save_and_train, train

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


SHORT = [RULES[number] for number in (0, 2, 4, 5, 8, 9)]
"""Every stage but 0, every precision, and rules with states of every shape."""


@pytest.mark.in_parts
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_layout_goes_on_bitwise(world, tmp_path, size):
    cases = [case for ranks, case in chosen(RULES, SHORT) if ranks == size]
    saves = [(case, f"{tmp_path}/one{number}") for number, case in enumerate(cases)]
    loads = [(case, one, one.replace("one", "other")) for case, one in saves]
    losses = world(size).each(save_and_train, saves, more=3)
    after = world(size).each(load_and_save, loads, more=3)
    for (case, one, other), expected, found in zip(loads, losses, after, strict=True):
        assert found == expected, case
        assert changed(one, other) == [], case


@pytest.mark.wide  # AdamW's move in every test of layouts
def test_states_of_every_rule_move_to_another_number_of_ranks(world, tmp_path):
    rules = ("Lamb", "Muon", "Adafactor", "SGD")
    saves = [(Case(stage=2, optimizer=rule), str(tmp_path / rule)) for rule in rules]
    losses = world(3).each(save_and_train, saves, more=1)
    for size, stage in ((1, 0), (2, 1)):
        loads = [
            (Case(stage=stage, optimizer=rule), str(tmp_path / rule), f"{tmp_path}/{rule}{size}") for rule in rules
        ]
        after = world(size).each(load_and_save, loads, more=1)
        for (case, one, other), found, expected in zip(loads, after, losses, strict=True):
            assert changed(one, other) == [], case
            assert found[0] == pytest.approx(expected[0], rel=1e-4), case


def test_masters_keep_their_low_bits_between_precisions(world, tmp_path):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    world(2).run(save_and_train, Case(stage=1, dtype="bf16"), one)
    world(1).run(load_and_save, Case(), one, other)
    assert changed(one, other) == []


def low_bit(one, other, stage, resumed):
    """States in eight bits, which a small model does not have: they start at 4,096 elements."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes a minute
    torch.manual_seed(1 + resumed)
    model = nn.Sequential(nn.Linear(96, 192), nn.Linear(192, 96))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}},
        "seed": 1,
    }
    engine = mizzen.initialize(model=model, config=config)[0]

    def train(steps):
        for step in range(steps):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(2, 96)).square().mean())
            engine.step()

    if resumed:
        engine.load_checkpoint(one, tag="global_step3")
        engine.save_checkpoint(other)
    else:
        train(3)
        engine.save_checkpoint(one)
    kinds = {type(value).__name__ for state in engine.basic_optimizer.state.values() for value in state.values()}
    train(2)
    engine.save_checkpoint(other if resumed else one)
    return kinds


def test_states_in_few_bits(world, tmp_path):
    pytest.importorskip("torchao")
    folders = [(str(tmp_path / f"one{stage}"), str(tmp_path / f"other{stage}"), stage) for stage in (0, 1)]
    for resumed in (False, True):
        for ranks in world(2).each(low_bit, [(*each, resumed) for each in folders]):
            assert "OptimState8bit" in ranks[0]
    for one, other, _ in folders:
        assert_rounded_once(one, other)


def assert_rounded_once(one, other):
    with Reader(Path(one) / "global_step3") as first, Reader(Path(other) / "global_step3") as second:
        for kind, name in first.entries:
            if kind != "rng":  # a state is rounded once more, a weight never
                bound = 0.01 if kind.startswith("exp") else 0.0
                saved, loaded = first.whole(kind, name).double(), second.whole(kind, name).double()
                assert (saved - loaded).abs().max() <= bound * saved.abs().max(), (kind, name)


def back_to_the_start(folder, case):
    """A checkpoint from before the first step has no states; those of the steps that are taken back must not stay."""
    engine = build(case)
    engine.save_checkpoint(folder, tag="start")
    losses = train(engine, 3)
    engine.load_checkpoint(folder, tag="start")
    return losses, train(engine, 3)


def test_an_optimizer_starts_afresh_where_a_checkpoint_has_no_states(world, tmp_path):
    cases = [(f"{tmp_path}/{stage}", Case(stage=stage, scheduler=False)) for stage in (1, 3)]
    for ranks in world(2).each(back_to_the_start, cases):
        for losses, again in ranks:
            assert losses == again


def other_optimizer(folder, pickled):
    """Nothing is damaged: the newest checkpoint is of another optimizer, or has what is not trusted."""
    saver = build(Case(stage=1, optimizer="SGD", checkpoint={"pickled_client_state": pickled}))
    saver.save_checkpoint(folder, tag="start")
    train(saver, 2)
    saver.save_checkpoint(folder, tag="newest", client_state={"kind": len} if pickled else {})
    rule = "SGD" if pickled else "AdamW"
    engine = build(Case(stage=1, optimizer=rule, checkpoint={"on_corrupt": "previous"}))
    try:
        return engine.load_checkpoint(folder)[0]
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("pickled", choice([False, True], [False]))
def test_what_does_not_fit_is_not_taken_for_damage(world, tmp_path, pickled):
    for said in world(2).run(other_optimizer, str(tmp_path), pickled):
        assert "newest" in said and ("pickled_client_state" if pickled else "optimizer states are not in") in said


def tensors_in_groups(folder):
    """Settings of an optimizer may be tensors, as torch's Adam takes them."""
    engines = []
    for seed, beta in ((0, 0.5), (1, 0.9)):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3)
        betas = torch.tensor(beta), torch.tensor(0.99)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
        optimizer.param_groups[0]["weights"] = torch.tensor([beta, 1.0])
        engines.append(mizzen.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})[0])
    engines[0].save_checkpoint(folder)
    engines[1].load_checkpoint(folder)
    group = engines[1].basic_optimizer.param_groups[0]
    return [float(each) for each in group["betas"]], group["weights"].tolist(), type(group["betas"][0]).__name__


def test_settings_that_are_tensors(world, tmp_path):
    betas, weights, kind = world(1).run(tensors_in_groups, str(tmp_path))[0]
    assert betas == pytest.approx([0.5, 0.99]) and weights == [0.5, 1.0] and kind == "Tensor"


def named_parameters(folder):
    """An optimizer that knows names is loaded into one of a larger model."""
    engines = []
    for layers in (1, 2):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1 * layers, momentum=0.9)
        engines.append(mizzen.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})[0])
    engines[0].save_checkpoint(folder)
    engines[1].load_checkpoint(folder, load_module_strict=False)
    return engines[1].load_report.missing, engines[1].get_lr()


def test_names_that_an_optimizer_knows_are_its_own(world, tmp_path):
    assert world(1).run(named_parameters, str(tmp_path)) == [(("1.weight", "1.bias"), [0.1])]
