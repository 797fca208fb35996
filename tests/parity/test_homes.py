"""Homes are all that a strategy has to draw: toys of all kinds of parallelism train as one process does."""

import itertools
import os
from operator import itemgetter

import pytest
import torch
from safetensors.torch import load_file

import mizzen
import mizzen.api
import mizzen.plan.build
from breadth import FULL, choice, chosen, covering, together
from mizzen.comm.mesh import Mesh
from mizzen.config.load import load
from mizzen.errors import UsageError
from mizzen.launcher.signals import UNSAVED
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.zero.full.division import transient
from mizzen.parallel.zero.full.shard import FullChoice
from mizzen.parallel.zero.full.store import FullStore
from mizzen.parallel.zero.shard import _in_flight
from mizzen.plan.cost import Cost
from mizzen.progress import get_progress
from parity.toys import LENGTH, VOCABULARY, Columns, Flock, Halves, Toy

STEPS, SAMPLES = 3, 8
STRATEGIES = ("mizzen.parallel.tensor", "mizzen.parallel.pipeline")
"""What the toys stand for."""


def is_of(transform, packages) -> bool:
    return type(transform).__module__.startswith(packages)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def config(stage, optimizer, clip, accumulation, tp, ep, pp=1, kv=0) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01 if optimizer == "AdamW" else 0.1}},
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "reduce_bucket_size": 300,
        },
        "tensor_parallel": {"autotp_size": tp},
        "expert_parallel": {"enabled": ep > 1, "autoep_size": ep},
        "pipeline_parallel_size": pp,
        "progress": {"enabled": False},
        "seed": 1,
    }


def start(*case, freeze=(), **more):
    mizzen.api.ORDER = (Halves(), Columns(), Flock(), *(each for each in ORDER if not is_of(each, STRATEGIES)))
    mizzen.plan.build.refusals = lambda config: ()
    model = Toy(*case[7:])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in freeze))
    engine, *_ = mizzen.initialize(model=model, config=config(*case) | more)
    return engine


def shares(engine, step: int) -> torch.Tensor:
    """The micro-batches of a rank."""
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    micro = SAMPLES // ranks // engine.gradient_accumulation_steps()
    return batch(step).view(ranks, -1, micro, LENGTH)[rank]


def train(*case) -> tuple[list, list, dict]:
    """What a user writes, on one rank."""
    engine = start(*case)
    losses, norms = [], []
    for step in range(STEPS):
        report = engine.train_batch(iter(shares(engine, step)))
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return losses, norms, values


def reference(optimizer: str, clip: float, kv: int = 0) -> tuple[list, list, dict]:
    """One process, plain torch."""
    model = Toy(kv)
    kind = getattr(torch.optim, optimizer)
    rule = kind(model.parameters(), lr=0.01 if optimizer == "AdamW" else 0.1, **({"weight_decay": 0.0}))
    losses, norms = [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def check(world, size, cases) -> None:
    """One after the other on the same ranks."""
    for case, found in zip(cases, world(size).each(train, cases), strict=True):
        _, optimizer, clip, *_ = case
        expected, norms, parameters = reference(optimizer, clip, *case[7:])
        start = dict(Toy(*case[7:]).named_parameters())
        seen = set()
        for got in found:
            assert got[0] == pytest.approx(expected, rel=1e-5), case
            assert got[1] == pytest.approx(norms, rel=1e-5), case
            for name, value in got[2].items():
                name = "embed.weight" if name == "head.weight" else name
                seen.add(name)
                if optimizer == "SGD":
                    moved, wanted = value - start[name], parameters[name] - start[name]
                    assert (moved - wanted).norm() <= 2e-3 * wanted.norm(), (case, name)
        assert seen == set(parameters), case


def spoil(rank: int, *case) -> tuple:
    """One rank meets a NaN, in the gradient of a parameter that it alone has, or as a copy."""
    engine = start(*case)
    (name, parameter), *_ = (
        (name, p)
        for name, p in engine.module.named_parameters()
        if ("experts" in name and engine.mesh.layout.ep > 1) or ".up.weight" in name
    )
    if engine.global_rank == rank:
        parameter.register_hook(lambda gradient: gradient * float("nan"))
    report = engine.train_batch(iter(shares(engine, 0)))
    return report.applied, report.reason, name


SPOILED = [(0, (2, 2, 1)), (2, (2, 1, 2)), (3, (2, 2, 1)), (1, (1, 2, 2))]


@pytest.mark.parametrize(("stage", "plan"), choice(SPOILED, SPOILED[2:]))
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all_and_is_named(world, stage, plan):
    ranks = (0, 3)
    cases = [(rank, stage, "AdamW", 1.0, 1, *plan) for rank in ranks]
    for rank, outcomes in zip(ranks, world(4).each(spoil, cases), strict=True):
        assert not any(applied for applied, *_ in outcomes)
        name = outcomes[rank][2]
        for _, reason, _ in outcomes:
            assert f"rank {rank}" in reason
            assert name in reason


def asked_to_stop(*case) -> tuple:
    """A request that reaches one rank reaches all with the same step."""
    engine = start(*case)
    steps = 0
    try:
        for step in range(STEPS):
            if engine.global_rank == 1 and step == 1:
                get_progress().ask_self_to_stop()
            engine.train_batch(iter(shares(engine, step)))
            steps = engine.global_steps
    except SystemExit as stop:
        return steps, stop.code
    return steps, None


@pytest.mark.parametrize("plan", [(2, 1, 2), pytest.param((2, 2, 1), marks=pytest.mark.wide)])
def test_a_request_to_stop_ends_all_after_the_same_step(world, plan):
    assert set(world(4).run(asked_to_stop, 1, "AdamW", 1.0, 1, *plan)) == {(2, UNSAVED)}


def bytes_held(precision, *case) -> Cost:
    """Parameters, gradients, masters and states that a rank holds, but for what comes and goes."""
    engine = start(*case, **precision)
    engine.train_batch(iter(shares(engine, 0)))
    found = Cost()
    for store in engine.stores:
        if isinstance(store, FullStore):
            masters = sum(share.master.nbytes for unit in store.units for share in unit.shares)
            sums = sum(unit.sums.read().nbytes for unit in store.units)
            found += Cost(0, sums, masters) if precision else Cost(masters, sums)
            continue
        for bucket in store.buckets:
            summed = bucket.gradient
            local = bucket.plan.numel * summed.itemsize if store.holding.stage == 1 else 0
            is_apart = bucket.master.data_ptr() != bucket.mine(bucket.values).data_ptr()
            found += Cost(bucket.values.nbytes, local + summed.nbytes, bucket.master.nbytes if is_apart else 0)
    states = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
    return found + Cost(states=sum(value.nbytes for value in states if value.dim()))


def on_its_way(plan, rank: int) -> Cost:
    """What a plan counts for tensors that come and go, at most."""
    choice = plan.steps[-1].choice
    if isinstance(choice, FullChoice):
        return sum((transient(each) for part in choice.parts(rank) for each in part.sets), Cost())
    families = [family for piece in choice.families(rank) for family in piece if family.holding.stage == 2]
    return Cost(gradients=sum(_in_flight(family) for family in families))


MANY = [(4, 2, 1, 1), (4, 1, 4, 1), (4, 2, 2, 1), (4, 2, 1, 2), (8, 2, 2, 2), (8, 4, 1, 2), (4, 4, 1, 1, 2)]
FEW = [(4, 2, 1, 1), (8, 2, 2, 2), (4, 2, 1, 1, 1)]
BF16 = {"bf16": {"enabled": True}}
BYTES = [(stage, plan, {}) for stage in (0, 1) for plan in MANY]
BYTES += [(2, plan, BF16 if plan[3] == 1 else {}) for plan in FEW]  # the toy sends fp32 between its halves
BYTES += [(3, plan, {}) for plan in FEW] + [(3, (4, 2, 2, 1), BF16)]


@pytest.mark.parametrize("cases", together(BYTES, lambda case: case[1][0], [BYTES[at] for at in (2, 14, -1)]))
def test_the_bytes_of_a_plan_are_those_of_its_ranks(world, monkeypatch, cases):
    monkeypatch.setattr("mizzen.plan.build.refusals", lambda config: ())
    order = (Halves(), Columns(), Flock(), *(each for each in ORDER if not is_of(each, STRATEGIES)))
    size = cases[0][1][0]
    given = [(precision, stage, "AdamW", 0.0, 1, *plan[1:]) for stage, plan, precision in cases]
    for (precision, *case), held in zip(given, world(size).each(bytes_held, given), strict=True):
        planned = mizzen.plan.build.build(load(config(*case) | precision), size, Sketch.of(Toy(*case[7:])), order)
        for each in planned.classes:
            for rank in each.ranks:
                assert held[rank] == each.cost - on_its_way(planned, rank), (case, each.title, rank)


PLANS = [
    (4, 2, 1, 1),
    (4, 4, 1, 1),
    (4, 1, 2, 1),
    (4, 1, 4, 1),
    (4, 2, 2, 1),
    (8, 2, 2, 1),
    (4, 1, 1, 2),
    (4, 2, 1, 2),
    (8, 2, 1, 2),
    (8, 1, 2, 2),
    (8, 2, 2, 2),
]
CASES = list(itertools.product(PLANS, (0, 1, 2, 3), ("SGD", "AdamW"), (0.0, 0.5), (1, 2)))
PAIRS = [case for number, case in enumerate(CASES) if number % 11 == 0 and (case[2] != "SGD" or case[3] == 0)]
FITTING = [case for case in PAIRS if case[0][0] == 4 or case[0] == PLANS[-1]]
"""Of eight ranks those alone that do all at once."""
SHORT = covering([case for case in FITTING if case[0] in (PLANS[0], PLANS[4], PLANS[7], PLANS[-1])], 1)
"""With parts of matrices alone, beside experts, beside stages, and with both."""
SHOWN = [*SHORT, *[case for case in PAIRS if case not in SHORT][::2]]
if FULL:
    SHOWN = [case for case in CASES if case[2] != "SGD" or case[3] == 0]


@pytest.mark.parametrize("cases", together(SHOWN, lambda case: case[0][0], SHORT))
def test_any_homes_train_as_one_process_does(world, cases):
    check(world, cases[0][0][0], [(*case, *plan[1:]) for plan, *case in cases])


SHARED = [(0, 4, 4, 1), (1, 8, 4, 2), (2, 4, 4, 2), (3, 4, 2, 1)]
if FULL:
    SHARED = [(stage, *plan) for stage in range(4) for plan in ((4, 4, 1), (4, 4, 2), (4, 2, 1), (8, 4, 2))]


@pytest.mark.parametrize("cases", together(SHARED, itemgetter(1), [each for each in SHARED if each[0] == 3]))
def test_heads_that_several_ranks_hold_train_as_one_process_does(world, cases):
    """Each rank brings another gradient of a head of keys that it shares: they are added up, and counted once."""
    given = [(stage, "SGD", 0.0, 2 - stage % 2, tp, 1, 1, kv) for stage, _, tp, kv in cases]
    given += [(stage, "AdamW", 0.5, 1, tp, 1, 1, kv) for stage, _, tp, kv in cases if stage == 1]
    check(world, cases[0][1], given)


def whole_state(engine) -> dict:
    """Every parameter of this rank, with its moments, whole and by its global name."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        values = [mizzen.zero.safe_get_full_fp32_param(parameter)]
        values += [mizzen.zero.safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
        found["embed.weight" if name == "head.weight" else name] = [value.clone() for value in values]
    return found


def save_some(folder: str, *case) -> dict:
    engine = start(*case)
    for step in range(2):
        engine.train_batch(iter(shares(engine, step)))
    assert engine.save_checkpoint(folder)
    return whole_state(engine)


def carry_on(source: str, target: str, *case) -> tuple[dict, float]:
    engine = start(*case)
    assert engine.load_checkpoint(source)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    assert engine.save_checkpoint(target)
    state = whole_state(engine)
    return state, engine.train_batch(iter(shares(engine, 2))).loss


LAYOUTS = {"dp8": (8, 1, 1, 1), "tp4": (4, 4, 1, 1), "pp2": (2, 1, 1, 2), "one": (1, 1, 1, 1), "ep2": (4, 2, 2, 1)}


def case_of(layout, stage, kv=0) -> tuple:
    _, tp, ep, pp = layout
    return stage, "AdamW", 1.0, 1, tp, ep, pp, kv


def same(found, expected) -> bool:
    return all(torch.equal(a, b) for name in found for a, b in zip(found[name], expected[name], strict=True))


SOME_LAYOUTS = LAYOUTS if FULL else {name: LAYOUTS[name] for name in ("ep2", "one")}


@pytest.mark.wide  # test_layouts.py moves those of real models
@pytest.mark.parametrize(("stage", "then"), [(1, 2), (0, 3), (3, 1)] if FULL else [(1, 3)])
def test_a_checkpoint_moves_between_any_two_layouts_to_the_bit(world, tmp_path, stage, then):
    first = (8, 2, 1, 2)
    expected = {}
    for state in world(8).run(save_some, str(tmp_path / "first"), *case_of(first, stage)):
        expected |= state
    losses = []
    for name, layout in SOME_LAYOUTS.items():
        runs = world(layout[0]).run(carry_on, str(tmp_path / "first"), str(tmp_path / name), *case_of(layout, then))
        assert all(same(state, expected) for state, _ in runs), name
        losses += [loss for _, loss in runs]
    back = [(str(tmp_path / name), str(tmp_path / f"{name} and back"), *case_of(first, stage)) for name in SOME_LAYOUTS]
    for name, runs in zip(SOME_LAYOUTS, world(8).each(carry_on, back), strict=True):
        assert all(same(state, expected) for state, _ in runs), name
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


@pytest.mark.wide  # test_tensor.py moves those of a real model
@pytest.mark.parametrize(("stage", "then", "kv"), [(1, 3, 2), (3, 0, 1)] if FULL else [(1, 3, 2)])
def test_a_checkpoint_with_heads_that_several_ranks_hold_moves_to_the_bit(world, tmp_path, stage, then, kv):
    first, expected = (4, 4, 1, 1), {}
    for state in world(4).run(save_some, str(tmp_path / "first"), *case_of(first, stage, kv)):
        expected |= state
    for name, layout in {"tp2": (4, 2, 1, 1), "one": (1, 1, 1, 1)}.items():
        there, back = str(tmp_path / name), str(tmp_path / f"{name} and back")
        for source, target, ranks, how in (
            (str(tmp_path / "first"), there, layout, then),
            (there, back, first, stage),
        ):
            runs = world(ranks[0]).run(carry_on, source, target, *case_of(ranks, how, kv))
            assert all(same(state, expected) for state, _ in runs)


def ask(*case) -> tuple:
    """What calls without a handle answer, and whole values that are written and read again, on any homes."""
    engine = start(*case)
    mesh = Mesh.current()
    right = []
    for tokens in shares(engine, 0):
        engine.backward(engine(tokens))
    for parameter in engine.module.parameters():
        value = mizzen.zero.safe_get_full_fp32_param(parameter)
        mizzen.zero.safe_set_full_fp32_param(parameter, value + 1)
        right.append(torch.equal(mizzen.zero.safe_get_full_fp32_param(parameter), value + 1))
        gradient = mizzen.zero.safe_get_full_grad(parameter)
        mizzen.zero.safe_set_full_grad(parameter, gradient * 2)
        right.append(torch.allclose(mizzen.zero.safe_get_full_grad(parameter), gradient * 2))
        mizzen.zero.safe_set_full_grad(parameter, gradient)
        with mizzen.zero.GatheredParameters([parameter]):
            right.append(parameter.numel() <= value.numel())
    norms = {
        name: mizzen.zero.safe_get_full_grad(parameter).norm().item()
        for name, parameter in engine.module.named_parameters()
    }
    return all(right), mesh is engine.mesh, norms


@pytest.mark.in_parts
def test_whole_values_and_gradients_are_read_and_written_on_any_homes(world):
    model = Toy()
    model(batch(0)).backward()
    expected = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    stages = chosen([0, 1, 2, 3], [3])
    for stage, ranks in zip(stages, world(4).each(ask, [(s, "AdamW", 1.0, 1, 2, 2) for s in stages]), strict=True):
        for right, is_current, norms in ranks:
            assert right, stage
            assert is_current, stage
            assert norms == pytest.approx({name: expected[name] for name in norms}, rel=1e-4), stage


FROZEN = (".up.weight", ".down.", "experts.1", "experts.2.weight", "qkv")


def save_frozen(folder: str, *case) -> None:
    engine = start(*case, freeze=FROZEN)
    with torch.no_grad():
        for parameter in engine.module.parameters():  # so that what is loaded is not what is built
            if not parameter.requires_grad and engine.zero_optimization_stage() < 3:
                parameter.mul_(2)
    assert engine.save_checkpoint(folder)


def load_frozen(folder: str, *case) -> dict:
    engine = start(*case, freeze=FROZEN)
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "plan"), choice([(1, (4, 2, 2, 1)), (3, (8, 2, 2, 1)), (0, (4, 4, 1, 1, 2))], [(1, (4, 2, 2, 1))])
)
def test_frozen_parameters_are_saved_from_their_homes_too(world, tmp_path, stage, plan):
    size, tp, ep, pp, *kv = plan
    world(size).run(save_frozen, str(tmp_path), stage, "AdamW", 1.0, 1, tp, ep, pp, *kv)
    (found,) = world(1).run(load_frozen, str(tmp_path), 0, "AdamW", 1.0, 1, 1, 1, 1, *kv)
    for name, value in Toy(*kv).named_parameters():
        is_doubled = stage < 3 and any(word in name for word in FROZEN)
        assert torch.equal(found[name], value * 2 if is_doubled else value), name


def export(folder: str, *case) -> dict | None:
    engine = start(*case, bf16={"enabled": True})
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(folder, "model.bin")
    return engine._consolidated_16bit_state_dict()


WRITTEN = [(1, (8, 2, 2, 2)), (3, (4, 2, 1, 1, 1)), (3, (8, 2, 2, 1)), (2, (4, 4, 1, 1, 2))]


@pytest.mark.parametrize(("stage", "plan"), choice(WRITTEN, WRITTEN[1:2]))
def test_a_model_in_parts_is_written_whole_by_one_rank(world, tmp_path, stage, plan):
    size, tp, ep, pp, *kv = plan
    expected = {name: value.bfloat16() for name, value in Toy(*kv).state_dict().items()}
    first, *others = world(size).run(export, str(tmp_path), stage, "AdamW", 1.0, 1, tp, ep, pp, *kv)
    assert others == [None] * (size - 1)
    files = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.bin")
    assert files[0].keys() == expected.keys() - {"head.weight"}
    assert files[1].keys() == first.keys() == expected.keys()
    for found in (first, *files):
        assert all(
            value.dtype == torch.bfloat16 and torch.equal(value, expected[name]) for name, value in found.items()
        )


def change_some(which: str, *case) -> str:
    """Somebody gives parameters other values on some ranks: those of a stage, one of two data ranks, one of a copy."""
    engine = start(*case)
    mesh = engine.mesh
    places = {"stage": mesh.coordinate("pp") == 1, "data": mesh.data_rank == 0, "copy": mesh.tensor_rank == 1}
    for name, parameter in engine.module.named_parameters():
        if places[which] and (".norm." in name or which == "stage") and name not in ("embed.weight", "head.weight"):
            parameter.data = parameter.data * 0.5
    try:
        return str(engine.train_batch(iter(shares(engine, 0))).applied)
    except UsageError as refusal:
        return str(refusal)


@pytest.mark.wide
def test_a_change_is_for_all_ranks_that_hold_the_same(world):
    for plan, which, words in (
        ((2, 1, 2), "stage", "True"),
        ((1, 1, 2), "data", "have other values on some ranks than on others"),
        ((2, 1, 1), "copy", "have other values on some ranks than on others"),
    ):
        for found in world(4).run(change_some, which, 1, "AdamW", 1.0, 1, *plan):
            assert words in found


def modify(*case) -> dict:
    """The second of the data ranks writes to whatever it has; each of its tensor-parallel neighbours something else."""
    engine = start(*case)
    mesh, named = engine.mesh, dict(engine.module.named_parameters())
    mine = (10 if mesh.data_rank == 1 else 1000) * (1 + mesh.tensor_rank)
    with mizzen.zero.GatheredParameters(list(named.values()), modifier_rank=1), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(mine)
    with mizzen.zero.GatheredParameters(list(named.values())):
        local = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    return {name: (local[name], mizzen.zero.safe_get_full_fp32_param(p)) for name, p in named.items()}


@pytest.mark.parametrize("stage", choice([0, 1, 3], [3]))
def test_what_a_modifier_writes_reaches_every_rank_that_holds_the_same(world, stage):
    for rank, found in enumerate(world(4).run(modify, stage, "AdamW", 1.0, 1, 2, 1, 1, 1)):
        tp = rank % 2
        for name, (local, whole) in found.items():
            if ".qkv." in name:  # two heads of queries for each rank; both have the one of keys and of values
                rows = whole.flatten(1)[:, 0] if whole.dim() > 1 else whole
                assert rows.tolist() == [10.0] * 4 + [20.0] * 4 + [10.0] * 4
                assert local.flatten().unique().tolist() == ([10.0] if tp == 0 else [10.0, 20.0])
            elif name.split(".")[-2] in ("up", "down", "out"):
                assert local.unique().tolist() == [10.0 * (1 + tp)]
                assert whole.unique().tolist() == [10.0, 20.0]
            else:
                assert local.unique().tolist() == whole.unique().tolist() == [10.0]


def modify_nobody(*case) -> str:
    engine = start(*case)
    with (
        pytest.raises(UsageError) as refusal,
        mizzen.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=2),
    ):
        pass
    return str(refusal.value)


def test_a_modifier_that_does_not_hold_a_parameter_is_refused(world):
    for words in world(4).run(modify_nobody, 1, "AdamW", 1.0, 1, 2, 1):
        assert "averaged over 2 ranks" in words


def train_lamb(*case) -> list:
    engine = start(*case)
    return [engine.train_batch(iter(shares(engine, step))).loss for step in range(STEPS)]


@pytest.mark.wide  # test_tensor.py has a real model
def test_the_norms_of_lamb_are_those_of_whole_parameters_on_any_homes(world):
    alone = [world(1).run(train_lamb, 0, "Lamb", 0.0, 1, 1, 1, 1, kv)[0] for kv in (0, 1)]
    plans = ((4, 1, 2, 2, 1, 0), (8, 2, 2, 2, 2, 0), (4, 3, 2, 1, 1, 0), (4, 1, 4, 1, 1, 1), (4, 3, 2, 1, 1, 1))
    for size, stage, tp, ep, pp, kv in plans:
        for losses in world(size).run(train_lamb, stage, "Lamb", 0.0, 1, tp, ep, pp, kv):
            assert losses == pytest.approx(alone[kv], rel=1e-5)


def count_operations(*case) -> dict:
    """Operations of each module in forward, as the profiler sees them on this rank."""
    profiler = {"enabled": True, "profile_step": 1, "output_file": os.devnull}
    engine = start(*case, flops_profiler=profiler)
    for step in range(2):
        engine.train_batch(iter(shares(engine, step)))
    found, left = {}, [engine.flops_profile]
    while left:
        branch = left.pop()
        found[branch.path] = branch.forward
        left += branch.inside
    return found


def test_the_profiler_counts_what_a_rank_computes_of_a_cut_layer(world):
    alone = world(1).run(count_operations, 0, "SGD", 0.0, 1, 1, 1)[0]
    for found in world(2).run(count_operations, 1, "SGD", 0.0, 1, 2, 1):
        assert found["head"] == alone["head"] > 0
        for cut in ("blocks.0.up", "blocks.2.down"):
            assert 2 * found[cut] == alone[cut] > 0


def shares_of_experts(*case) -> list:
    """Who shares the experts and the rest at stage 3, and bytes of whole parameters between two uses."""
    engine = start(*case)
    found = []
    for store in engine.stores:
        ranks = torch.distributed.get_world_size(store.ranks.shard_group)
        kinds = {"experts" in name for name in store.contents.trained}
        held = sum(parameter.untyped_storage().nbytes() for parameter in store.contents.held.values())
        found.append((ranks, kinds, held))
    return found


def test_experts_are_units_of_the_ranks_that_hold_them(world):
    for found in world(4).run(shares_of_experts, 3, "SGD", 0.0, 1, 1, 2):
        assert found == [(4, {False}, 0), (2, {True}, 0)]
