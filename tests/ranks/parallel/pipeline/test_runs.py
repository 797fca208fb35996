"""What a user does with a pipelined engine beside training: evaluation, changing shapes, checkpoints, wrong calls."""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import mizzen
import mizzen.comm as comm
import mizzen.pipe as pipe
from breadth import choice, chosen
from mizzen.config.load import load as load_config
from mizzen.errors import CommError, PlanError, UsageError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.pipeline import profile
from mizzen.parallel.pipeline import split as split_module
from mizzen.parallel.pipeline.schedule import peak_activations
from mizzen.parallel.pipeline.split import SplitBackward
from mizzen.parallel.pipeline.tables import make_schedule
from mizzen.plan.build import build
from parity import pipelines
from parity.decoders import Decoder


def start(stages=2, stage=0, schedule="1f1b", micros=4, **more):
    engine, *_ = mizzen.initialize(
        model=pipelines.build(stages), config=pipelines.config(stage, schedule, micros, **more)
    )
    return engine


def evaluate(stages):
    engine = start(stages)
    data = [(inputs, labels) for step in range(2) for inputs, labels in pipelines.batches(engine, step)]
    loss, logits = engine.eval_batch(iter(data), return_logits=True, num_micro_batches=3)
    alone = engine.eval_batch(iter(data), reduce_output=None, num_micro_batches=3)
    outputs = engine.eval_batch(iter(data), compute_loss=False, num_micro_batches=2)
    assert engine.module.training
    return loss.item(), logits, alone, outputs, engine.is_first_stage(), engine.is_last_stage()


def test_an_evaluation_gives_the_loss_on_every_rank_and_outputs_on_the_last_stage(world):
    expected, logits, each, outputs, *_ = world(1).run(evaluate, 1)[0]
    assert sum(each).item() / 3 == pytest.approx(expected)
    first, last = world(2).run(evaluate, 2)
    assert first[0] == pytest.approx(expected, rel=1e-6) and last[0] == first[0]
    assert first[1:] == (None, None, None, True, False) and last[4:] == (False, True)
    torch.testing.assert_close(last[1], logits)
    torch.testing.assert_close(last[2], each)
    torch.testing.assert_close(last[3], outputs)


def shapes():
    """Micro-batches of other lengths, in the middle of a batch and from batch to batch."""
    engine, losses = start(micros=3), []
    generator = torch.Generator().manual_seed(1)
    for lengths in ((6, 6, 6), (6, 3, 4), (4, 9, 9)):
        tokens = [torch.randint(0, pipelines.VOCABULARY, (8, length + 1), generator=generator) for length in lengths]
        losses.append(engine.train_batch(iter([(each[:, :-1], each[:, 1:]) for each in tokens])).loss)
    return losses


def plain_shapes():
    model = pipelines.build(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(1)
    for lengths in ((6, 6, 6), (6, 3, 4), (4, 9, 9)):
        optimizer.zero_grad()
        tokens = [torch.randint(0, pipelines.VOCABULARY, (8, length + 1), generator=generator) for length in lengths]
        found = [pipelines.loss_of(model(each[:, :-1]), each[:, 1:]) / 3 for each in tokens]
        sum(found).backward()
        optimizer.step()
        losses.append(sum(found).item())
    return losses


def test_shapes_may_change_from_micro_batch_to_micro_batch(world):
    expected = world(1).run(plain_shapes)[0]
    for losses in world(2).run(shapes):
        assert losses == pytest.approx(expected, rel=1e-5)


def misuse():
    engine = start(4)
    found = {}
    calls = {
        "forward": lambda: engine(torch.zeros(1, 2, dtype=torch.long)),
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "step": engine.step,
    }
    for name, call in calls.items():
        with pytest.raises(UsageError) as caught:
            call()
        found[name] = str(caught.value)
    micros = pipelines.batches(engine, 0)
    reads = []

    def source():
        for micro in micros:
            reads.append(1)
            yield {"x": micro[0], "y": micro[1]}

    engine.set_batch_fn(lambda each: (each["x"], each["y"]))
    engine.set_dataiterator(source())
    return found, engine.train_batch().loss, len(reads)


def test_an_open_loop_is_told_what_to_call_and_only_the_ends_read_data(world):
    outcomes = world(4).run(misuse)
    for found, loss, _ in outcomes:
        for name, said in found.items():
            assert said.startswith(f"{name}() on a pipeline") and "engine.train_batch(data_iter)" in said
        assert loss == outcomes[0][1]
    assert [reads for _, _, reads in outcomes] == [4, 0, 0, 4]


def save(folder, stages, schedule, stage):
    engine = start(stages, stage, schedule, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    for step in range(2):
        engine.train_batch(iter(pipelines.batches(engine, step)))
    assert engine.save_checkpoint(folder)
    return pipelines.values(engine), engine.train_batch(iter(pipelines.batches(engine, 2))).loss


def load(folder, stages, schedule, stage):
    engine = start(stages, stage, schedule, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    return pipelines.values(engine), engine.train_batch(iter(pipelines.batches(engine, 2))).loss


@pytest.mark.in_parts
def test_a_checkpoint_moves_between_any_stages_to_the_bit(world, tmp_path):
    expected, losses = {}, []
    for values, loss in world(4).run(save, str(tmp_path), 2, "interleaved", 1):
        expected |= values
        losses.append(loss)
    layouts = [(4, 4, "1f1b", 0), (1, 1, "1f1b", 0), (2, 2, "zbv", 0)]
    for ranks, stages, schedule, stage in chosen(layouts, layouts[1:]):
        seen = set()
        for values, loss in world(ranks).run(load, str(tmp_path), stages, schedule, stage):
            losses.append(loss)
            seen |= set(values)
            assert all(torch.equal(value, expected[name]) for name, value in values.items())
        assert seen == set(expected)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def not_a_number(name):
    engine = start(2, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    before = pipelines.values(engine)
    if name in before:
        engine.module.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan)
    report = engine.train_batch(iter(pipelines.batches(engine, 0)))
    same = all(torch.equal(value, before[name]) for name, value in pipelines.values(engine).items())
    return report.applied, report.reason, same


@pytest.mark.parametrize(("stage", "name"), [(0, "1.up.bias"), (1, "8.weight")])
def test_a_gradient_that_is_not_finite_on_one_stage_is_named_on_all(world, stage, name):
    for applied, reason, same in world(2).run(not_a_number, name):
        assert not applied and same
        assert f"gradient not finite on rank {stage} (stage {stage} of 2): {name}" in reason


class Fails(torch.nn.Module):
    """Meets its fate at the third micro-batch."""

    fate = ""
    calls = 0

    def forward(self, inputs):
        Fails.calls += 1
        if Fails.calls == 3 and Fails.fate == "raise":
            raise ArithmeticError("layer 3 has had enough")
        if Fails.calls == 3 and Fails.fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if Fails.calls == 3 and Fails.fate == "hang":
            time.sleep(20)
        return inputs


def meet(fate, culprit):
    comm.set_patience(look=0.5, beat=0.2, silence=30, timeout=60)
    engine = start(3, micros=6)
    comm.set_patience(timeout=6 if fate == "hang" else 60)
    Fails.fate = fate if comm.get_rank() == culprit else ""
    engine.module.register_forward_pre_hook(lambda _, inputs: (Fails()(inputs[0]),))
    engine.train_batch(iter(pipelines.batches(engine, 0)))


FATES = {
    "raise": "ArithmeticError: layer 3 has had enough",
    "kill": "rank {0} (stage {0} of 3) was killed or has crashed",
    "hang": "1 of 1 peers have not come: rank {0} (stage {0} of 3, ",
}


@pytest.mark.parametrize(
    ("fate", "culprit"), choice([(fate, rank) for fate in FATES for rank in range(3)], [("raise", 1), ("kill", 2)])
)
def test_a_stage_that_is_gone_ends_all_and_is_named(world, fate, culprit):
    outcomes = world(3).run(meet, fate, culprit, expect_failure=True, grace=40)
    others = [outcome for outcome in outcomes if outcome.rank != culprit]
    assert all(outcome.error_type == CommError.__name__ for outcome in others), [each.traceback for each in others]
    said = FATES[fate].format(culprit)
    if culprit == 0 and fate == "kill":
        said = "rank 0"  # with it goes what the ranks know of each other
    assert any(said in outcome.traceback for outcome in outcomes), [each.traceback for each in outcomes]


def counted_calls(function, counts):
    def counting(*args):
        counts.append(1)
        return function(*args)

    return counting


def gathers(live):
    """How often units are gathered in evaluations of two and of six micro-batches, and in a step of four."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": live}
    engine, counts, found = start(2, zero_optimization=zero), [], []
    units = [unit for store in engine.stores if len(store.contents.units) > 1 for unit in store.units]
    for unit in units:
        unit.gather_rows = counted_calls(unit.gather_rows, counts)
    micros = pipelines.batches(engine, 0)
    for count in (2, 6):
        engine.eval_batch(iter((micros * 2)[:count]), num_micro_batches=count)
        found.append(len(counts))
    engine.train_batch(iter(micros))
    found.append(len(counts))
    return found, sum(bool(unit.parameters) for unit in units), any(unit.is_gathered for unit in units)


def test_stage_3_is_gathered_once_for_a_batch_where_it_fits(world):
    fitting, others = world(4).each(gathers, [(10**9,), (0,)])
    for counts, units, is_gathered in fitting:
        assert counts == [units, 2 * units, 3 * units] and not is_gathered
    for counts, units, is_gathered in others:
        few, all_evaluations, everything = counts
        assert (few, all_evaluations) == (2 * units, 8 * units) and not is_gathered
        assert everything - all_evaluations > 4 * units  # for forwards, and for most of the backwards


def test_the_plan_says_what_both_ways_of_stage_3_cost():
    said = {}
    for live in (0, 10**9):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": live}
        config = {**pipelines.config(), "zero_optimization": zero, "pipeline_parallel_size": 2}
        plan = build(load_config(config), 4, Sketch.of(pipelines.build(None, blocks=12)), ORDER)
        said[live] = str(plan.steps[-1]), plan.cost.parameters
    assert "; gathered for each micro-batch: " in said[0][0] and "(stage3_max_live_parameters 0)" in said[0][0]
    assert "; gathered once for a batch: " in said[10**9][0]
    assert said[10**9][1] > said[0][1]


def plan_of(**more):
    comm.barrier()  # all have joined: none of them waits for another after this
    start(2, **more)


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ({"schedule": "2f2b"}, "pipeline.schedule: '2f2b' is unknown"),
        ({"schedule": ["0F0 0B0"]}, "pipeline.schedule has 1 row for pipeline_parallel_size 2"),
        ({"virtual_stages": 3}, "pipeline.virtual_stages is 3, but schedule '1f1b'"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(world, pipeline, said):
    outcomes = world(2).run(plan_of, pipeline=pipeline, expect_failure=True)
    first = outcomes[0]  # the others may be told that it is gone before they have looked at the plan themselves
    assert first.error_type == PlanError.__name__ and said in first.traceback


def own_table():
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    engine = start(2, micros=2, pipeline={"schedule": rows})
    return engine.train_batch(iter(pipelines.batches(engine, 0))).loss


def test_a_table_of_ones_own_is_run(world):
    assert world(2).run(own_table) == pytest.approx([world(1).run(pipelines.train, 1, 0, "1f1b", 2, 1)[0][0][0]] * 2)


class Recomputed(torch.nn.Module):
    """A block that computes its activations again in each backward, and counts its calls."""

    calls = 0

    def __init__(self, use_reentrant):
        super().__init__()
        self.block, self.use_reentrant = torch.nn.Linear(4, 4), use_reentrant

    def forward(self, inputs):
        def call(hidden):
            Recomputed.calls += 1
            return self.block(hidden).tanh()

        return checkpoint(call, inputs, use_reentrant=self.use_reentrant)


MADE = {
    "plain": lambda: torch.nn.Linear(4, 4),
    "recomputed": lambda: Recomputed(use_reentrant=False),
    "re-entrant": lambda: Recomputed(use_reentrant=True),
    "compiled": lambda: torch.compile(torch.nn.Linear(4, 4), backend="aot_eager"),
}


def halved(schedule, kind):
    """Losses, watched backwards; of the last step calls of recomputed blocks for a micro-batch, backwards in halves."""
    watched, register = [], torch_module.register_module_forward_pre_hook
    split_module.register_module_forward_pre_hook = lambda hook: watched.append(hook) or register(hook)
    split, halves = SplitBackward.inputs, []
    SplitBackward.inputs = lambda each: halves.append(split(each)) or halves[-1]
    torch.manual_seed(1)
    model = pipe.PipelineModule(
        [torch.nn.Linear(4, 4), *(MADE[kind]() for _ in range(5))],
        num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform",
    )  # fmt: skip
    engine, *_ = mizzen.initialize(model=model, config=pipelines.config(0, schedule))
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(3):
        Recomputed.calls = 0
        halves.clear()
        batch = [tuple(torch.randn(2, 6, 4, generator=generator)) for _ in range(4)]
        losses.append(engine.train_batch(iter(batch)).loss)
    return losses, len(watched), Recomputed.calls / 4, sum(halves)


@pytest.mark.parametrize("kind", choice(MADE, ("plain", "recomputed")))
def test_what_is_computed_again_or_is_compiled_is_not_halved(world, kind):
    """A table of ones own has whole backwards: as many calls, and the same losses."""
    rows = ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    found = world(2).each(halved, [(rows, kind), ("1f1b", kind), ("zero_bubble", kind)])
    for (losses, *first), (again, *second) in found:
        assert losses == again == found[0][0][0]
        assert (first[1], second[1]) == ((4, 6) if kind in ("recomputed", "re-entrant") else (0, 0))
        assert first[2] == 0
    assert [(first[1], second[1]) for first, second in found] == [(0, 0), (0, 1), (1, 1)]
    assert [second[3] for _, second in found] == ([0, 1, 4] if kind == "plain" else [0, 0, 0])


class Ticks(torch.nn.Linear):
    """A layer that takes as many seconds as it says, by the clock of `profiled`."""

    now = 0.0

    def __init__(self, seconds):
        super().__init__(4, 4)
        self.seconds = seconds * (1 + comm.get_rank())  # the slower rank counts

    def forward(self, inputs):
        Ticks.now += self.seconds
        return super().forward(inputs)


def profiled(times, example):
    comm.barrier()  # as above
    profile.perf_counter = lambda: Ticks.now
    model = pipe.PipelineModule(
        [*(pipe.LayerSpec(Ticks, each) for each in times), torch.nn.ReLU(inplace=True)],
        num_stages=2,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="profile",
        example_inputs=torch.ones(2, 4) if example else None,
    )
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progress": {"enabled": False},
    }
    before = torch.random.get_rng_state()
    engine, *_ = mizzen.initialize(model=model, config=config)
    drew = not torch.equal(before, torch.random.get_rng_state())
    loss = engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))])).loss
    return model.layer_list.weights, list(model.bounds), drew, loss


def test_layers_are_cut_by_what_they_take_on_the_slowest_rank(world):
    times = [1.0, 1.0, 1.0, 1.0, 4.0]
    first, second = world(2).run(profiled, times, True)
    assert first == second
    weights, bounds, drew, _ = first
    assert weights == (2.0, 2.0, 2.0, 2.0, 8.0, 0.0) and bounds == [0, 4, 6] and not drew


def test_a_plan_says_whether_layers_are_measured():
    layers = [pipe.LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    model = pipe.PipelineModule(layers, partition_method="profile")
    config = load_config({"train_batch_size": 2, "pipeline_parallel_size": 2})
    assert "; cut by parameters until layers are measured" in str(build(config, 2, Sketch.of(model), ORDER).steps[0])
    model.layer_list = replace(model.layer_list, weights=(0.001, 0.001, 0.001, 0.003))
    said = str(build(config, 2, Sketch.of(model), ORDER).steps[0])
    assert "2 stages of 3+1 layers" in said and "; measured for a micro-batch: 3+3 ms" in said


class TickingBlock(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.inner = Ticks(seconds)

    def forward(self, inputs):
        return inputs + self.inner(inputs)


class TickingModel(torch.nn.Module):
    """Blocks that are cut by the configuration; it is called with what no list of layers says."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(4, 4)
        self.blocks, self.last = torch.nn.ModuleList(map(TickingBlock, times)), torch.nn.Linear(4, 1)

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden).square().mean()


def profiled_blocks(times, partition):
    profile.perf_counter = lambda: Ticks.now
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline_parallel_size": 2,
        "pipeline": {"partition": partition, "profile_length": 3},
        "progress": {"enabled": False},
    }
    model = TickingModel(times)
    alone = float(model(torch.ones(1, 3, 4)))
    engine, *_ = mizzen.initialize(model=model, config=config)
    held = [number for number, block in enumerate(engine.module.blocks) if isinstance(block, TickingBlock)]
    return held, engine.train_batch(iter([torch.ones(1, 3, 4)] * 2)).loss, alone


def test_blocks_of_any_model_are_cut_by_what_they_take(world):
    cases = [([1.0, 1.0, 1.0, 1.0, 4.0], partition) for partition in ("profile", "uniform", "parameters", "type:tick")]
    measured, *others = world(2).each(profiled_blocks, cases)
    assert [held for held, *_ in measured] == [[0, 1, 2, 3], [4]]
    assert all([held for held, *_ in other] == [[0, 1, 2], [3, 4]] for other in others)
    assert all(loss == pytest.approx(alone, rel=1e-5) for ranks in (measured, *others) for _, loss, alone in ranks)


def test_a_plan_says_whether_blocks_are_measured():
    keys = {"train_batch_size": 2, "pipeline_parallel_size": 2, "pipeline": {"partition": "profile"}}
    config, sketch = load_config(keys), Sketch.of(Decoder(blocks=4))
    assert "; cut by parameters until blocks are measured" in str(build(config, 2, sketch, ORDER).steps[0])
    seconds = {f"blocks.{number}": 0.001 * (1 + number // 3) for number in range(4)} | {"head": 0.001, "embed": 0.001}
    said = str(build(config, 2, replace(sketch, seconds=tuple(seconds.items())), ORDER).steps[0])
    assert "2 stages of 3+1 blocks" in said and "; measured for a micro-batch: 4+3 ms" in said
    with pytest.raises(PlanError, match="partition_method 'even' is unknown"):
        build(load_config(keys | {"pipeline": {"partition": "even"}}), 2, sketch, ORDER)


class Unguessed(TickingModel):
    def forward(self, inputs, scale):
        return super().forward(inputs) * scale


def refused_profile():
    comm.barrier()  # as above
    config = {"train_batch_size": 2, "pipeline_parallel_size": 2, "pipeline": {"partition": "profile"}}
    mizzen.initialize(model=Unguessed([1.0, 1.0]), config=config)


def test_a_model_that_made_tokens_do_not_fit_is_not_measured(world):
    for outcome in world(2).run(refused_profile, expect_failure=True):
        assert "Unguessed does not run on made tokens (TypeError" in outcome.traceback


def test_a_profile_without_inputs_says_what_is_needed(world):
    outcomes = world(2).run(profiled, [1.0, 1.0], False, expect_failure=True)
    assert "give PipelineModule(example_inputs=...) what the first layer takes" in outcomes[0].traceback


class Saved:
    """A tensor that autograd has saved, alive for as long as it is."""

    alive: ClassVar[Counter] = Counter()

    def __init__(self, call, tensor):
        self.call, self.tensor = call, tensor
        Saved.alive[call] += 1

    def __del__(self):
        Saved.alive[self.call] -= 1


def live_activations(schedule, micros):
    """The most calls of this stage's chunks of which autograd has something saved at one time."""
    layers = [pipe.LayerSpec(torch.nn.Linear, 4, 4) for _ in range(8)]
    model = pipe.PipelineModule(layers, num_stages=4, loss_fn=lambda output, _: output.square().mean())
    config = pipelines.config(0, schedule, micros, train_batch_size=2 * micros)
    engine, *_ = mizzen.initialize(model=model, config=config)
    calls, most = [0], [0]

    def begin(*_):
        calls[0] += 1

    def pack(tensor):
        saved = Saved(calls[0], tensor)
        most[0] = max(most[0], sum(count > 0 for count in Saved.alive.values()))
        return saved

    for part in engine.runner.parts.values():
        part.module.register_forward_pre_hook(begin)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * micros))
    return most[0], sum(Saved.alive.values())


@pytest.mark.parametrize(("schedule", "micros"), [("1f1b", 6), ("interleaved", 8)])
def test_as_many_activations_live_at_once_as_the_table_says(world, schedule, micros):
    outcomes = world(4).run(live_activations, schedule, micros)
    assert tuple(most for most, _ in outcomes) == peak_activations(make_schedule(schedule, 4, micros))
    assert [left for _, left in outcomes] == [0] * 4


def sums_before_the_first_backward():
    """What the parameters of a stage have as `grad` once a backward is announced, and what after a step."""
    engine = start()
    store = engine.stores[0]
    store.begin_backward(False)
    gradients = [parameter.grad for parameter in store.contents.trained.values()]
    are_zeros = all(gradient is not None and not gradient.any() for gradient in gradients)
    engine.zero_grad()
    engine.train_batch(iter(pipelines.batches(engine, 0)))
    return are_zeros, all(parameter.grad is None for parameter in store.contents.trained.values())


def test_a_stage_zeroes_its_sums_before_it_waits_for_gradients(world):
    assert world(2).run(sums_before_the_first_backward) == [(True, True)] * 2
