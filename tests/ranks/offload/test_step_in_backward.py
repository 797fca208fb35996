"""The host's step during backward gives the bits of a step after it, and one that is not taken leaves no trace."""

import copy
import gc
import math
import mmap
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

import mizzen
from behind import use_behind
from breadth import choice, chosen
from mizzen.engine.streamed_share import StreamedShare
from mizzen.offload import tier
from mizzen.offload.backward_copies import BackwardCopies
from ranks.offload.test_step import HELD, left_of, places, start, train

CPU = {"device": "cpu"}
EARLY = {"step_in_backward": True}
HALF = EARLY | {"device_bytes": 0, "streamed_ratio": 0.5}
FREE, TIGHT, EDGE = {"gradient_clipping": 0.0}, {"gradient_clipping": 0.02}, {"gradient_clipping": 0.13}


def both(case, keys, *, steps=12):
    """A run without offload and one whose host steps early: what differs, what was told, and lots by their fate."""
    stage, dtype, rule, accumulation, offload, budgets = case
    expected = start(stage, dtype, rule, accumulation, **keys)
    told, left = train(expected, dtype, accumulation, steps=steps), left_of(expected)
    expected.destroy()
    use_behind()
    engine = start(stage, dtype, rule, accumulation, offload, budgets, **keys)
    rests, fates, step = places(engine), [], engine.updater.offloaded.step

    def noted(*given):
        step(*given)
        found = engine.updater.offloaded._measures
        fates.append((int(found["offload_lots_taken"]), int(found["offload_lots_repeated"])))

    engine.updater.offloaded.step = noted
    assert train(engine, dtype, accumulation, steps=steps) == told
    found = left_of(engine)
    different = [name for name in left if not torch.equal(found[name], left[name])]
    engine.destroy()
    assert not mizzen.accelerator.get_accelerator().locked
    return rests, different, told, fates


CASES = {
    "0 fp32": ((0, "fp32", "AdamW", 1, CPU, EARLY), FREE),
    "0 bf16 clipped": ((0, "bf16", "AdamW", 2, CPU, EARLY), TIGHT),
    "1 bf16 sometimes clipped": ((1, "bf16", "AdamW", 2, CPU, EARLY), EDGE),
    "1 fp16 half streamed": ((1, "fp16", "AdamW", 1, CPU, HALF), FREE),
    "2 fp16": ((2, "fp16", "AdamW", 2, CPU | {"super_offload": True}, None), FREE),
    "2 fp32 ratio": ((2, "fp32", "Lion", 1, CPU | {"super_offload": True, "ratio": 0.5}, None), EDGE),
    "2 bf16 Adagrad": ((2, "bf16", "Adagrad", 1, CPU, EARLY), FREE),
    "3 fp32": ((3, "fp32", "AdamW", 1, CPU, EARLY), FREE),
    "3 bf16 sometimes clipped": ((3, "bf16", "AdamW", 2, CPU, EARLY), EDGE),
    "3 fp16 half streamed": ((3, "fp16", "AdamW", 2, CPU, HALF), FREE),
    "3 bf16 budget": ((3, "bf16", "SGD", 1, None, EARLY | {"device_bytes": 300, "streamed_ratio": 0}), FREE),
}
SHORT = ("1 bf16 sometimes clipped", "3 fp16 half streamed")


@pytest.mark.parametrize("name", choice(CASES, SHORT))
def test_bits_do_not_depend_on_when_the_host_steps(world, name):
    for rests, different, told, fates in world(2).run(both, *CASES[name]):
        assert "host" in rests
        assert different == []
        assert not all(applied for applied, *_ in told)
        assert sum(applied for applied, *_ in told) == len(fates)
        taken, repeated = (sum(each) for each in zip(*fates, strict=True))
        assert CASES[name][1] is FREE or repeated > 0
        on_host = rests.count("host") if "half" not in name else None
        assert fates[0] == (0, 0)  # there are no states before
        assert (taken > 0) == (CASES[name][1] is not TIGHT)
        if CASES[name][1] is FREE and on_host:
            assert max(each for each, _ in fates) == on_host


def skipped(stage, dtype, offload_states):
    """What a step leaves that is not taken although the host has stepped: nothing, and who looks meanwhile sees it."""
    use_behind()
    engine = start(stage, dtype, "AdamW", 1, CPU, EARLY, **FREE)
    armed = {"on": False}
    engine.module.layers[1].weight.register_hook(lambda g: g * math.nan if armed["on"] else g)
    begun, begin = [], BackwardCopies.begin
    BackwardCopies.begin = lambda copies, arrival: (begin(copies, arrival), begun.append(copies.result() is not None))
    found, before = [], {}
    for number in range(5):
        armed["on"] = number == 3
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(inputs.to(HELD.get(dtype, torch.bfloat16))))
        if offload_states:
            engine.offload_states()
            engine.reload_states()
        between = left_of(engine) if number else before
        applied = engine.step().applied
        after = left_of(engine)
        found.append((applied, same(before, between), same(before, after), sum(begun)))
        begun.clear()
        before = after
    BackwardCopies.begin = begin
    engine.destroy()
    return found


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    choice([(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp32")], [(3, "bf16")]),
)
@pytest.mark.parametrize("offload_states", choice([False, True], [True]), ids=["stays", "leaves"])
def test_a_step_that_is_skipped_changes_nothing(world, stage, dtype, offload_states):
    for found in world(2).run(skipped, stage, dtype, offload_states):
        last = found[3:]
        assert [applied for applied, *_ in last] == [False, True]
        assert [unchanged for *_, unchanged, _ in last] == [True, False]
        assert all(between for _, between, *_ in found[1:])  # states come with the first step
        assert all(begun > 0 for *_, begun in found[1:])


def change(engine, kind, inputs, older):
    """What somebody does between backward and step."""
    weight, half = engine.module.layers[2].weight, torch.full((8, 8), 0.5)
    if kind == "rate":
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.3
    elif kind == "gradient":
        mizzen.zero.safe_set_full_grad(weight, half)
    elif kind == "master":
        mizzen.zero.safe_set_full_fp32_param(weight, half)
    elif kind in ("state", "loaded before"):
        mizzen.zero.safe_set_full_optimizer_state(weight, half, "exp_avg_sq")
    elif kind == "loaded":
        engine.optimizer.load_state_dict(older)
    elif kind == "count":
        for state in engine.optimizer.state.values():
            state["step"].fill_(9.0)
    elif kind == "values" and engine.settings.zero_optimization.stage < 3:
        weight.data.mul_(3)
    elif kind == "zero_grad":
        engine.zero_grad()
        engine.backward(engine(inputs * 2))


def changed(stage, kind):
    """Somebody changes, between backward and step, what the host has stepped with."""
    left, older = [], None
    for is_early in (False, True):
        use_behind()
        engine = start(stage, "fp32", "AdamW", 1, CPU, EARLY if is_early else None, **FREE, scheduler=None)
        for number in range(4):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number + 10 * engine.global_rank))
            if number == 2 and kind == "loaded before":
                engine.optimizer.load_state_dict(older)
            engine.backward(engine(inputs))
            if number == 2:
                change(engine, kind, inputs, older)
            report = engine.step()
            older = copy.deepcopy(engine.optimizer.state_dict()) if number == 0 else older
        left.append(left_of(engine))
        taken = report.measures.get("offload_lots_taken", 0)
        engine.destroy()
    return same(*left), taken


CHANGES = {
    0: ("rate", "values", "zero_grad", "state", "loaded before"),
    2: ("gradient", "loaded", "count"),
    3: ("master",),
}
"""By the stage at which the short choice has them."""


@pytest.mark.in_parts
@pytest.mark.parametrize("stage", CHANGES)
def test_what_somebody_changes_before_the_step_counts(world, stage):
    kinds = chosen([kind for some in CHANGES.values() for kind in some], CHANGES[stage])
    for kind, ranks in zip(kinds, world(2).each(changed, [(stage, kind) for kind in kinds]), strict=True):
        for is_same, taken in ranks:
            assert is_same, kind
            assert taken > 0, kind


def counted_loss(loss, count):
    return loss * count, count


def counted(stage):
    """Some losses come as (sum, count), whose factor only the vote knows: what differs, and lots by their fate."""
    left, fates = [], []
    for is_early in (False, True):
        use_behind()
        engine = start(stage, "bf16", "AdamW", 1, CPU, EARLY if is_early else None, **FREE)
        for number in range(6):
            seed = torch.Generator().manual_seed(number + 10 * engine.global_rank)
            batch = torch.randn(2, 8, generator=seed).bfloat16(), torch.tensor(3.0)
            is_counted = number in (2, 3)
            report = engine.train_batch(iter([batch]), counted_loss if is_counted else lambda loss, count: loss)
            fates.append(tuple(report.measures.get(f"offload_lots_{fate}") for fate in ("taken", "repeated")))
        left.append(left_of(engine))
        lots = places(engine).count("host")
        engine.destroy()
    return same(*left), fates[6:], lots


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_losses_with_counts_are_stepped_once_their_sum_is_known(world, stage):
    for is_same, fates, lots in world(2).run(counted, stage):
        assert is_same
        assert fates == [(0, 0), (lots, 0), (0, lots), (0, 0), (0, 0), (lots, 0)]


def saved_beside(stage, folder):
    """Checkpoints that are written beside training have the values of their step."""
    use_behind()
    engine = start(stage, "bf16", "AdamW", 1, CPU, EARLY, **FREE, checkpoint={"async_save": True, "dir": folder})
    states, taken = {}, 0
    for number in range(4):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        engine.backward(engine(inputs))
        taken += engine.step().measures["offload_lots_taken"]
        if number % 2:
            states[number] = left_of(engine)
        engine.save_checkpoint(folder, tag=f"t{number}")
    engine.destroy()
    found = []
    for number, expected in states.items():
        other = start(stage, "bf16", "AdamW", 1, CPU, EARLY, **FREE)
        other.load_checkpoint(folder, tag=f"t{number}")
        found.append(same(left_of(other), expected))
        other.destroy()
    return found, taken


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_a_save_beside_training_has_the_values_of_its_step(world, tmp_path, stage):
    for found, taken in world(2).run(saved_beside, stage, str(tmp_path)):
        assert all(found)
        assert taken > 0


def measured():
    """The share that is measured would be everything: lots that pass through the device, and those stepped early."""
    use_behind().has_streams = True
    StreamedShare.at_start = lambda *_: 1.0
    StreamedShare.after_step = lambda *_, **__: 1.0
    engine = start(1, "bf16", "AdamW", 1, CPU, EARLY, **FREE)
    taken = []
    for number in range(9):  # the share is looked at in the third, the fifth and the seventh
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        engine.backward(engine(inputs))
        taken.append(engine.step().measures["offload_lots_taken"])
    streamed = sum(not lot.rest.is_stepped_on_host for store in engine.stores for lot in store.contents.lots)
    lots = places(engine).count("host")
    engine.destroy()
    return streamed, taken, lots


def test_nothing_passes_through_the_device_unless_a_share_is_given(world):
    for streamed, taken, lots in world(2).run(measured):
        assert streamed == 0
        assert taken == [0, *[lots] * 8]


def count_mappings():
    """Host memory that was made from now on, and that somebody still has."""

    class Counted(mmap.mmap):
        alive = WeakSet()

        def __new__(cls, *given):
            found = super().__new__(cls, *given)
            cls.alive.add(found)
            return found

    tier.mmap = SimpleNamespace(**vars(mmap) | {"mmap": Counted})
    return Counted.alive


def given_back(stage, budgets, parameters):
    """The host memory that is there before destroy(), and after it while no garbage is collected."""
    use_behind()
    alive = count_mappings()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "offload_optimizer": CPU}
    keys = {"zero_optimization": zero | ({"offload_param": CPU} if parameters else {})}
    engine = start(stage, "bf16", "AdamW", 1, CPU, budgets, **keys)
    for number in range(3):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        engine.backward(engine(inputs))
        engine.step()
    gc.collect()
    gc.disable()
    before = len(alive)
    engine.destroy()
    return before, len(alive)


@pytest.mark.parametrize("budgets", [None, EARLY], ids=["after", "during"])
@pytest.mark.parametrize(
    ("stage", "parameters"), [(1, False), (3, False), (3, True)], ids=["1", "3", "3 with parameters"]
)
def test_host_memory_is_free_when_an_engine_is_destroyed(world, stage, parameters, budgets):
    """The engine may still be there, and nobody waits for the collector of garbage."""
    for before, after in world(2).run(given_back, stage, budgets, parameters):
        assert before > 5
        assert after == 0
