"""States that rest in host memory give the bits of states that rest on the device."""

import math
import os
import threading

import pytest
import torch
from torch import nn

import mizzen
from behind import use_behind
from breadth import BREADTH, choice
from mizzen.engine import build
from mizzen.engine.streamed_share import StreamedShare

PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 6}},
    "low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}
HELD = {"fp32": torch.float32, "fp16": torch.float16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.last(inputs).float().square().mean()


def start(stage, dtype, rule="AdamW", accumulation=1, offload=None, budgets=None, zenflow=None, **keys):
    model = Model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == flag] for flag in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    zero = {"stage": stage, "reduce_bucket_size": 80, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        "zero_optimization": zero
        | ({"offload_optimizer": offload} if offload else {})
        | ({"zenflow": zenflow} if zenflow is not None else {}),
        "optimizer": {"type": rule, "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "progress": {"enabled": False},
        **PRECISION[dtype],
        **keys,
    }
    if budgets is not None:
        config["offload"] = budgets
    return mizzen.initialize(model=model, model_parameters=groups, config=config)[0]


def places(engine):
    return [lot.rest.place for store in engine.stores for lot in store.contents.lots]


def steps_of(dtype):
    """Long runs are those of fp32."""
    return 20 if dtype == "fp32" and BREADTH != "short" else 9


def train(engine, dtype, accumulation=1, steps=None):
    """What is told of each step; the fourth is broken on rank 1, and after the sixth somebody writes to the model."""
    armed, told = {"on": False}, []
    engine.module.layers[1].weight.register_hook(lambda g: g * math.nan if armed["on"] else g)
    for number in range(steps or steps_of(dtype)):
        armed["on"] = number == 3 and engine.global_rank == engine.world_size - 1
        for micro in range(accumulation):
            seed = 100 * number + 10 * micro + engine.global_rank
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(inputs.to(HELD.get(dtype, torch.bfloat16))))
            report = engine.step()
        if number == 5 and engine.settings.zero_optimization.stage < 3:
            with torch.no_grad():
                engine.module.last.weight.data.mul_(1.5)
        told.append((report.applied, str(report.grad_norm), str(report.loss), report.loss_scale, report.lr))
    return told


def left_of(engine):
    """Masters and states by name."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = mizzen.zero.safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if any(key in state for state in engine.basic_optimizer.state.values()):
                found[f"{name} {key}"] = mizzen.zero.safe_get_full_optimizer_state(parameter, key)
    return {name: value for name, value in found.items() if value is not None}


def both(stage, dtype, rule, accumulation, offload, budgets, *, is_behind=True):
    expected = start(stage, dtype, rule, accumulation)
    told, left = train(expected, dtype, accumulation), left_of(expected)
    expected.destroy()
    if is_behind:
        use_behind()
    engine = start(stage, dtype, rule, accumulation, offload, budgets)
    rests = places(engine)
    assert train(engine, dtype, accumulation) == told
    found = left_of(engine)
    assert found.keys() == left.keys()
    different = [name for name in left if not torch.equal(found[name], left[name])]
    measures = engine.last_step.measures
    engine.destroy()
    assert not is_behind or not mizzen.accelerator.get_accelerator().locked
    return rests, different, told, measures


CASES = {
    "0 fp32": (0, "fp32", "AdamW", 1, {"device": "cpu"}, None),
    "1 bf16 ratio": (1, "bf16", "AdamW", 2, {"device": "cpu", "ratio": 0.3}, None),
    "2 fp16 half streamed": (2, "fp16", "AdamW", 1, {"device": "cpu"}, {"streamed_ratio": 0.5, "device_bytes": 0}),
    "2 bf16 budget": (2, "bf16", "Lion", 2, None, {"streamed_ratio": 1, "device_bytes": 1500}),
    "1 low streamed": (1, "low", "AdamW", 1, {"device": "cpu"}, {"streamed_ratio": 1, "device_bytes": 0}),
    "0 fp16": (0, "fp16", "Adam", 2, {"device": "cpu", "pin_memory": False}, {"streamed_ratio": 0.5}),
    "2 low": (2, "low", "Adagrad", 1, {"device": "cpu"}, None),
    "1 whole": (1, "fp32", "Muon", 1, {"device": "cpu"}, None),
    "3 bf16": (3, "bf16", "AdamW", 2, {"device": "cpu"}, None),
    "3 fp32 ratio": (3, "fp32", "AdamW", 1, {"device": "cpu", "ratio": 0.5}, None),
    "3 fp16 streamed": (3, "fp16", "Lion", 1, None, {"streamed_ratio": 1, "device_bytes": 0}),
}
SHORT = ("1 bf16 ratio", "2 fp16 half streamed", "3 bf16")


@pytest.mark.parametrize("name", choice(CASES, SHORT))
def test_bits_do_not_depend_on_where_states_rest(world, name):
    case = CASES[name]
    for rests, different, told, measures in world(2).run(both, *case):
        assert "host" in rests
        assert ("device" in rests) == (name in ("1 bf16 ratio", "2 bf16 budget", "3 fp32 ratio"))
        assert different == []
        assert not all(applied for applied, *_ in told)
        assert len({norm for _, norm, *_ in told}) > 5
        assert measures["offload_ms"] >= measures["offload_host_wait_ms"] >= 0
        assert measures["offload_ms"] >= measures["offload_host_step_ms"] >= measures["offload_copies_out_ms"] >= 0
        assert measures["offload_copies_in_ms"] > 0 == measures["offload_reads_ms"] == measures["offload_writes_ms"]


def test_on_one_rank_too(world):
    for stage in (0, 2):
        ((rests, different, *_),) = world(1).run(both, stage, "bf16", "AdamW", 1, {"device": "cpu"}, None)
        assert set(rests) == {"host"}
        assert different == []


def measured(stage, dtype):
    """As if copies and computing could overlap, so that it is worth while to see how much should be streamed."""
    use_behind().has_streams = True
    asked = []
    after = StreamedShare.after_step

    def after_step(self, share, **seconds):
        asked.append((share, *seconds.values()))
        return after(self, share, **seconds)

    StreamedShare.after_step = after_step
    rests, different, told, _ = both(stage, dtype, "AdamW", 1, {"device": "cpu"}, None, is_behind=False)
    return rests, different, told, asked


@pytest.mark.parametrize(("stage", "dtype"), choice([(1, "bf16"), (3, "fp16")], [(1, "bf16")]))
def test_bits_do_not_depend_on_a_share_that_is_measured(world, stage, dtype):
    for rests, different, _, asked in world(2).run(measured, stage, dtype):
        assert set(rests) == {"host"}
        assert different == []
        assert len(asked) == 3  # after the third, the fifth and the seventh step
        assert all(0 < share <= 1 and min(seconds) >= 0 for share, *seconds in asked)


def order_of(stage):
    """The lots of an engine, as they stand, and as backward has completed them."""
    use_behind()
    engine = start(stage, "bf16", "AdamW", 1, {"device": "cpu"}, {"streamed_ratio": 1, "device_bytes": 0})
    lots = [lot for store in engine.stores for lot in store.contents.lots]
    completed = []
    for lot in lots:
        leave = lot.rest.leave
        lot.rest.leave = lambda gradient, title=lot.rest.title, leave=leave: (completed.append(title), leave(gradient))
    engine.backward(engine(torch.randn(2, 8).bfloat16().requires_grad_()))
    engine.step()
    found = [lot.rest.title for lot in lots], list(dict.fromkeys(completed))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_lots_stand_as_backward_completes_them(world, stage):
    """Those that pass through the device are the first: for their copies there is most time."""
    for stand, completed in world(2).run(order_of, stage):
        assert len(stand) > 3
        assert completed == stand


def locked_when(stage, offload, budgets):
    """The threads that lock memory until the first step is over, and the bytes before it, after it and later."""
    accelerator, threads = use_behind(), []
    lock = accelerator.lock

    def noted(tensor):
        threads.append(threading.current_thread().name)
        return lock(tensor)

    accelerator.lock_pages = noted
    engine = start(stage, "bf16", "AdamW", 1, offload, budgets)
    found = []
    for number in range(3):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(inputs.bfloat16()))
        engine.step()
        found.append((len(threads), sum(accelerator.locked.values())))
    engine.destroy()
    return threads, found, len(accelerator.locked)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("streamed", [0, 1])
def test_memory_for_states_is_locked_ahead_of_the_first_step(world, stage, streamed):
    budgets = {"device_bytes": 0, "streamed_ratio": streamed}
    for threads, found, left in world(2).run(locked_when, stage, {"device": "cpu"}, budgets):
        masters = sum(name == "MainThread" for name in threads)
        ahead = sum(name.startswith("mizzen-lock") for name in threads)
        assert masters + ahead == len(threads)
        assert ahead == masters * (2 if streamed else 3)  # two states, and the gradient where the host steps
        assert len(set(found)) == 1
        assert left == 0


NVME = {
    "0 fp32": (0, "fp32", "AdamW", 1, {"device": "nvme"}, None),
    "1 bf16 ratio": (1, "bf16", "AdamW", 2, {"device": "nvme", "ratio": 0.5}, None),
    "2 fp16": (2, "fp16", "AdamW", 1, {"device": "nvme"}, None),
    "2 low": (2, "low", "Adagrad", 1, {"device": "nvme"}, None),
    "1 whole": (1, "fp32", "Muon", 1, {"device": "nvme"}, None),
    "2 three places": (
        2,
        "bf16",
        "AdamW",
        1,
        {"device": "nvme"},
        {"device_bytes": 1500, "host_bytes": 1500, "nvme_bytes": 100000},
    ),
    "3 bf16": (3, "bf16", "AdamW", 2, {"device": "nvme"}, None),
    "3 fp32 ratio": (3, "fp32", "Lion", 1, {"device": "nvme", "ratio": 0.5}, None),
}


@pytest.mark.parametrize("name", choice(NVME, ("2 three places",)))
@pytest.mark.parametrize("is_behind", choice([True, False], [True]), ids=["behind", "cpu"])
def test_bits_do_not_depend_on_files(world, tmp_path, name, is_behind):
    stage, dtype, rule, accumulation, offload, budgets = NVME[name]
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    case = (stage, dtype, rule, accumulation, offload | {"nvme_path": paths}, budgets)
    for rests, different, told, _ in world(2).run(both, *case, is_behind=is_behind):
        assert "nvme" in rests
        assert ("host" in rests) == (name == "2 three places")
        assert different == []
        assert not all(applied for applied, *_ in told)
    assert not list((tmp_path / "a").iterdir())


def threads_of(offload, budgets):
    """The threads of the step's own thread and of this one, on a rank with ten cores."""
    use_behind()
    build.own_cores = lambda *_: tuple(range(10))
    engine = start(1, "fp32", "AdamW", 1, offload, budgets)
    inputs = torch.randn(2, 8)
    engine.backward(engine(inputs))
    engine.step()
    step = engine.updater.offloaded
    seen = step._thread.submit(torch.get_num_threads).result()
    engine.destroy()
    return seen, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("offload", "budgets", "threads"),
    [
        ({"device": "cpu"}, None, 10),
        ({"device": "cpu", "cpuadam_cores_perc": 0.3}, None, 3),
        ({"device": "cpu", "cpuadam_cores_perc": 0}, None, 1),
        ({"device": "cpu", "cpuadam_cores_perc": 0.3}, {"threads": 4, "device_bytes": 0}, 4),
    ],
    ids=["all", "share", "none", "number"],
)
def test_the_host_steps_with_the_asked_share_of_its_cores(world, offload, budgets, threads):
    for seen, others, given in world(1).run(threads_of, offload, budgets):
        assert seen == threads
        assert (others, given) == (1, "1")


def from_files(folder):
    engine = start(1, "bf16", offload={"device": "nvme", "nvme_path": folder})
    for number in range(2):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(inputs.bfloat16()))
        engine.step()
    return dict(engine.last_step.measures)


def test_a_step_says_how_long_it_waited_for_files(world, tmp_path):
    for measures in world(2).run(from_files, str(tmp_path)):
        assert measures["offload_host_step_ms"] > measures["offload_reads_ms"] > 0
        assert measures["offload_writes_ms"] > 0
