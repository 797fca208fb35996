"""Unmodified models whose matrices are cut over ranks train as one process does."""

import pytest
import torch
from safetensors.torch import load_file

import mizzen
import mizzen.errors
from breadth import choice, chosen, every_pair
from mizzen.config.load import load
from mizzen.engine.prepare import choose_optimizer, with_optimizer_groups
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.order import ORDER
from mizzen.plan.build import build
from parity.decoders import LENGTH, MODELS, VOCABULARY, Decoder

STEPS, SAMPLES = 3, 8


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def config(tp, stage, optimizer="SGD", clip=0.0, accumulation=1, **more) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": optimizer, "params": {"lr": 0.01 if optimizer == "AdamW" else 0.1}},
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "tensor_parallel": {"autotp_size": tp},
        "progress": {"enabled": False},
        "seed": 1,
        **more,
    }


def shares(engine, step: int) -> torch.Tensor:
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    micro = SAMPLES // ranks // engine.gradient_accumulation_steps()
    return batch(step).view(ranks, -1, micro, LENGTH)[rank]


def walk(engine, steps=range(STEPS)) -> tuple[list, list]:
    losses, norms = [], []
    for step in steps:
        report = engine.train_batch(iter(shares(engine, step)))
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms


def values_of(engine) -> dict:
    trained = ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)
    return {name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in trained}


def train(kind: str, *case, **more) -> tuple:
    engine, *_ = mizzen.initialize(model=Decoder(**MODELS[kind]), config=config(*case, **more))
    return *walk(engine), values_of(engine)


def reference(kind: str, optimizer: str, clip: float) -> tuple[list, list, dict]:
    model = Decoder(**MODELS[kind])
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = getattr(torch.optim, optimizer)(trained, lr=0.01 if optimizer == "AdamW" else 0.1, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def check(found, kind: str, optimizer: str, clip: float) -> None:
    expected, norms, parameters = reference(kind, optimizer, clip)
    before = dict(Decoder(**MODELS[kind]).named_parameters())
    for losses, seen, values in found:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert seen == pytest.approx(norms, rel=1e-5)
        assert set(values) == {name for name, p in before.items() if p.requires_grad}
        for name, value in values.items():
            moved, wanted = value - before[name], parameters[name] - before[name]
            if optimizer == "SGD":
                assert (moved - wanted).norm() <= 2e-3 * wanted.norm(), name


KINDS = chosen(MODELS, ["one key", "runs", "interleaved", "uneven", "latent"])


@pytest.mark.in_parts
def test_any_kind_of_layers_trains_as_one_process(world):
    """One after the other on the same two ranks."""
    for kind, found in zip(KINDS, world(2).each(train, [(kind, 2, 0) for kind in KINDS]), strict=True):
        check(found, kind, "SGD", 0.0)


OVER_FOUR = [("grouped", 4, 1), ("runs", 2, 3), ("one key", 4, 2)]


@pytest.mark.parametrize(("kind", "tp", "stage"), choice(OVER_FOUR, OVER_FOUR[2:]))
def test_layers_over_four_ranks_train_as_one_process(world, kind, tp, stage):
    check(world(4).run(train, kind, tp, stage), kind, "SGD", 0.0)


CROSS = every_pair([["grouped", "interleaved", "adapted"], [0, 1, 2, 3], ["SGD", "AdamW"], [0.0, 0.3], [1, 2]])
CROSS = chosen(CROSS, CROSS[1:4:2])


@pytest.mark.in_parts
def test_with_every_stage_clipping_and_accumulation(world):
    """One after the other on the same four ranks."""
    for at in range(0, len(CROSS), 8):
        some = CROSS[at : at + 8]
        runs = world(4).each(train, [(kind, 2, *case) for kind, *case in some], timeout=240)
        for (kind, _, optimizer, clip, _), found in zip(some, runs, strict=True):
            check(found, kind, optimizer, clip)


FORMATS = {"bf16": ({"bf16": {"enabled": True}}, 4e-3), "fp16": ({"fp16": {"enabled": True, "loss_scale": 8}}, 1e-3)}


@pytest.mark.parametrize("name", choice(FORMATS, ["bf16"]))
def test_formats_of_fewer_bits_train_as_in_one_process(world, name):
    """Within what a step of the format makes of losses."""
    more, far = FORMATS[name]
    ((losses, norms, _),) = world(1).run(train, "grouped", 1, 0, **more)
    for ranks in world(2).each(train, [("grouped", 2, stage) for stage in (1, 3)], **more):
        for found, seen, _ in ranks:
            assert found == pytest.approx(losses, rel=far)
            assert seen == pytest.approx(norms, rel=10 * far)


def train_beside(section: dict) -> tuple:
    return train("grouped", 2, 3, zero_optimization=section)


@pytest.mark.wide  # test_grid.py and zero/full/test_family.py have both, with whole matrices
def test_zero_plus_plus_beside_it(world):
    """Second shards change nothing; messages of eight bits change losses a little."""
    base = {"stage": 3, "stage3_param_persistence_threshold": 0}
    second = {**base, "zero_hpz_partition_size": 2}
    quantized = {**base, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    exact, near = world(4).each(train_beside, [(second,), (quantized,)])
    check(exact, "grouped", "SGD", 0.0)
    losses, norms, _ = reference("grouped", "SGD", 0.0)
    for found, seen, _ in near:
        assert found == pytest.approx(losses, rel=1e-2)
        assert seen == pytest.approx(norms, rel=5e-2)
        assert found != pytest.approx(losses, rel=1e-6)


EIGHT = {"heads": 8, "kv": 2, "inner": 40}


def over_eight(folder: str) -> tuple:
    """More ranks than heads of keys: losses of eight, and of those that go on from a checkpoint of two."""
    engine, *_ = mizzen.initialize(model=Decoder(**EIGHT), config=config(8, 1))
    found = walk(engine)
    engine.destroy()
    engine, *_ = mizzen.initialize(model=Decoder(**EIGHT), config=config(2, 2))
    again = walk(engine)
    assert engine.save_checkpoint(folder)
    values = values_of(engine)
    engine.destroy()
    engine, *_ = mizzen.initialize(model=Decoder(**EIGHT), config=config(8, 0))
    assert engine.load_checkpoint(folder)[0] is not None and engine.load_report.is_exact
    return found, again, values, values_of(engine), engine.module.blocks[0].attention.q.weight.shape


@pytest.mark.wide  # four ranks do what eight do
def test_eight_ranks_share_matrices_and_go_on_from_two(world, tmp_path):
    ((losses, norms, expected),) = world(1).run(train_eight)
    for found, again, values, loaded, shape in world(8).run(over_eight, str(tmp_path), timeout=240):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert again[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)
        assert shape == (4, 16)


def train_eight() -> tuple:
    engine, *_ = mizzen.initialize(model=Decoder(**EIGHT), config=config(1, 0))
    return *walk(engine), values_of(engine)


def test_sums_that_go_on_while_a_layer_computes_are_the_same(world):
    check(
        world(2).run(train, "grouped", 2, 0, tensor_parallel={"autotp_size": 2, "tp_overlap_comm": True}),
        "grouped",
        "SGD",
        0.0,
    )


def test_outputs_of_a_fused_layer_that_are_put_together_are_in_their_order(world):
    specs = [{"patterns": [r"mlp\.up"], "shape": [2, -1], "gather_output": True}]
    section = {"autotp_size": 2, "partition_config": {"layer_specs": specs}}
    check(world(2).run(train, "grouped", 2, 0, tensor_parallel=section), "grouped", "SGD", 0.0)


def differs_by_rank(tp: int) -> tuple:
    """Every rank builds other values: the first rank's are taken."""
    model = Decoder()
    mizzen.init_distributed()
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    engine, *_ = mizzen.initialize(model=model, config=config(tp, 0))
    return walk(engine)


def test_the_first_ranks_values_are_taken(world):
    expected = reference("grouped", "SGD", 0.0)
    assert world(2).run(differs_by_rank, 2)[0][0] == pytest.approx(expected[0], rel=1e-5)


def save(tp: int, stage: int, folder: str, rule: str = "AdamW") -> tuple:
    engine, *_ = mizzen.initialize(model=Decoder(), config=config(tp, stage, rule))
    walk(engine)
    assert engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder, "whole.safetensors")
    return values_of(engine), walk(engine, [STEPS])[0]


def resume(tp: int, stage: int, folder: str, rule: str = "AdamW") -> tuple:
    engine, *_ = mizzen.initialize(model=Decoder(), config=config(tp, stage, rule))
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    return values_of(engine), walk(engine, [STEPS])[0]


@pytest.mark.in_parts
def test_a_checkpoint_of_one_size_loads_into_any_other(world, tmp_path):
    saved, (loss,) = world(4).run(save, 2, 1, str(tmp_path))[0]
    for size, tp, stage in chosen([(1, 1, 0), (4, 4, 0), (4, 2, 3)], [(4, 4, 0)]):
        for values, (again,) in world(size).run(resume, tp, stage, str(tmp_path)):
            assert all(torch.equal(values[name], value) for name, value in saved.items())
            assert again == pytest.approx(loss, rel=1e-5)
    whole = load_file(tmp_path / "whole.safetensors")
    assert torch.equal(whole["blocks.0.attention.q.weight"], saved["blocks.0.attention.q.weight"])


def built_in_shards(tp: int) -> tuple:
    """At stage 3 a model that is built in shards is never whole on a rank."""
    mizzen.init_distributed()
    settings = config(tp, 3)
    with mizzen.zero.Init(config=settings):
        model = Decoder()
    engine, *_ = mizzen.initialize(model=model, config=settings)
    return *walk(engine), values_of(engine)


def test_a_model_that_is_built_in_shards_is_cut_from_them(world):
    check(world(4).run(built_in_shards, 2), "grouped", "SGD", 0.0)


def with_rule(name: str, tp: int, stage: int = 1, kind: str = "stacked") -> tuple:
    settings = config(tp, stage) | {"optimizer": {"type": name, "params": {"lr": 0.01}}}
    engine, *_ = mizzen.initialize(model=Decoder(**MODELS[kind]), config=settings)
    return *walk(engine), values_of(engine)


def check_rule(world, name: str, cases: list[tuple]) -> None:
    """The losses of one process, and its updates of matrices: the gradient of a bias of keys is noise."""
    for size, tp, stage, kind in cases:
        ((losses, norms, expected),) = world(1).run(with_rule, name, 1, 0, kind)
        before = dict(Decoder(**MODELS[kind]).named_parameters())
        for found, seen, values in world(size).run(with_rule, name, tp, stage, kind):
            assert found == pytest.approx(losses, rel=1e-5), (tp, stage, kind)
            assert seen == pytest.approx(norms, rel=1e-4), (tp, stage, kind)
            for each, value in ((name, value) for name, value in values.items() if value.dim() > 1):
                moved, wanted = value - before[each], expected[each] - before[each]
                assert (moved - wanted).norm() <= 2e-3 * wanted.norm(), (each, tp, stage, kind)


def test_rules_that_need_norms_get_those_of_whole_matrices(world):
    check_rule(world, "Lamb", [(2, 2, 1, "stacked")])
    check_rule(world, "Lion", [(2, 2, 1, "stacked")])


@pytest.mark.wide  # make test has Muon on whole matrices
def test_muon_puts_matrices_together_over_tensor_parallel_ranks(world):
    check_rule(world, "Muon", [(2, 2, 0, "stacked"), (4, 2, 1, "runs"), (4, 4, 2, "one key"), (4, 2, 3, "grouped")])


@pytest.mark.wide  # the checkpoints of other rules move in the same way
def test_muon_goes_on_at_another_size(world, tmp_path):
    saved, (loss,) = world(4).run(save, 2, 1, str(tmp_path), "Muon")[0]
    for size, tp, stage in ((1, 1, 0), (4, 2, 3)):
        for values, (again,) in world(size).run(resume, tp, stage, str(tmp_path), "Muon"):
            assert all(torch.equal(values[name], value) for name, value in saved.items())
            assert again == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Adafactor", "grouped", "needs it whole"),
        ("Muon", "uneven", r"parts of different shapes, \[8, 16\], \[16, 16\]"),
    ],
)
def test_a_rule_that_cannot_put_parts_together_is_refused(name, kind, message):
    settings = load(config(2, 1) | {"optimizer": {"type": name, "params": {"lr": 0.01}}})
    model = Decoder(**MODELS[kind])
    sketch = Sketch.of(model).with_flow(flow_of(model))
    sketch = with_optimizer_groups(sketch, model, choose_optimizer(None, settings, model, sketch))
    with pytest.raises(mizzen.errors.PlanError, match=message):
        build(settings, 2, sketch, ORDER)


def test_the_muon_of_torch_which_cannot_put_parts_together_is_refused():
    model = Decoder(tied=False)
    settings = load({key: value for key, value in config(2, 1).items() if key != "optimizer"})
    matrices = [p for p in model.parameters() if p.dim() == 2]
    sketch = Sketch.of(model).with_flow(flow_of(model))
    given = choose_optimizer(torch.optim.Muon(matrices, lr=0.01), settings, model, sketch)
    with pytest.raises(mizzen.errors.PlanError, match="needs it whole"):
        build(settings, 2, with_optimizer_groups(sketch, model, given), ORDER)


def other_batch() -> str:
    engine, *_ = mizzen.initialize(model=Decoder(), config=config(2, 0))
    with pytest.raises(mizzen.errors.MizzenError) as told:
        engine(batch(torch.distributed.get_rank()))
    return str(told.value)


def test_a_rank_that_sees_another_batch_is_named(world):
    for message in world(2).run(other_batch):
        assert "rank 1" in message


def split_twice() -> str:
    model = Decoder()
    engine, *_ = mizzen.initialize(model=model, config=config(2, 0))
    engine.destroy()
    with pytest.raises(mizzen.errors.PlanError) as told:
        mizzen.initialize(model=model, config=config(2, 0))
    return str(told.value)


def test_a_model_that_was_split_is_not_split_again(world):
    for message in world(2).run(split_twice):
        assert "split already" in message


def bytes_held(tp: int) -> tuple[int, int]:
    engine, *_ = mizzen.initialize(model=Decoder(tied=False), config=config(tp, 0))
    return sum(p.numel() * 4 for p in engine.module.parameters()), torch.distributed.get_rank()


def test_ranks_hold_the_bytes_that_the_plan_says(world):
    model = Decoder(tied=False)
    plan = build(load(config(2, 0)), 2, Sketch.of(model).with_flow(flow_of(model)), ORDER)
    (draft,) = plan.drafts
    for held, rank in world(2).run(bytes_held, 2):
        assert held == draft.local(plan.resolved.layout, rank).nbytes
