"""The engine on ranks: what each call does to gradients, parameters and counters."""

import gc
import io

import psutil
import pytest
import torch
from torch import nn

import mizzen
from breadth import choice
from mizzen.errors import StepError, UsageError
from parity.programs import Case, batch, build, micro_batches

QUIET = {"progress": {"enabled": False}}


def start(case: Case, model: nn.Module | None = None, **extra):
    model = model if model is not None else build(case)
    engine, *_ = mizzen.initialize(model=model, config=case.config | extra)
    return engine


def snapshot(engine) -> dict[str, torch.Tensor]:
    """Everything a skipped step must not change."""
    kept = {f"param {name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    for number, (_, master) in enumerate(m for store in engine.stores for m in store.contents.masters):
        kept[f"master {number}"] = master.clone()
        for key, value in engine.basic_optimizer.state.get(master, {}).items():
            kept[f"state {number} {key}"] = torch.as_tensor(value).clone()
    return kept


def poison(stage: int, at_step: int, at_rank: int, name: str) -> dict:
    case = Case(stage, 2, samples=8)
    engine = start(case)
    broken = dict(engine.module.named_parameters())[name]
    armed = {"on": False}
    broken.register_hook(lambda g: g * float("nan") if armed["on"] else g)
    results = {}
    for step in range(4):
        armed["on"] = step == at_step and engine.global_rank == at_rank
        before = snapshot(engine)
        (tokens,) = micro_batches(case, step, engine.global_rank)
        engine.backward(engine(tokens))
        report = engine.step()
        if step == at_step:
            after = snapshot(engine)
            results = {
                "applied": report.applied,
                "reason": report.reason,
                "changed": [key for key in before if not torch.equal(before[key], after[key])],
                "lr": report.lr == (0.01,),
                "overflow": engine.optimizer.overflow,
                "steps": engine.global_steps,
                "samples": engine.global_samples,
            }
    return results | {"end": engine.global_steps, "skipped": engine.skipped_steps}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("rank", "name"), [(0, "blocks.1.up.weight"), (1, "embed.weight"), (1, "blocks.2.gain")])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(world, stage, rank, name):
    for found in world(2).run(poison, stage, 2, rank, name):
        assert found["applied"] is False
        assert found["reason"] == f"step 3: gradient not finite on rank {rank}: {name}"
        assert found["changed"] == []
        assert found["overflow"] is True
        assert (found["steps"], found["samples"]) == (2, 24)
        assert (found["end"], found["skipped"]) == (3, 1)


def poison_for_ever() -> str:
    engine = start(Case(2, 2), max_consecutive_skips=3)
    engine.module.norm.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(StepError) as caught:
        for step in range(10):
            engine.backward(engine(micro_batches(Case(2, 2), step, engine.global_rank)[0]))
            engine.step()
    return str(caught.value)


def test_training_stops_when_every_step_is_skipped(world):
    for message in world(2).run(poison_for_ever):
        assert message.startswith("3 steps in a row were skipped, the last at step 1: ")
        assert "norm.weight" in message


def accumulate(stage: int, way: str) -> list[torch.Tensor]:
    """One step over two micro-batches, in one of the ways that users have; returns the full gradients."""
    case = Case(stage, 2, 2, samples=8)
    engine = start(case)
    first, second = micro_batches(case, 0, engine.global_rank)
    if way == "engine":
        for tokens in (first, second):
            engine.backward(engine(tokens))
            if tokens is first:
                engine.step()
    elif way == "bare":
        engine(first).backward()
        engine.step()
        engine(second).backward()
    elif way == "scale":
        engine.scale(engine(first)).backward()
        engine.step()
        engine.scale(engine(second)).backward()
    elif way == "no_sync":
        with engine.no_sync():
            engine.backward(engine(first))
        engine.step()
        engine.backward(engine(second))
    elif way == "coalesce":
        engine.set_gradient_accumulation_boundary(True)
        with engine.coalesce_grad_reduction():
            engine.backward(engine(first))
            engine.backward(engine(second))
    elif way == "outside":
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(first) / 2, scale_wrt_gas=False)
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(second) / 2, scale_wrt_gas=False)
    elif way == "twice at the boundary":
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(first))
        engine.backward(engine(second))
    factor = 0.5 if way == "bare" else 1.0
    found = [factor * mizzen.zero.safe_get_full_grad(p) for p in engine.module.parameters()]
    report = engine.step()
    assert report.applied
    values = [mizzen.zero.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [*found, *values, torch.tensor(report.grad_norm)]


STAGES = (0, 1, 2, 3)
WAYS = ["bare", "scale", "no_sync", "coalesce", "outside", "twice at the boundary"]


@pytest.mark.parametrize("stage", choice(STAGES, [3]))
def test_every_way_to_accumulate_gives_the_same_gradient(world, stage):
    ways = [way for way in WAYS if not (stage >= 2 and way == "no_sync")]
    expected, *others = world(2).each(accumulate, [(stage, way) for way in ("engine", *ways)])
    for way, ranks in zip(ways, others, strict=True):
        for rank in ranks:
            for ours, theirs in zip(rank, expected[0], strict=True):
                torch.testing.assert_close(
                    ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda said, way=way: f"{way}: {said}"
                )


def four_models() -> list[list[float]]:
    """Actor, critic, reward in training at different stages, and a frozen reference, in one process."""
    engines = [start(Case(stage, 2)) for stage in (3, 2, 1, 0)]
    frozen, optimizer, *_ = mizzen.initialize(
        model=build(Case()), config={"train_batch_size": 8, "zero_optimization": {"stage": 0}} | QUIET
    )
    assert optimizer is None
    losses = [[] for _ in engines]
    for step in range(3):
        for place, engine in enumerate(engines):
            (tokens,) = micro_batches(Case(0, 2), step, engine.global_rank)
            with torch.no_grad():
                frozen(tokens)
            engine.backward(engine(tokens))
            losses[place].append(engine.step().loss)
    with pytest.raises(UsageError, match="needs an optimizer"):
        frozen.step()
    return losses


def alone(stage: int) -> list[float]:
    engine = start(Case(stage, 2))
    losses = []
    for step in range(3):
        engine.backward(engine(micro_batches(Case(0, 2), step, engine.global_rank)[0]))
        losses.append(engine.step().loss)
    return losses


def test_several_engines_in_one_process_do_not_disturb_each_other(world):
    together = world(2).run(four_models)[0]
    assert together == [ranks[0] for ranks in world(2).each(alone, [(3,), (2,), (1,), (0,)])]


def live_and_die(rounds: int, stage: int) -> tuple[list[int], list[int]]:
    resident, tensors = [], []
    for _ in range(rounds):
        engine = start(Case(stage, 2))
        for step in range(2):
            engine.backward(engine(micro_batches(Case(0, 2), step, engine.global_rank)[0]))
            engine.step()
        engine.destroy()
        del engine
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
        tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    return resident, tensors


@pytest.mark.wide  # test_life.py counts what engines leave behind
@pytest.mark.parametrize("stage", [2, 3])
def test_create_train_destroy_stays_flat(world, stage):
    for resident, tensors in world(2).run(live_and_die, 12, stage, timeout=120):
        # A leak grows with every round; gloo's threads may still hold a tensor or two when one is counted.
        assert min(tensors[-5:]) <= max(tensors[2:6])
        assert resident[-1] - resident[4] < 16 << 20


def after_destroy(stage: int) -> tuple[bool, list[float]]:
    engine = start(Case(stage, 2))
    model = engine.module
    engine.destroy()
    with pytest.raises(UsageError, match="engine that was destroyed"):
        engine.step()
    loss = model(batch(0, 4))
    loss.backward()
    model.embed.weight.data.add_(1)  # own memory: no other parameter changes
    return all(p.grad is not None for p in model.parameters()), [loss.item()]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_module_works_on_its_own_after_destroy(world, stage):
    for has_gradients, losses in world(2).run(after_destroy, stage):
        assert has_gradients
        assert losses[0] == pytest.approx(build(Case())(batch(0, 4)).item())


def moving_average(stage: int) -> tuple[bool, bool]:
    """An EMA loop reads parameters right after step()."""
    engine = start(Case(stage, 2))
    everything = list(engine.module.parameters())
    with mizzen.zero.GatheredParameters(everything):
        old = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(engine(micro_batches(Case(0, 2), 0, engine.global_rank)[0]))
    engine.step()
    with mizzen.zero.GatheredParameters(everything):
        read = [p.detach().clone() for p in engine.module.parameters()]
    masters = [mizzen.zero.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return all(torch.equal(a, b) for a, b in zip(read, masters, strict=True)), any(
        not torch.equal(a, b) for a, b in zip(read, old, strict=True)
    )


def test_a_read_after_step_sees_the_new_value(world):
    assert world(2).each(moving_average, [(stage,) for stage in STAGES]) == [[(True, True)] * 2] * 4


def pieces_by_name(stage: int) -> list[int]:
    """How many pieces are made for one parameter and for all, where both ways give the same."""
    case = Case(stage, 2, variant="frozen")
    engine = start(case)
    (tokens,) = micro_batches(case, 0, engine.global_rank)
    counts = [0, 0]

    def compare(of, states=None) -> None:
        for store in engine.stores:
            every = store.pieces(of, states)
            for name in store.contents.held:
                alone = store.pieces(of, states, name)
                wanted = [piece for piece in every if piece.name == name]
                assert [(each.name, each.boxes) for each in alone] == [(each.name, each.boxes) for each in wanted]
                assert all(torch.equal(one.data, other.data) for one, other in zip(alone, wanted, strict=True))
                counts[0] += len(alone)
            counts[1] += len(every)

    engine.backward(engine(tokens))
    compare("gradient")
    engine.step()
    compare("master")
    compare("exp_avg", engine.basic_optimizer.state)
    return counts


def test_what_is_read_of_one_parameter_is_what_all_have_of_it(world):
    for ranks in world(2).each(pieces_by_name, [(stage,) for stage in STAGES]):
        for alone, every in ranks:
            assert alone == every > 20


def saved_size() -> int:
    engine = start(Case(1, 2))
    stream = io.BytesIO()
    torch.save(engine.module.norm.weight, stream)
    return len(stream.getvalue())


def test_saving_one_parameter_does_not_write_the_buffer(world):
    assert all(size < 3000 for size in world(2).run(saved_size))


def uneven() -> tuple[int, list[int]]:
    """Ranks with different amounts of data stop together."""
    engine = start(Case(2, 2, 2, samples=8))
    count = 5 if engine.global_rank == 0 else 8
    source = iter([batch(index, 2) for index in range(count)])
    steps = 0
    with pytest.raises(StopIteration):
        while True:
            engine.train_batch(source)
            steps += 1
    return steps, [engine.global_steps, engine.micro_steps]


def test_uneven_data_ends_on_all_ranks_together(world):
    assert world(2).run(uneven) == [(2, [2, 4]), (2, [2, 4])]


class Counted(nn.Module):
    """Returns the sum and the count of its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, rows):
        return (self.layer(rows) ** 2).sum(), rows.shape[0]


def ragged(world_size: int) -> tuple[torch.Tensor, float]:
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4 // (2 * world_size), "gradient_clipping": 0}
    engine, *_ = mizzen.initialize(
        model=Counted(), config=config | QUIET | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    rows = torch.arange(40.0).view(10, 4) / 40
    cuts = [rows[:1], rows[1:4], rows[4:9], rows[9:]]
    mine = cuts[engine.global_rank :: world_size]
    engine.set_train_batch_size(engine.batch.micro * engine.batch.dp * len(mine))
    report = engine.train_batch(iter([(cut,) for cut in mine]))
    return engine.module.layer.weight.detach(), report.loss


def test_counted_losses_are_normalised_by_the_count_of_all_ranks(world):
    model = Counted()
    total, _ = model(torch.arange(40.0).view(10, 4) / 40)
    (total / 10).backward()
    expected = model.layer.weight - 0.1 * model.layer.weight.grad
    for size in (1, 2):
        for weight, loss in world(size).run(ragged, size):
            torch.testing.assert_close(weight, expected.detach())
            assert loss == pytest.approx(float(total / 10))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def forward(self, inputs):
        return self.layer(nn.functional.dropout(inputs, 0.5)).mean()


def drawn(stream, seed):
    """The loss of a forward with dropout after torch itself was seeded, and what torch draws next."""
    torch.manual_seed(0)
    model = Dropping()
    config = {"train_micro_batch_size_per_gpu": 2, "progress": {"enabled": False}, "dropout_stream": stream}
    engine = mizzen.initialize(model=model, config=config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]
    torch.manual_seed(seed)
    return engine(torch.ones(2, 64)).item(), torch.rand(()).item()


def test_dropout_can_draw_from_torchs_own_stream(world):
    """As under DDP: the script's seed decides, on every rank."""
    torch.manual_seed(0)
    model = Dropping()
    torch.manual_seed(5)
    expected = model(torch.ones(2, 64)).item(), torch.rand(()).item()
    assert world(2).run(drawn, "torch", 5) == [expected, expected]
    first, second = world(2).run(drawn, "engine", 5)
    assert first[0] != second[0], "a stream for each rank"
    torch.manual_seed(5)
    assert first[1] == second[1] == torch.rand(()).item(), "and torch's is left alone"
