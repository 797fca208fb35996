"""Parameters that rest in host memory, or on NVMe, give the bits of those that rest on the device."""

import gc
import math
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import mizzen
from behind import use_behind
from breadth import FULL, choice
from mizzen.checkpoint import save as protocol
from mizzen.model.piece import Readers
from ranks.offload.test_step import HELD, PRECISION, left_of, steps_of
from ranks.parallel.zero.full.models import config, train

FAR = {"device": "nvme", "max_in_cpu": 0}
HOST = {"device": "cpu"}


class Model(nn.Module):
    """Blocks of two kinds of parameters, trained in groups, with a frozen one among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.layers[2].requires_grad_(False)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.last(inputs).float().square().mean()


def start(dtype, rule="AdamW", accumulation=1, model=None, keys=None, **zero):
    model = model or Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) == flag] for flag in (True, False))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.05,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            **zero,
        },
        "optimizer": {"type": rule, "params": {"lr": 0.01, "weight_decay": 0.1}},
        "progress": {"enabled": False},
        **PRECISION[dtype],
        **(keys or {}),
    }
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return mizzen.initialize(model=model, model_parameters=groups, config=settings)[0]


def train_model(engine, dtype, accumulation=1, steps=None):
    """What is told of each step; the fourth is broken on the last rank, and somebody looks at the model in between."""
    armed, told = {"on": False}, []
    engine.module.layers[1].weight.register_hook(lambda g: g * math.nan if armed["on"] else g)
    for number in range(steps or steps_of(dtype)):
        armed["on"] = number == 3 and engine.global_rank == engine.world_size - 1
        for micro in range(accumulation):
            seed = 100 * number + 10 * micro + engine.global_rank
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            inputs = inputs.to(HELD.get(dtype, torch.bfloat16))
            engine.backward(engine(inputs))
            report = engine.step()
        with torch.no_grad():
            seen = float(engine(inputs))
        told.append((report.applied, str(report.grad_norm), str(report.loss), report.loss_scale, seen))
    return told


def shards_of(engine):
    """Everything that stands for shards which rest elsewhere."""
    units = [unit for store in engine.stores for unit in vars(store).get("units", ())]
    return [rest for unit in units for message in unit.messages for rest in message.rests if rest is not None]


def both(dtype, rule, accumulation, param, optimizer, folder):
    expected = start(dtype, rule, accumulation)
    told, left = train_model(expected, dtype, accumulation), left_of(expected)
    expected.destroy()
    is_behind = param["device"] == "cpu" or bool(optimizer)  # NVMe is real without a device, too
    accelerator = use_behind() if is_behind else None
    sections = {"offload_param": {"nvme_path": folder, **param}}
    if optimizer:
        sections["offload_optimizer"] = {"device": optimizer, "nvme_path": folder}
    engine = start(dtype, rule, accumulation, **sections)
    rests = {rest.place for rest in shards_of(engine)}
    found = train_model(engine, dtype, accumulation)
    values = left_of(engine)
    different = [name for name in left if not torch.equal(values[name], left[name])]
    frozen = engine.module.layers[2].weight
    with mizzen.zero.GatheredParameters(frozen):
        if not torch.equal(frozen.float(), Model().layers[2].weight.to(frozen.dtype).float()):
            different.append("layers.2.weight")
    engine.destroy()
    locked = len(accelerator.locked) if accelerator else 0
    return rests, found == told, different, told, locked, engine.module.last.weight.shape


CASES = {
    "1 fp32 cpu": (1, "fp32", "AdamW", 1, HOST, None),
    "1 fp32 cpu cpu": (1, "fp32", "AdamW", 1, HOST, "cpu"),
    "1 bf16 cpu cpu": (1, "bf16", "AdamW", 2, HOST, "cpu"),
    "1 bf16 nvme nvme": (1, "bf16", "AdamW", 1, FAR, "nvme"),
    "1 fp32 nvme": (1, "fp32", "AdamW", 1, FAR, None),
    "2 fp32 cpu": (2, "fp32", "AdamW", 1, HOST, None),
    "2 fp32 cpu cpu": (2, "fp32", "AdamW", 1, HOST, "cpu"),
    "2 fp16 cpu cpu": (2, "fp16", "Lion", 1, HOST, "cpu"),
    "2 bf16 nvme cpu": (2, "bf16", "AdamW", 2, FAR, "cpu"),
    "2 fp32 nvme": (2, "fp32", "AdamW", 1, FAR, None),
    "2 fp32 nvme nvme": (2, "fp32", "AdamW", 1, FAR, "nvme"),
    "2 fp16 both nvme": (2, "fp16", "AdamW", 1, {"device": "nvme", "max_in_cpu": 120, "buffer_count": 1}, "nvme"),
    "2 low cpu": (2, "low", "Adagrad", 1, HOST, "cpu"),
    "2 whole cpu": (2, "fp32", "Muon", 1, HOST, None),
    "2 whole nvme": (2, "bf16", "Muon", 1, FAR, "cpu"),
}
SHORT = ("1 fp32 nvme", "2 fp16 both nvme")


@pytest.mark.parametrize("name", choice(CASES, SHORT))
def test_bits_do_not_depend_on_where_parameters_rest(world, tmp_path, name):
    ranks, *case = CASES[name]
    for rests, is_same, different, told, locked, shape in world(ranks).run(both, *case, str(tmp_path)):
        places = {"cpu": {"host"}, "nvme": {"nvme"}, "both": {"host", "nvme"}}
        assert rests == places["both" if "both" in name else case[3]["device"]]
        assert is_same
        assert different == []
        assert [applied for applied, *_ in told].count(False) >= 1
        assert locked == 0
        assert shape == (3, 8)
    assert not list(Path(tmp_path).glob("mizzen-swap-*"))


def models_both(kind, param):
    """A model that is hard to shard, without offload and with it."""
    keys = {"deterministic": True, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    losses, norms, values = train(kind, 3, **keys)
    use_behind()
    keys["zero_optimization"] |= {"offload_param": param, "offload_optimizer": {"device": "cpu"}}
    found = train(kind, 3, **keys)
    different = [name for name in values if not torch.equal(found[2][name], values[name])]
    return found[:2] == (losses, norms), different


HARD = ("TiedBlocks", "Odd", "Twice", "Outside", "Direct", "Lora", "Branching", "Checkpointed")


@pytest.mark.parametrize(
    ("ranks", "param", "kinds"),
    [
        pytest.param(1, HOST, ["Outside", "Direct", "Lora", "Checkpointed"], id="1 host"),
        pytest.param(2, FAR, ["TiedBlocks", "Odd", "Twice", "Branching"], id="2 nvme"),
        pytest.param(2, FAR, HARD, id="2 nvme all", marks=pytest.mark.wide),
        *([pytest.param(2, HOST, HARD, id="2 host all")] if FULL else []),
    ],
)
def test_models_that_are_hard_to_shard(world, tmp_path, ranks, param, kinds):
    cases = [(kind, {"nvme_path": str(tmp_path), **param}) for kind in kinds]
    for kind, found in zip(kinds, world(ranks).each(models_both, cases), strict=True):
        for is_same, different in found:
            assert is_same, kind
            assert different == [], kind


class Wide(nn.Module):
    """Eight blocks of equal size, and almost nothing beside them."""

    def __init__(self, seen=None):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.seen = seen

    def forward(self, inputs):
        for number, block in enumerate(self.blocks):
            inputs = block(inputs).tanh()
            if self.seen is not None and number in (3, 7):
                self.seen.append(on_device())
        return inputs.square().mean()


def on_device():
    """Bytes of all tensors that are not in mapped host memory, such as that of tiers is."""
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and not each.is_meta and not isinstance(each, FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage
    return sum(storage.nbytes() for storage in storages.values() if storage.resizable())


def peak(param, folder):
    use_behind()
    gc.collect()
    before, seen = on_device(), []
    model = Wide(seen)
    total = 4 * sum(p.numel() for p in model.parameters())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": {"device": "cpu"}}
    zero |= {"offload_param": {"nvme_path": folder, **param}, "stage3_prefetch_bucket_size": 4096}
    engine = mizzen.initialize(model=model, config=config(3, 1, zero=zero, train_batch_size=2))[0]
    rests = on_device() - before
    with torch.no_grad():
        engine(torch.randn(2, 64))
    return total, rests, [count - before for count in seen], on_device() - before


@pytest.mark.parametrize("param", [HOST, FAR], ids=["host", "nvme"])
def test_parameters_are_on_the_device_for_their_use_alone(world, tmp_path, param):
    ((total, rests, (middle, last), afterwards),) = world(1).run(peak, param, str(tmp_path))
    assert rests < total / 16
    assert (total / 8 < middle < total / 2) == (param is HOST)  # two units ahead; those of NVMe are in buffers yet
    assert middle < total / 2
    assert last < total / 8
    assert afterwards < total / 16


def written(param, folder):
    """What is read and written where parameters rest."""
    use_behind()
    engine = start("bf16", offload_param={"nvme_path": folder, **param}, offload_optimizer={"device": "cpu"})
    train_model(engine, "bf16", steps=3)
    weight, other, frozen = (engine.module.layers[number].weight for number in (0, 1, 2))
    value = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    mizzen.zero.safe_set_full_fp32_param(weight, value)
    with mizzen.zero.GatheredParameters([weight, frozen]):
        seen = weight.detach().clone(), frozen.detach().clone()
    with mizzen.zero.GatheredParameters([other, frozen], modifier_rank=0), torch.no_grad():
        other.fill_(0.25)
        frozen.fill_(0.5)
    changed = mizzen.zero.safe_get_full_fp32_param(other), mizzen.zero.safe_get_full_fp32_param(frozen)
    with torch.no_grad():
        loss = float(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
    state = {name: each.detach().full_tensor() for name, each in engine.module.state_dict().items()}
    return value, mizzen.zero.safe_get_full_fp32_param(weight), seen, changed, loss, state, wholes(engine)


def wholes(engine):
    """Masters, and what nobody trains: one rank that shards nothing has that as it is."""
    found = {name: (mizzen.zero.safe_get_full_fp32_param(p), p) for name, p in engine.module.named_parameters()}
    return {name: p.detach().float() if value is None else value for name, (value, p) in found.items()}


@pytest.mark.parametrize(("ranks", "param"), [(1, FAR), (2, HOST), pytest.param(2, FAR, marks=pytest.mark.wide)])
def test_values_are_read_and_written_where_they_rest(world, tmp_path, ranks, param):
    for value, master, seen, changed, loss, state, after in world(ranks).run(written, param, str(tmp_path)):
        assert torch.equal(master, value)
        assert torch.equal(seen[0], value.to(torch.bfloat16))
        assert torch.equal(seen[1], Model().layers[2].weight.to(torch.bfloat16))
        assert torch.equal(changed[0].to(torch.bfloat16), torch.full((8, 8), 0.25, dtype=torch.bfloat16))
        assert torch.equal(changed[1], torch.full((8, 8), 0.5))
        model = Model().bfloat16()
        with torch.no_grad():
            for name, each in model.named_parameters():
                each.copy_(after[name])
            assert loss == float(model(torch.ones(2, 8, dtype=torch.bfloat16)))
        assert all(torch.equal(state[name], after[name].to(torch.bfloat16)) for name in after)


def resumed(folder):
    """Save where parameters rest in files; load it there, in host memory, and where they rest on the device."""
    use_behind()
    far = {"offload_param": {"nvme_path": f"{folder}/swap", **FAR}, "offload_optimizer": {"device": "cpu"}}
    near = {"offload_param": HOST}
    engine = start("bf16", **far)
    train_model(engine, "bf16", steps=3)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(f"{folder}/whole")
    state = load_file(f"{folder}/whole/model.safetensors")
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in wholes(engine).items())
    told, left = train_model(engine, "bf16", steps=3), wholes(engine)
    engine.destroy()
    found = []
    for sections in (far, near, {}):
        other = start("bf16", **sections)
        other.load_checkpoint(folder)
        is_same = train_model(other, "bf16", steps=3) == told
        values = wholes(other)
        found.append((is_same, [name for name in left if not torch.equal(values[name], left[name])]))
        other.destroy()
    return found


@pytest.mark.parametrize("ranks", choice([1, 2], [2]))
def test_a_checkpoint_does_not_know_where_parameters_rested(world, tmp_path, ranks):
    for found in world(ranks).run(resumed, str(tmp_path)):
        assert found == [(True, [])] * 3


def saved_beside(param, folder):
    """Two saves of which the first writes nothing before somebody who changes a frozen parameter waits for it."""
    use_behind()
    engine = start("bf16", offload_param={"nvme_path": f"{folder}/swap", **param}, offload_optimizer={"device": "cpu"})
    train_model(engine, "bf16", steps=2)
    frozen = engine.module.layers[2].weight
    gate, copied = threading.Event(), []
    wait, write, copy = Readers.wait, protocol.write_items, protocol.Staging._copied

    def wait_and_tell(readers):
        if readers._count:
            gate.set()
        wait(readers)

    def write_late(*args, **kwargs):
        gate.wait()
        return write(*args, **kwargs)

    def copy_and_tell(staging, number, item, *rest):
        copied.append(item.piece.name)
        return copy(staging, number, item, *rest)

    Readers.wait, protocol.write_items, protocol.Staging._copied = wait_and_tell, write_late, copy_and_tell
    before = wholes(engine)
    engine.save_checkpoint(folder, tag="beside", async_save=True)
    seen = mizzen.zero.safe_get_full_fp32_param(frozen)  # to read it needs nobody to wait
    with torch.no_grad():
        engine(torch.ones(2, 8, dtype=torch.bfloat16))
    is_early = gate.is_set()
    with mizzen.zero.GatheredParameters(frozen, modifier_rank=0), torch.no_grad():
        frozen.fill_(0.5)
    has_waited = gate.is_set()
    gate.set()
    engine.finish_saving()
    after = wholes(engine)
    engine.save_checkpoint(folder, tag="last", async_save=True)
    engine.destroy()
    different = []
    for tag, values in (("beside", before), ("last", after)):
        other = start("bf16")
        other.load_checkpoint(folder, tag=tag)
        found = wholes(other)
        different += [(tag, name) for name in values if not torch.equal(found[name], values[name])]
        other.destroy()
    held = torch.equal(seen, before["layers.2.weight"]), after["layers.2.weight"].unique().tolist()
    return is_early, has_waited, different, sorted(name for name in copied if "layers.2" in name), held


@pytest.mark.parametrize("param", [HOST, pytest.param(FAR, marks=pytest.mark.wide)], ids=["host", "nvme"])
def test_a_save_beside_training_reads_frozen_parameters_where_they_rest(world, tmp_path, param):
    for is_early, has_waited, different, copied, held in world(2).run(saved_beside, param, str(tmp_path)):
        assert copied == []
        assert (is_early, has_waited) == (False, True)
        assert different == []
        assert held == (True, [0.5])


def put_away(sections):
    """What a run tells whose engine leaves the device between two steps, and what one tells that stays."""
    use_behind()
    found = []
    for is_away in (False, True):
        engine = start("bf16", **sections)
        told = train_model(engine, "bf16", steps=2)
        if is_away:
            engine.offload_states()
            engine.reload_states()
        found.append(told + train_model(engine, "bf16", steps=2))
        engine.destroy()
    return found


def test_an_engine_may_leave_the_device_whose_parameters_rest_elsewhere(world):
    for sections in ({"offload_param": HOST}, {"offload_param": HOST, "offload_optimizer": {"device": "cpu"}}):
        ((stayed, left),) = world(1).run(put_away, sections)
        assert stayed == left
