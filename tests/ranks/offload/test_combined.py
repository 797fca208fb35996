"""Parameters that rest outside the device, beside every other way to share a model out: bits of the run without it."""

import gc

import pytest
import torch
from safetensors.torch import load_file, save_file

import mizzen
from breadth import choice
from parity.decoders import MODELS, Decoder
from parity.test_tensor import config, values_of, walk
from ranks.offload.test_gradients import CPU, use_full_device
from ranks.offload.test_parameters import FAR, HOST, Wide, on_device, shards_of
from ranks.parallel.zero.full.models import config as plain_config


def trained(kind, tp, accumulation, zero, more):
    settings = config(tp, 3, "AdamW", 0.3, accumulation, **more)
    settings["zero_optimization"] |= zero
    engine = mizzen.initialize(model=Decoder(**MODELS[kind]), config=settings)[0]
    places = {rest.place for rest in shards_of(engine)}
    losses, norms = walk(engine)
    values = values_of(engine)
    engine.destroy()
    return (losses, norms), values, places


def both(folder, kind, tp, accumulation, zero, offload, more):
    expected, values, _ = trained(kind, tp, accumulation, zero, more)
    use_full_device()
    offload = {key: {"nvme_path": folder, **section} for key, section in offload.items()}
    found, after, places = trained(kind, tp, accumulation, zero | offload, more)
    different = {name: float((values[name] - after[name]).abs().max()) for name in values}
    return found == expected, {name: most for name, most in different.items() if most}, places, len(values)


PARAM = {"offload_param": HOST}
NVME = {"offload_param": FAR, "offload_optimizer": {"device": "nvme"}}
PP = {"pipeline_parallel_size": 2}
FREED = {"stage3_max_live_parameters": 0}
CASES = {
    "pp2": (2, "grouped", 1, 2, {}, PARAM | CPU, PP),
    "pp2 freed": (4, "grouped", 1, 4, FREED, PARAM | CPU, PP),
    "pp2 zero bubble": (2, "grouped", 1, 2, {}, PARAM, PP | {"pipeline": {"schedule": "zero_bubble"}}),
    "pp2 files": (2, "grouped", 1, 2, {}, NVME, PP),
    "tp2": (2, "grouped", 2, 1, {}, PARAM | CPU, {}),
    "tp2 dp2": (4, "runs", 2, 2, {}, PARAM | CPU, {}),
    "tp2 pp2 files": (4, "grouped", 2, 2, {}, NVME, PP),
    "hpz": (4, "grouped", 1, 2, {"zero_hpz_partition_size": 2}, PARAM | CPU, {}),
    "hpz files": (4, "grouped", 1, 1, {"zero_hpz_partition_size": 2}, NVME, {}),
    "mics": (4, "grouped", 1, 2, {"mics_shard_size": 2}, PARAM | CPU, {}),
    "mics files": (4, "grouped", 1, 1, {"mics_shard_size": 2}, NVME, {}),
    "quantized weights": (2, "grouped", 1, 1, {"zero_quantized_weights": True}, PARAM | CPU, {}),
    "quantized gradients": (2, "grouped", 1, 2, {"zero_quantized_gradients": True}, PARAM | CPU, {}),
    "adapters": (2, "adapted", 1, 2, {}, PARAM | CPU, {}),
    "adapters tp2": (2, "adapted", 2, 1, {}, NVME, {}),
    "adapters pp2": (4, "adapted", 1, 2, {}, PARAM | CPU, PP),
}
SHORT = ("pp2", "tp2")


@pytest.mark.parametrize("name", choice(CASES, SHORT))
def test_bits_do_not_depend_on_where_parameters_rest_at_any_layout(world, tmp_path, name):
    ranks, *case = CASES[name]
    for is_same, different, places, count in world(ranks).run(both, str(tmp_path), *case):
        assert is_same
        # One data rank has buckets without offload: a kernel may round the last elements of those differently.
        assert different == {} or (name == "tp2 pp2 files" and max(different.values()) < 1e-6)
        assert count > 2
        assert places == ({"nvme"} if case[4] is NVME else {"host"})


def without_ever_being_whole(folder):
    """Read from files, trained, saved and exported; the most that was on the device at any time."""
    use_full_device()
    gc.collect()
    before, most = on_device(), [0]

    class Watched(list):
        """Looks at the device whenever the model says that it has come so far."""

        def append(self, _):
            most[0] = max(most[0], on_device() - before)

    with torch.device("meta"):
        model = Wide(Watched())
    total = 4 * sum(p.numel() for p in model.parameters())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 4096, **CPU, **PARAM}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    settings = plain_config(3, 1, zero=zero, train_batch_size=2, gradient_clipping=0.0)
    settings["optimizer"]["params"]["weight_decay"] = 0.1
    settings["checkpoint"] = {"weights": f"{folder}/weights"}
    engine = mizzen.initialize(model=model, config=settings)[0]
    for block in engine.module.blocks:
        block.register_full_backward_hook(lambda *_: engine.module.seen.append(None))
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        loss = engine(torch.randn(2, 64, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del loss
        engine.module.seen.append(None)
    engine.save_checkpoint(folder)
    engine.module.seen.append(None)
    engine.save_16bit_model(f"{folder}/exported")
    engine.module.seen.append(None)
    return total, most[0], losses


def plain(values):
    """The losses of plain training, and what it leaves."""
    model = Wide()
    model.load_state_dict(values)
    rule = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for number in range(3):
        loss = model(torch.randn(2, 64, generator=torch.Generator().manual_seed(number)))
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_a_model_is_read_trained_and_saved_without_ever_being_whole_on_the_device(world, tmp_path):
    (tmp_path / "weights").mkdir()
    torch.manual_seed(11)
    values = {name: torch.randn_like(value) / 8 for name, value in Wide().state_dict().items()}
    save_file(values, tmp_path / "weights" / "model.safetensors")
    ((total, most, losses),) = world(1).run(without_ever_being_whole, str(tmp_path))
    expected, left = plain(values)
    assert losses == pytest.approx(expected, rel=1e-5)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.allclose(exported[name], left[name], rtol=1e-4, atol=1e-6) for name in left)
    assert total / 8 < most < total  # of 8 blocks, one gathered, two fetched, and two of gradients on their way
