"""`offload_states` and `reload_states`: the device's memory is free meanwhile, and every bit comes back."""

import time
import weakref
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mizzen
from behind import use_behind
from breadth import choice
from mizzen.engine.states_away import KINDS, StatesAway
from mizzen.offload.away import is_away
from mizzen.offload.tier import HostTier
from mizzen.plan.parts import StoreMemory
from ranks.offload.test_parameters import start as start_with_parameters
from ranks.offload.test_step import HELD, left_of, start


def device_bytes(*engines):
    """The memory of all that engines hold, but for host memory, which is mapped; tests/device asks the device."""
    storages = {}
    for engine in engines:
        held = [store.status.memory() for store in engine.stores]
        tensors = [each for one in held for each in (*one.values, *one.masters, *one.gradients)]
        tensors += [each for state in engine.basic_optimizer.state.values() for each in state.values()]
        for storage in (each.untyped_storage() for each in tensors):
            if storage.device.type == "cpu" and storage.resizable():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def is_shared(tensor):
    """Whether its memory was mapped, as host memory of a tier is."""
    return not tensor.untyped_storage().resizable()


def bytes_kept(values):
    """The memory of tensors that somebody still holds; a thread that has sent one lets go of it a moment later."""
    deadline = time.monotonic() + 20
    while True:
        held = [each for each in (value() for value in values) if each is not None and not is_shared(each)]
        kept = sum(each.untyped_storage().nbytes() for each in held)
        if not kept or time.monotonic() > deadline:
            return kept
        del held
        time.sleep(0.01)


def micro(engine, dtype, number):
    seed = 10 * number + engine.global_rank
    inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    return engine(inputs.to(HELD.get(dtype, torch.bfloat16)))


def train(engine, dtype, accumulation=1, steps=6, between=lambda: None):
    told = []
    for number in range(steps * accumulation):
        engine.backward(micro(engine, dtype, number))
        between()
        report = engine.step()
        between()
        told.append((report.applied, str(report.grad_norm), str(report.loss)))
    return told


def turns(stage, dtype, rule, accumulation, offload=None):
    """The same steps with and without states that leave after every backward and every step."""
    expected = start(stage, dtype, rule, accumulation)
    told, left = train(expected, dtype, accumulation), left_of(expected)
    expected.destroy()
    accelerator = use_behind()
    engine = start(stage, dtype, rule, accumulation, offload)
    rest = []

    def away():
        here = device_bytes(engine)
        values = [weakref.ref(each) for store in engine.stores for each in store.status.memory().values]
        engine.offload_states()
        rest.append((here, device_bytes(engine) + bytes_kept(values)))
        engine.reload_states()

    assert train(engine, dtype, accumulation, between=away) == told
    found = left_of(engine)
    different = [name for name in left if not torch.equal(found[name], left[name])]
    engine.destroy()
    return different, rest, len(accelerator.locked)


CASES = {
    "0 fp32": (0, "fp32", "AdamW", 1),
    "1 bf16": (1, "bf16", "AdamW", 2),
    "2 fp16": (2, "fp16", "AdamW", 2),
    "3 bf16": (3, "bf16", "AdamW", 2),
    "2 low": (2, "low", "Lion", 1),
    "1 whole": (1, "fp32", "Muon", 1),
    "3 whole": (3, "fp32", "Muon", 1),
    "2 host": (2, "bf16", "AdamW", 2, {"device": "cpu", "ratio": 0.5}),
    "3 host": (3, "bf16", "AdamW", 1, {"device": "cpu", "ratio": 0.5}),
}


@pytest.mark.parametrize("name", choice(CASES, ("0 fp32", "3 bf16", "2 host")))
def test_everything_leaves_and_comes_back_with_its_bits(world, name):
    for different, rest, locked in world(2).run(turns, *CASES[name]):
        assert different == []
        assert all(here > 0 == away for here, away in rest), rest
        assert locked == 0


def parts_away(stage):
    """What each kind takes from the device."""
    use_behind()
    engine = start(stage, "bf16")
    train(engine, "bf16", steps=2)
    engine.backward(micro(engine, "bf16", 9))
    found = {}
    for kind in ("optim_states", "hp_params", "lp_params", "lp_grads"):
        here = device_bytes(engine)
        engine.offload_states(include=[kind], pin_memory=False, non_blocking=True)
        found[kind] = here - device_bytes(engine)
        engine.reload_states(non_blocking=True)
        assert device_bytes(engine) == here
    engine.offload_states(include=["optim_states", "hp_params"])
    found["loss"] = float(micro(engine, "bf16", 3)), float(micro(engine, "bf16", 3))
    engine.empty_partition_cache()
    engine.reload_states()
    found["after"] = float(micro(engine, "bf16", 3))
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_some_kinds_leave_and_the_model_still_runs(world, stage):
    for found in world(2).run(parts_away, stage):
        owned = 2 * found["lp_params"] if stage == 2 else found["lp_params"]  # bytes of an fp32 value for each owned
        assert found["optim_states"] >= (found["lp_params"] if stage == 2 else 2 * owned)
        assert (found["hp_params"] > 0) == (stage == 2)  # shards are their own masters
        assert found["lp_grads"] > 0
        assert found["loss"] == (found["after"],) * 2


def refusals(stage, folder):
    use_behind()
    engine = start(stage, "bf16")
    train(engine, "bf16", steps=2)
    loss = micro(engine, "bf16", 3)
    weight = engine.module.layers[0].weight
    values = mizzen.zero.safe_get_full_fp32_param(weight)
    engine.offload_states()
    calls = {
        "forward": lambda: micro(engine, "bf16", 3),
        "evaluate": lambda: engine.eval_batch(iter([torch.zeros(2, 8, dtype=torch.bfloat16)])),
        "backward": lambda: engine.backward(loss),
        "step": lambda: engine.step(),
        "zero_grad": lambda: engine.zero_grad(),
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "master": lambda: mizzen.zero.safe_get_full_fp32_param(weight),
        "set master": lambda: mizzen.zero.safe_set_full_fp32_param(weight, values),
        "state": lambda: mizzen.zero.safe_get_full_optimizer_state(weight, "exp_avg"),
        "state_dict": lambda: engine.optimizer.state_dict(),
    }
    if stage == 3:
        calls["gather"] = lambda: mizzen.zero.GatheredParameters(weight).__enter__()
        calls["module"] = lambda: engine.module(torch.zeros(2, 8, dtype=torch.bfloat16))
    said = {}
    for name, call in calls.items():
        with pytest.raises(mizzen.errors.UsageError) as caught:
            call()
        said[name] = str(caught.value)
    engine.reload_states()
    assert torch.equal(mizzen.zero.safe_get_full_fp32_param(weight), values)
    with pytest.raises(mizzen.errors.UsageError, match="there is no 'states'; name some of"):
        engine.offload_states(include=["states"])
    with pytest.raises(mizzen.errors.UsageError, match="states go to host memory"):
        engine.offload_states(device="nvme")
    engine.offload_states(device="none")
    engine.backward(loss)
    assert engine.step().applied
    engine.offload_states()
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_whoever_needs_what_is_away_is_told(world, stage, tmp_path):
    for said in world(2).run(refusals, stage, str(tmp_path)):
        assert [name for name, text in said.items() if "engine.reload_states() first" not in text] == []
        assert said["forward"].startswith("forward() while lp_params of this engine is away in host memory")


def inside_gathered():
    """A refusal by a store after which everything goes on, with some kinds away from before."""
    use_behind()
    engine = start(3, "bf16")
    train(engine, "bf16", steps=1)
    weight = engine.module.layers[0].weight
    said = []
    for before in ([], ["optim_states"]):
        engine.offload_states(include=before)
        with mizzen.zero.GatheredParameters(weight), pytest.raises(mizzen.errors.UsageError) as caught:
            engine.offload_states()
        said.append(str(caught.value))
        micro(engine, "bf16", 3)  # what it needs is here
        engine.reload_states()
        assert all(applied for applied, *_ in train(engine, "bf16", steps=2))
    return said


def test_a_refused_call_leaves_everything_as_it_is(world):
    for said in world(2).run(inside_gathered):
        assert said == ["offload_states() inside GatheredParameters: leave the context first"] * 2


@contextmanager
def host_memory_for(count):
    """Room in host memory for so many tensors; gives what is left of it."""
    place, left = HostTier.place, [count]

    def place_few(tier, *args, **kwargs):
        if not left[0]:
            raise MemoryError("no host memory is left")
        left[0] -= 1
        return place(tier, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostTier, "place", place_few)
        yield left


def out_of_memory(stage):
    """What has left when host memory ends at one place after another, and whether training goes on as without it."""
    expected = start(stage, "bf16")
    told = train(expected, "bf16", steps=14)
    expected.destroy()
    use_behind()
    engine = start(stage, "bf16")
    away, found = engine.run_state.away, []
    said = train(engine, "bf16", steps=1)
    for number in range(1, 14):
        engine.backward(micro(engine, "bf16", number))
        if number == 1:
            with host_memory_for(1000) as left:
                engine.offload_states()
            needed = 1000 - left[0]
            engine.reload_states()
        here = device_bytes(engine)
        with host_memory_for(needed * (number - 1) // 12), suppress(MemoryError):
            engine.offload_states()
        found.append(away.kinds)
        if "lp_params" not in away.kinds:
            micro(engine, "bf16", 3)
        assert (device_bytes(engine) == here) == (not away.kinds)
        engine.reload_states()
        assert device_bytes(engine) == here
        report = engine.step()
        said.append((report.applied, str(report.grad_norm), str(report.loss)))
    engine.destroy()
    return found, said == told


@pytest.mark.parametrize("stage", choice([1, 3], [3]))
def test_host_memory_that_ends_half_way_leaves_whole_kinds_here(world, stage):
    for found, is_same in world(2).run(out_of_memory, stage):
        assert is_same
        assert found == sorted(found, key=len) and (found[0], found[-1]) == ((), KINDS)
        assert all(kinds == KINDS[: len(kinds)] for kinds in found) and len(set(found)) >= 4


class HeldStore:
    """A store of one tensor that a frozen one is used beside."""

    def __init__(self):
        self.value = torch.ones(4)
        self.status = SimpleNamespace(memory=lambda: StoreMemory([self.value], [], [], returned=lambda: None))
        self.contents = SimpleNamespace(lots=(), held={})


def of_two_parts():
    """What has left of two stores where host memory is enough for one, then of two modules that share a tensor."""
    use_behind()
    stores, away = [HeldStore(), HeldStore()], StatesAway()
    shared = nn.Linear(2, 2, bias=False).requires_grad_(False)
    modules = [nn.Sequential(shared), nn.Sequential(shared)]
    with host_memory_for(1), pytest.raises(MemoryError):
        away.leave(KINDS, stores, modules, None, pin=False, non_blocking=False)
    found = [away.kinds, [is_away(store.value) for store in stores], len(away._moved)]
    away.leave(KINDS, stores, modules, None, pin=False, non_blocking=False)
    found += [away.kinds, [is_away(store.value) for store in stores], len(away._moved)]
    away.come_back(non_blocking=False)
    return found, [store.value.tolist() for store in stores], away.kinds


def test_a_kind_leaves_all_stores_or_none_and_a_shared_tensor_leaves_once(world):
    ((found, values, kinds),) = world(1).run(of_two_parts)
    assert found == [(), [False, False], 0, KINDS, [True, True], 1]
    assert values == [[1.0] * 4] * 2 and kinds == ()


def read_and_written():
    """Below stage 3 the parameters themselves are in host memory, and what is written to them is taken along."""
    use_behind()
    engine = start(1, "bf16")
    train(engine, "bf16", steps=2)
    weight, other = engine.module.layers[0].weight, engine.module.layers[1].weight
    value = weight.detach().clone()
    engine.offload_states()
    is_same = torch.equal(weight, value)
    with torch.no_grad():
        other.fill_(0.5)
    engine.reload_states()
    train(engine, "bf16", steps=0)
    return is_same, torch.equal(weight, value), mizzen.zero.safe_get_full_fp32_param(other).unique().tolist()


def test_parameters_can_be_read_and_written_meanwhile(world):
    assert world(2).run(read_and_written) == [(True, True, [0.5])] * 2


def by_turns(rounds):
    """Two engines of which one is on the device at a time."""
    expected = []
    for stage in (2, 3):
        alone = start(stage, "bf16")
        told = train(alone, "bf16", steps=rounds)
        expected.append((told, left_of(alone)))
        alone.destroy()
    use_behind()
    engines = [start(stage, "bf16") for stage in (2, 3)]
    for engine in engines:
        engine.offload_states()
    told, most, least = [[], []], 0, 1 << 60
    for number in range(rounds):
        for engine, said in zip(engines, told, strict=True):
            engine.reload_states()
            engine.backward(micro(engine, "bf16", number))
            report = engine.step()
            said.append((report.applied, str(report.grad_norm), str(report.loss)))
            if number in (1, rounds - 1):
                most, least = max(most, device_bytes(*engines)), min(least, device_bytes(engine))
            engine.offload_states()
    rest = device_bytes(*engines)
    same = []
    for engine, said, (wanted, left) in zip(engines, told, expected, strict=True):
        engine.reload_states()
        found = left_of(engine)
        same.append(said == wanted and all(torch.equal(found[name], left[name]) for name in left))
        engine.offload_states()
    return same, rest, most, least


@pytest.mark.parametrize("rounds", choice([4, 50], [4]))
def test_two_engines_share_a_device_by_turns(world, rounds):
    for same, rest, most, alone in world(2).run(by_turns, rounds):
        assert same == [True, True]
        assert rest == 0 < most < 3 * alone  # never both


def beside_parameters(is_away):
    """Where parameters rest in host memory, masters, states and gradients still leave the device."""
    use_behind()
    engine = start_with_parameters("bf16", accumulation=2, offload_param={"device": "cpu"})
    rest = []

    def away():
        here = device_bytes(engine)
        engine.offload_states()
        rest.append((here, device_bytes(engine)))
        engine.reload_states()

    told = train(engine, "bf16", 2, steps=3, between=away if is_away else lambda: None)
    return told, left_of(engine), rest


@pytest.mark.wide  # the stages above, one by one
def test_parameters_that_rest_elsewhere_stay_there(world):
    expected = world(2).run(beside_parameters, False)
    for (told, left, rest), (wanted, values, _) in zip(world(2).run(beside_parameters, True), expected, strict=True):
        assert told == wanted
        assert all(torch.equal(left[name], values[name]) for name in values)
        assert all(here > 0 == away for here, away in rest)


def without_device():
    engine = start(2, "bf16")
    told = train(engine, "bf16", steps=2, between=engine.offload_states)
    return [applied for applied, *_ in told]


def test_it_has_no_effect_where_training_runs_on_the_cpu(world):
    assert world(2).run(without_device) == [[True, True]] * 2
