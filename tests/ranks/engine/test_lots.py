"""One lot stepped after the other gives the bits of all of them stepped at once."""

import math
from itertools import product

import pytest
import torch
from torch import nn

import mizzen
from breadth import FULL, choice, chosen
from mizzen.errors import UsageError
from mizzen.parallel.zero.full import owned

QUIET = {"progress": {"enabled": False}}
PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
}
HELD = {"fp32": torch.float32, "fp16": torch.float16}
NAMED = ("AdamW", "Adam", "SGD", "Adagrad", "Lion", "Muon", "Adafactor")
OF_TORCH = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW rate": (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.01)}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {"foreach": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {"foreach": True}),
    "ASGD": (torch.optim.ASGD, {}),
}
RULES = (*NAMED, *OF_TORCH)
OTHERS = [*product(PRECISION, (1, 2))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.last(inputs).float().square().mean()


def start(stage, rule, dtype="fp32", accumulation=1, one_by_one=True):
    model = Model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == flag] for flag in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 80,
            "stage3_param_persistence_threshold": 0,
        },
        **QUIET,
        **PRECISION[dtype],
    }
    optimizer = None
    if rule in NAMED or rule == "Lamb":
        momentum = {"momentum": 0.9} if rule == "SGD" else {}
        config["optimizer"] = {"type": rule, "params": {"lr": 0.01, "weight_decay": 0.1} | momentum}
    else:
        kind, arguments = OF_TORCH[rule]
        arguments = {name: value.clone() if name == "lr" else value for name, value in arguments.items()}
        optimizer = kind(groups, **arguments)
    engine, *_ = mizzen.initialize(model=model, model_parameters=groups, optimizer=optimizer, config=config)
    engine.updater.one_by_one = one_by_one
    return engine


def train(engine, dtype, accumulation, broken=2, steps=4):
    """What is told of each step, and what is left of them all; the third is broken on rank 1."""
    armed = {"on": False}
    weight = engine.module.layers[1].weight
    weight.register_hook(lambda g: g * math.nan if armed["on"] else g)
    calls, told = [], []
    step = engine.basic_optimizer.step
    engine.basic_optimizer.step = lambda: (calls.append(1), step())
    for number in range(steps):
        armed["on"] = number == broken and engine.global_rank == 1
        for micro in range(accumulation):
            seed = 100 * number + 10 * micro + engine.global_rank
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(inputs.to(HELD.get(dtype, torch.bfloat16))))
            report = engine.step()
        told.append((report.applied, str(report.grad_norm), report.loss_scale))
    del engine.basic_optimizer.step
    left = {name: mizzen.zero.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    for number, (_, master) in enumerate(pair for store in engine.stores for pair in store.contents.masters):
        for key, value in engine.basic_optimizer.state.get(master, {}).items():
            left[f"{number} {key}"] = torch.as_tensor(value).clone()
    return told, left, len(calls)


def both(stage, cases):
    """For each case what was told, whether all bits are the same, and how often the optimizer was called each time."""
    owned.ROUND = 24
    found = []
    for rule, dtype, accumulation in cases:
        runs = []
        for one_by_one in (False, True):
            engine = start(stage, rule, dtype, accumulation, one_by_one)
            runs.append(train(engine, dtype, accumulation))
            engine.destroy()
        (told, left, calls), (told_apart, left_apart, calls_apart) = runs
        is_same = left.keys() == left_apart.keys() and all(torch.equal(left[key], left_apart[key]) for key in left)
        found.append((told, is_same and told == told_apart and len(left) > 8, calls, calls_apart))
    return found


def cases_at(stage):
    """Each rule at two stages, with another precision and accumulation at each; of these `make test` has every other.

    With FULL=1 all of them.
    """
    others = [each for each in OTHERS if stage or each[0] != "low"]
    if FULL:
        return [(rule, *other) for rule in RULES for other in others]
    two = [*enumerate(RULES)][stage % 2 :: 2]
    cases = [(rule, *others[(3 * number + 2 * stage) % len(others)]) for number, rule in two]
    return chosen(cases, cases[stage // 2 :: 2])


@pytest.mark.in_parts
@pytest.mark.parametrize("stage", choice([0, 1, 2, 3], [2, 3]))
def test_lots_one_by_one_give_the_bits_of_a_whole_step(world, stage):
    cases = cases_at(stage)
    for results in world(2).run(both, stage, cases, timeout=900 if FULL else 200):
        for case, (told, is_same, calls, calls_apart) in zip(cases, results, strict=True):
            assert is_same, (case, told)
            taken = sum(applied for applied, *_ in told)
            assert taken == calls and not told[2][0], (case, told)
            assert calls_apart >= 4 * calls and calls_apart % calls == 0, case
            assert taken == 3 or (case[1] == "fp16" and not told[0][0] and taken), (case, told)


def refused():
    said = []
    for rule, prepare in (("Lamb", None), ("AdamW", lambda optimizer: optimizer.register_step_post_hook(print))):
        engine = start(1, rule)
        if prepare is not None:
            prepare(engine.basic_optimizer)
        engine.backward(engine(torch.ones(2, 8)))
        with pytest.raises(UsageError) as caught:
            engine.step()
        said.append(str(caught.value))
    return said


def test_what_needs_all_of_a_step_is_refused(world):
    for norms, hooks in world(2).run(refused):
        assert norms == (
            "Lamb adds up the norms of all parameters over the ranks in one call: it cannot be stepped one lot after "
            "the other"
        )
        assert "AdamW has hooks, which are for whole steps" in hooks


def gathered():
    """Nothing of a step is taken that cannot be taken whole."""
    engine = start(3, "AdamW")
    engine.backward(engine(torch.ones(2, 8)))
    before = [mizzen.zero.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    with (
        mizzen.zero.GatheredParameters([engine.module.last.weight]),
        pytest.raises(UsageError, match="inside GatheredParameters"),
    ):
        engine.step()
    after = [mizzen.zero.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return all(map(torch.equal, before, after))


def test_a_step_inside_gathered_parameters_touches_no_lot(world):
    assert world(2).run(gathered) == [True, True]


def completed(stage):
    """Of how many lots gradients are complete: as the last one comes in each backward, after it, and after the step."""
    engine = start(stage, "AdamW", accumulation=2)
    lots = [lot for store in engine.stores for lot in store.contents.lots]
    seen = []

    def look(when):
        seen.append((when, sum(lot.is_complete for lot in lots)))

    engine.module.layers[0].weight.register_hook(lambda _: look("in backward"))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)))
        look("after it")
        engine.step()
        look("after step")
    return len(lots), seen


def test_lots_are_complete_once_their_last_backward_is_through(world):
    for stage, ranks in enumerate(world(2).each(completed, [(0,), (1,), (2,), (3,)])):
        for rank in ranks:
            assert_complete(stage, *rank)


def assert_complete(stage, count, seen):
    assert count >= 4
    *first, (_, during), after, stepped = seen
    assert all(number == 0 for _, number in first)
    assert (after, stepped) == (("after it", count), ("after step", 0))
    assert 0 < during < count if stage == 2 else during == 0


def by_stage(rule):
    engine = start(3, rule, one_by_one=False)
    full = train(engine, "fp32", 1)[1]
    engine.destroy()
    flat = train(start(0, rule, one_by_one=False), "fp32", 1)[1]
    return [name for name, _ in Model().named_parameters() if not torch.equal(full[name], flat[name])]


def test_shares_of_one_unit_do_not_scale_the_gradients_of_each_other(world):
    """A rule without a fused kernel has gradients multiplied before the step, once, also beside a short share."""
    assert world(2).run(by_stage, "SGD foreach") == [[], []]
