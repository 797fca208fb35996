"""Important columns are stepped at once and the others late, as the section says; nothing of a gradient is lost."""

import gc
import math
import time
from itertools import cycle, product

import pytest
import torch

import mizzen
from behind import use_behind
from breadth import FULL, choice, together
from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.offload.tier import HostTier
from mizzen.offload.zenflow import LateUpdates, OnHostLate
from ranks.offload.test_step import Model, left_of, start, train
from ranks.offload.test_step_in_backward import count_mappings

HOST = {"device": "cpu"}
LATE = {"topk_ratio": 0.25, "select_strategy": "step", "select_interval": 8, "update_interval": 4}
FREE = {"gradient_clipping": 0.0}
RATE, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.999), 1e-8


def inputs_of(number, rank=0):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * number + rank))


# What the section means, by itself: one process, plain tensors, one element after the other


class Expected:
    """ZenFlow over the parameters of a model: masters and states as they are after each step."""

    def __init__(self, ratio, interval, select, warm_up=0, *, overlap=False, auto=None):
        self.ratio, self.interval, self.select, self.warm_up = ratio, interval, select, warm_up
        self.overlap, self.auto = overlap, auto
        self.model = Model()
        self.masters = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        zeros = {name: torch.zeros_like(each) for name, each in self.masters.items()}
        self.first, self.second, self.waiting, self.change = (
            {name: each.clone() for name, each in zeros.items()} for _ in range(4)
        )
        self.important = {name: each.bool() for name, each in zeros.items()}
        self.taken = self.waited = self.chosen = 0
        self.updates = []

    def step(self, batches):
        for name, each in self.model.named_parameters():
            each.data.copy_(self.masters[name])
            each.grad = None
        for name in self.masters:  # the model sees what was made beside it one step later
            self.masters[name] += self.change[name]
            self.change[name].zero_()
        loss = sum(self.model(inputs) for inputs in batches) / len(batches)
        loss.backward()
        gradients = {name: each.grad for name, each in self.model.named_parameters()}
        warm_up = self.taken < self.warm_up
        if not warm_up and not self.waited and (not self.chosen or self.select and self.chosen >= self.select):
            self.choose(gradients)
            self.chosen = 0
        self.taken += 1
        self.waited += 1
        self.chosen = 0 if warm_up else self.chosen + 1
        due = warm_up or (self.has_grown(gradients) if self.interval == "auto" else self.waited >= self.interval)
        for name, gradient in gradients.items():
            decay = DECAY if gradient.dim() > 1 else 0.0
            late = ~self.important[name]
            before = self.masters[name].clone()
            self.adam(name, gradient, self.important[name], decay)
            self.waiting[name] += torch.where(late, gradient, 0.0)
            if due:
                self.adam(name, self.waiting[name] / self.waited, late, decay)
                self.waiting[name].zero_()
                if self.overlap and not warm_up:
                    self.change[name] = torch.where(late, self.masters[name] - before, 0.0)
                    self.masters[name] = torch.where(late, before, self.masters[name])
        if due:
            self.updates.append(self.taken)
            self.waited = 0
        return float(loss.detach())

    def adam(self, name, gradient, where, decay):
        value, first, second = self.masters[name], self.first[name], self.second[name]
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        value = value * (1 - RATE * decay)
        size = second.sqrt() / math.sqrt(1 - BETAS[1] ** self.taken) + EPS
        value = value - RATE / (1 - BETAS[0] ** self.taken) * first / size
        self.masters[name] = torch.where(where, value, self.masters[name])
        self.first[name] = torch.where(where, first, self.first[name])
        self.second[name] = torch.where(where, second, self.second[name])

    def choose(self, gradients):
        for name, gradient in gradients.items():
            self.important[name] = torch.ones_like(gradient, dtype=torch.bool)
            if gradient.dim() > 1:
                sizes = gradient.abs().sum(0)
                best = sizes.topk(max(1, round(self.ratio * len(sizes)))).indices
                self.important[name] = torch.zeros_like(gradient, dtype=torch.bool)
                self.important[name][:, best] = True

    def has_grown(self, gradients):
        matrices = [name for name, gradient in gradients.items() if gradient.dim() > 1]
        grown = 0
        for name in matrices:
            sizes, important = gradients[name].abs(), self.important[name]
            grown += bool(self.waited * sizes[~important].mean() >= sizes[important].mean())
        return grown >= int(self.auto * len(matrices)) or self.waited >= 32

    def left(self):
        found = dict(self.masters)
        for key, states in (("exp_avg", self.first), ("exp_avg_sq", self.second), ("late_gradient", self.waiting)):
            found |= {f"{name} {key}": value for name, value in states.items()}
        return found


def engine_of(zenflow, stage=2, dtype="fp32", offload=HOST, **keys):
    keys = {"scheduler": None} | FREE | keys
    return start(stage, dtype, offload=offload, zenflow=zenflow, **keys)


def stepped(engine, numbers):
    """The losses of some steps, and the numbers of those after which nothing waits."""
    losses, updates = [], []
    for number in numbers:
        loss = engine(inputs_of(number, engine.global_rank))
        engine.backward(loss)
        report = engine.step()
        losses.append(float(report.loss))
        updates += [number + 1] if not report.measures["zenflow_waiting_steps"] else []
    return losses, updates


def all_left(engine):
    found = left_of(engine)
    for name, parameter in engine.module.named_parameters():
        found[f"{name} late_gradient"] = mizzen.zero.safe_get_full_optimizer_state(parameter, "late_gradient")
    return found


SECTIONS = {
    "step": LATE,
    "every step": LATE | {"update_interval": 1},
    "warm-up": LATE | {"full_warm_up_rounds": 3},
    "epoch": {"topk_ratio": 0.1, "update_interval": 3, "select_strategy": "epoch", "select_interval": 2}
    | {"steps_per_epoch": 3},
    "once": {"topk_ratio": 0.5, "update_interval": 5},
    "auto": {"topk_ratio": 0.25, "steps_per_epoch": 6, "auto_ratio": 0.8},
    "beside": LATE | {"overlap_step": True, "full_warm_up_rounds": 2},
    "beside, every step": LATE | {"overlap_step": True, "update_interval": 1},
    "in host memory": LATE | {"offload": True},
    "all": LATE | {"topk_ratio": 1.0},
}


def expected_of(section):
    interval = section.get("update_interval", "auto")
    epochs = section.get("select_interval", 1)
    select = epochs if section.get("select_strategy") == "step" else epochs * section.get("steps_per_epoch", 0)
    warm_up, overlap = section.get("full_warm_up_rounds", 0), section.get("overlap_step", False)
    auto = section.get("auto_ratio", 0.99)
    return Expected(section["topk_ratio"], interval, select, warm_up, overlap=overlap, auto=auto)


def trained(section, stage, looks):
    """An engine beside what is expected of it; somebody may look at what it has in the middle of a round."""
    use_behind()
    engine, expected = engine_of(section, stage), expected_of(section)
    ranks = range(engine.world_size)
    found, wanted, worst = [], [], 0.0
    for number in range(22):
        found.append(stepped(engine, [number]))
        wanted.append(expected.step([inputs_of(number, rank) for rank in ranks]))
        if number in looks or number == 21:
            left = all_left(engine)
            values = expected.left()
            assert left.keys() == values.keys()
            worst = max(worst, *(float((left[name] - values[name]).abs().max()) for name in left))
    updates = [number for _, numbers in found for number in numbers]
    losses = [loss for (loss,), _ in found]
    rests = {type(lot.rest) for store in engine.stores for lot in store.contents.lots}
    engine.destroy()
    assert not mizzen.accelerator.get_accelerator().locked
    return losses, wanted, updates, expected.updates, worst, rests


AT_STAGES = list(product(SECTIONS, (1, 2, 3))) if FULL else list(zip(SECTIONS, cycle((3, 1, 2))))
"""Sections and stages; without FULL=1 each section at one of them."""


@pytest.mark.parametrize("cases", together(AT_STAGES, lambda _: "2", [("beside", 3)]))
def test_every_element_is_stepped_when_the_section_says(world, cases):
    given = [(SECTIONS[name], stage, (5, 9) if stage == 2 else ()) for name, stage in cases]
    for case, found in zip(cases, world(2).each(trained, given), strict=True):
        for losses, wanted, updates, due, worst, rests in found:
            assert rests == {OnHostLate}, case
            assert updates == due, case
            assert losses == pytest.approx(wanted, rel=1e-5, abs=1e-7), case
            assert worst < 1e-6, case
            assert len(due) >= 3, case


def test_on_one_rank_and_without_shards(world):
    cases = [(LATE, 0, (6,)), (SECTIONS["auto"], 1, (6,))]
    for ((losses, wanted, updates, due, worst, _),) in world(1).each(trained, cases):
        assert (updates, worst < 1e-6) == (due, True)
        assert losses == pytest.approx(wanted, rel=1e-5)


# Beside training without it


def both(stage, dtype, section, accumulation, keys, steps=24):
    """A run with all states stepped at once, then one with ZenFlow: what was told of their steps, and what is left."""
    expected = start(stage, dtype, accumulation=accumulation, **keys)
    told, left = train(expected, dtype, accumulation, steps=steps), left_of(expected)
    expected.destroy()
    use_behind()
    offload = {"device": "cpu", "ratio": 0.7}
    engine = start(stage, dtype, accumulation=accumulation, offload=offload, zenflow=section, **keys)
    late = train(engine, dtype, accumulation, steps=steps), left_of(engine)
    engine.destroy()
    return told, left, *late


@pytest.mark.parametrize("stage", choice([1, 2, 3], [3]))
@pytest.mark.parametrize(
    "section",
    [LATE | {"update_interval": 1}, pytest.param(LATE | {"topk_ratio": 1.0}, marks=pytest.mark.wide)],
    ids=["1", "all"],
)
@pytest.mark.parametrize("keys", [pytest.param(FREE, marks=pytest.mark.wide), {}], ids=["free", "clipped"])
@pytest.mark.wide  # above each element is followed
def test_all_elements_in_every_step_are_a_run_without_it(world, stage, section, keys):
    """Up to last bits: a kernel of the CPU rounds otherwise in the last few elements of a tensor."""
    for told, left, late, values in world(2).run(both, stage, "fp32", section, 1, keys, steps=12):
        for (applied, norm, loss, *others), (is_taken, same, again, *rest) in zip(told, late, strict=True):
            assert (applied, others) == (is_taken, rest)
            assert (float(same), float(again)) == pytest.approx((float(norm), float(loss)), rel=1e-5, nan_ok=True)
        assert max(float((left[name] - values[name]).abs().max()) for name in left) < 1e-7
        assert [applied for applied, *_ in told].count(False) == 1


BAND = 0.1
"""Of the first loss: how far the mean of the last losses may be from that of a run without it."""


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulation"),
    choice([(1, "fp32", 1), (2, "bf16", 2), (2, "fp16", 1), (3, "bf16", 1)], [(2, "bf16", 2), (2, "fp16", 1)]),
)
@pytest.mark.parametrize("ranks", choice([1, 2], [1]))
def test_losses_stay_in_a_band_around_those_of_a_run_without_it(world, stage, dtype, accumulation, ranks):
    for told, _, late, _ in world(ranks).run(both, stage, dtype, LATE, accumulation, {}):
        assert [applied for applied, *_ in late] == [applied for applied, *_ in told]
        assert [rate for *_, rate in late] == [rate for *_, rate in told]
        losses, others = ([float(loss) for _, _, loss, *_ in each] for each in (told, late))
        assert others != losses
        assert abs(sum(others[-5:]) - sum(losses[-5:])) / 5 < BAND * losses[0]
        assert sum(others[-5:]) / 5 < 0.8 * others[0]


# What must not happen to gradients that wait


def skipped(dtype):
    """What waits before a step that is skipped, and after it; then after one that is taken."""
    use_behind()
    engine = engine_of(LATE, 2, dtype)
    broken, found = {"on": False}, []
    engine.module.layers[1].weight.register_hook(lambda g: g * math.nan if broken["on"] else g)
    for number in range(5):
        broken["on"] = number == 2
        inputs = inputs_of(number, engine.global_rank).to(torch.float16 if dtype == "fp16" else torch.float32)
        engine.backward(engine(inputs))
        report = engine.step()
        found.append((report.applied, report.measures.get("zenflow_waiting_steps"), all_left(engine)))
    return found


@pytest.mark.parametrize("dtype", choice(["fp32", "fp16"], ["fp16"]))
def test_a_step_that_is_skipped_changes_nothing_of_what_waits(world, dtype):
    for found in world(2).run(skipped, dtype):
        applied, waits, left = zip(*found, strict=True)
        assert applied == (True, True, False, True, True)
        assert waits == (1.0, 2.0, None, 3.0, 0.0)
        assert all(torch.equal(left[1][name], left[2][name]) for name in left[1])
        weight = "layers.2.weight late_gradient"
        assert left[1][weight].abs().max() > 0
        assert not torch.equal(left[2][weight], left[3][weight])
        assert not left[4][weight].any()


def resumed(section, stage, folder):
    """Save in the middle of a round; what comes after it in the same run, in another, and from a state dict."""
    use_behind()
    engine = engine_of(section, stage)
    stepped(engine, range(6))
    engine.save_checkpoint(folder)
    before = all_left(engine)
    weight, key = engine.module.layers[0].weight, "late_change" if section.get("overlap_step") else "late_gradient"
    waits = mizzen.zero.safe_get_full_optimizer_state(weight, key).abs().max() > 0
    after, left = stepped(engine, range(6, 12)), all_left(engine)
    engine.load_checkpoint(folder)  # into an engine that has gone on
    again = stepped(engine, range(6, 12)), all_left(engine)
    engine.destroy()
    other = engine_of(section, stage)
    other.load_checkpoint(folder)
    loaded = all_left(other)
    rest = stepped(other, range(6, 12)), all_left(other)
    other.destroy()
    same = [name for name in left if not (torch.equal(rest[1][name], left[name]))]
    same += [name for name in left if not (torch.equal(again[1][name], left[name]))]
    same += [name for name in before if not torch.equal(before[name], loaded[name])]
    return after == again[0] == rest[0], same, waits


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
@pytest.mark.parametrize("name", choice(["step", "auto", "beside", "in host memory"], ["beside"]))
def test_a_run_that_is_resumed_goes_on_with_what_has_waited(world, name, stage, tmp_path):
    for is_same, different, waits in world(2).run(resumed, SECTIONS[name], stage, str(tmp_path)):
        assert different == []
        assert is_same
        assert waits or name == "auto"


def loaded_alone(folder, is_late):
    use_behind()
    engine = engine_of(LATE if is_late else None, 1)
    AMBIENT.warned.clear()
    engine.load_checkpoint(folder)
    said = [message for message in AMBIENT.warned if "late update of zenflow" in message]
    return all_left(engine) if is_late else left_of(engine), stepped(engine, range(6, 9)) if is_late else None, said


def saved(section, folder):
    use_behind()
    engine = engine_of(section, 2)
    for number in range(6):
        engine.backward(engine(inputs_of(number, engine.global_rank)))
        engine.step()
    engine.save_checkpoint(folder)
    return all_left(engine) if section else left_of(engine)


def test_a_checkpoint_fits_other_layouts_and_runs_without_late_updates(world, tmp_path):
    before = world(2).run(saved, LATE, str(tmp_path / "late"))[0]
    ((found, _, said),) = world(1).run(loaded_alone, str(tmp_path / "late"), True)
    assert all(torch.equal(before[name], found[name]) for name in before)
    assert said == []
    ((found, _, said),) = world(1).run(loaded_alone, str(tmp_path / "late"), False)
    assert all(torch.equal(before[name], found[name]) for name in found)
    assert [message.endswith("this run has no place for that, and drops it") for message in said] == [True]
    world(2).run(saved, None, str(tmp_path / "plain"))
    ((found, (losses, updates), said),) = world(1).run(loaded_alone, str(tmp_path / "plain"), True)
    assert said == []
    assert not any(value.any() for name, value in found.items() if name.endswith("late_gradient"))
    assert (len(losses), updates) == (3, [])


def looked_at(section):
    """Whoever reads in the middle of a round changes nothing; what is written is there, and is trained on."""
    use_behind()
    engine, other = engine_of(section), engine_of(section)
    weight = engine.module.layers[0].weight
    for number in range(7):
        stepped(engine, [number])
        if number in (1, 4):
            left_of(engine)
            engine.optimizer.state_dict()
        with mizzen.zero.GatheredParameters(weight):
            assert weight.shape == (8, 8)
        stepped(other, [number])
    first, second = all_left(engine), all_left(other)
    same = all(torch.equal(first[name], second[name]) for name in first)
    value = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    mizzen.zero.safe_set_full_fp32_param(weight, value)
    mizzen.zero.safe_set_full_optimizer_state(weight, value.abs(), "exp_avg_sq")
    master, state = (
        mizzen.zero.safe_get_full_fp32_param(weight),
        mizzen.zero.safe_get_full_optimizer_state(weight, "exp_avg_sq"),
    )
    shown = weight.detach().clone()
    stepped(engine, [7])
    moved = mizzen.zero.safe_get_full_fp32_param(weight)
    with torch.no_grad():
        weight.data.mul_(2.0)
    stepped(engine, [8])
    doubled = mizzen.zero.safe_get_full_fp32_param(weight)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    before = all_left(engine)
    stepped(engine, [9])
    after = all_left(engine)
    is_moved = not torch.equal(before["layers.0.weight"], after["layers.0.weight"])
    return same, value, (master, state, shown), moved, doubled, is_moved


@pytest.mark.parametrize("name", choice(["step", "beside"], ["step"]))
def test_what_rests_is_read_and_written_at_any_time(world, name):
    for same, value, (master, state, shown), moved, doubled, is_moved in world(2).run(looked_at, SECTIONS[name]):
        assert same or name == "beside"  # there a look changes the last bits of what is made at that time
        assert torch.equal(master, value)
        assert torch.equal(state, value.abs())
        assert torch.equal(shown, value)
        assert 0 < (moved - value).abs().max() < 0.1
        assert (doubled - 2 * moved).abs().max() < 0.1
        assert is_moved


def saved_beside(folder):
    """A save whose thread waits until training goes on."""
    use_behind()
    engine = engine_of(LATE)
    stepped(engine, range(6))
    left = all_left(engine)
    engine.save_checkpoint(folder, async_save=True)
    stepped(engine, range(6, 10))
    engine.destroy()
    other = engine_of(LATE)
    other.load_checkpoint(folder)
    found = all_left(other)
    return [name for name in left if not torch.equal(left[name], found[name])]


def test_a_save_beside_training_has_what_was_there(world, tmp_path):
    assert world(2).run(saved_beside, str(tmp_path)) == [[], []]


def away():
    """Everything leaves the device in the middle of a round, and comes back with its bits."""
    use_behind()
    engine, other = engine_of(LATE), engine_of(LATE)
    stepped(engine, range(6))
    engine.offload_states()
    rests = [lot.rest.here for store in engine.stores for lot in store.contents.lots]
    engine.reload_states()
    found = stepped(engine, range(6, 12))
    stepped(other, range(6))
    return rests, found == stepped(other, range(6, 12))


def test_an_engine_gives_the_device_away_in_the_middle_of_a_round(world):
    for rests, is_same in world(2).run(away):
        assert set(rests) == {None}
        assert is_same


def epochs():
    """Columns are chosen anew after an epoch of the engine's own loader: 12 samples of 2 on each of 2 ranks."""
    use_behind()
    model = Model()
    zero = {"stage": 2, "offload_optimizer": HOST, "zenflow": {"topk_ratio": 0.2, "update_interval": 2}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "progress": {"enabled": False},
    }
    data = [torch.randn(8, generator=torch.Generator().manual_seed(each)) for each in range(12)]
    engine, *_ = mizzen.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data, dist_init_required=False
    )
    found = []
    for _ in range(8):
        engine.train_batch()
        found.append({int(state["chosen_steps"]) for state in engine.basic_optimizer.state.values()})
    return found


def test_columns_are_chosen_anew_after_an_epoch(world):
    for found in world(2).run(epochs):
        assert found == [{1}, {2}, {3}, {4}, {1}, {2}, {3}, {4}]


def unequal(stage, lengths):
    """The steps since columns were chosen, and which were, where the ranks' own loaders have different lengths."""
    use_behind()
    engine = engine_of({"topk_ratio": 0.25, "update_interval": 2}, stage)
    length, found = lengths[engine.global_rank], []
    if length is not None:
        engine.set_dataloader([torch.zeros(1)] * length)
    for number in range(9):
        if number == 6 and engine.global_rank == 1:  # one rank alone takes another
            engine.set_dataloader([torch.zeros(1)] * 2)
        stepped(engine, [number])
        found.append({int(state["chosen_steps"]) for state in engine.basic_optimizer.state.values()})
    weight = engine.module.layers[1].weight
    return found, mizzen.zero.safe_get_full_optimizer_state(weight, "is_important")


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("lengths", [(4, 6), pytest.param((6, 4), marks=pytest.mark.wide), (None, 4)], ids=str)
def test_ranks_choose_in_the_same_step_whatever_their_loaders_say(world, stage, lengths):
    (found, important), (others, same) = world(2).run(unequal, stage, lengths)
    assert found == others == [{1}, {2}, {3}, {4}, {1}, {2}, {1}, {2}, {1}]
    assert torch.equal(important, same)


def failed(name, folder):
    """An update beside training fails for one lot, which somebody is told; then what comes of steps and saves."""
    use_behind()
    alive = count_mappings()
    engine = engine_of(LATE | {"overlap_step": True, "update_interval": 2}, 1)
    stepped(engine, range(3))
    left_of(engine)  # what the host does for these steps is done
    work, calls = vars(LateUpdates)[name], []

    def broken(self, *given, **keys):
        calls.append(name)
        if len(calls) == 2:
            raise OSError("no way")
        work(self, *given, **keys)

    setattr(LateUpdates, name, broken)
    stepped(engine, [3])
    with pytest.raises(OSError, match="no way"):
        left_of(engine)
    setattr(LateUpdates, name, work)
    said = []
    for call in (lambda: engine.save_checkpoint(folder), lambda: engine.save_checkpoint(folder), engine.step):
        if call is engine.step:
            engine.backward(engine(inputs_of(4)))
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
        del caught
    gc.collect()
    gc.disable()
    engine.destroy()
    return said, len(alive)


@pytest.mark.parametrize("name", ["update", "add"])
def test_after_an_update_that_has_failed_nothing_is_saved_or_stepped(world, tmp_path, name):
    ((first, second, third), left) = world(1).run(failed, name, str(tmp_path))[0]
    assert left == 0  # of host memory
    assert first == second
    assert first.startswith("save_checkpoint() after a step that has failed half-way")
    assert third.startswith("step() after a step that has failed half-way")
    assert first.endswith("failed with: no way")
    assert not list(tmp_path.iterdir())


def destroyed(stage):
    """An engine is destroyed beside an update: the order of what happens, and host memory before and after it."""
    use_behind()
    alive = count_mappings()
    engine = engine_of(LATE | {"overlap_step": True, "update_interval": 1}, stage)
    stepped(engine, [0])
    left_of(engine)
    order, update, close = [], LateUpdates.update, HostTier.close

    def slow(self, *given, **keys):
        time.sleep(0.05)
        update(self, *given, **keys)
        order.append("update")

    LateUpdates.update = slow
    HostTier.close = lambda self: (order.append("close"), close(self))
    lots = sum(len(store.contents.lots) for store in engine.stores)
    stepped(engine, [1])
    gc.collect()
    gc.disable()
    before = len(alive)
    engine.destroy()
    return order, lots, before, len(alive)


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_memory_is_given_back_once_the_host_has_ended_its_update(world, stage):
    """All of it, although no garbage is collected and the engine is still there."""
    for order, lots, before, after in world(2).run(destroyed, stage):
        assert order == ["update"] * lots + ["close"]
        assert before > 5
        assert after == 0


def hooks_left():
    """The hooks on the state dict of a client's optimizer with an engine, and after it."""
    use_behind()
    model = Model()
    zero = {"stage": 1, "offload_optimizer": HOST, "zenflow": LATE}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "progress": {"enabled": False}}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = mizzen.initialize(model=model, optimizer=optimizer, config=config)[0]
    stepped(engine, range(2))
    before = len(optimizer._optimizer_state_dict_pre_hooks)
    engine.destroy()
    return before, len(optimizer._optimizer_state_dict_pre_hooks)


def test_the_optimizer_of_a_client_is_left_without_hooks(world):
    assert world(1).run(hooks_left) == [(1, 0)]


def given(kind):
    use_behind()
    model = Model()
    zero = {"stage": 1, "offload_optimizer": HOST, "zenflow": LATE}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "progress": {"enabled": False}}
    optimizer = kind(model.parameters(), lr=0.01)
    if kind is not torch.optim.Adam:
        with pytest.raises(mizzen.errors.UsageError, match="zenflow needs Adam or AdamW, not SGD"):
            mizzen.initialize(model=model, optimizer=optimizer, config=config)
        return None
    engine = mizzen.initialize(model=model, optimizer=optimizer, config=config)[0]
    return stepped(engine, range(5))[1]


def test_an_optimizer_that_a_client_gives(world):
    assert world(1).run(given, torch.optim.SGD) == [None]
    assert world(1).run(given, torch.optim.Adam) == [[4]]


def on_the_cpu():
    """On a machine without a device there is nothing to offload, so nothing is late."""
    engine = engine_of(LATE)
    engine.backward(engine(inputs_of(0)))
    engine.step()
    return engine.updater.offloaded, any("late_gradient" in state for state in engine.basic_optimizer.state.values())


def test_it_has_no_effect_where_the_host_is_the_device(world):
    assert world(1).run(on_the_cpu) == [(None, False)]
