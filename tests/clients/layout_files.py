"""Models of transformers that go from one layout to the next by files, in every way that there is, on four ranks."""

from pathlib import Path

import torch
import transformers as hf

import mizzen
from breadth import FULL
from clients.drive_tensor import SAMPLES, batch, built
from mizzen import comm
from mizzen.cli.main import main as command

KINDS = ("llama", "gpt2")
"""One whose head is its own, and one whose head is tied to its embeddings."""
LAYOUTS = ((1, 2, 2, 1), (2, 1, 2, 3), (2, 2, 1, 3), (1, 4, 1, 0))
"""Data ranks, tensor ranks, stages, ZeRO stage."""
WRITERS = {kind: range(4) for kind in KINDS} if FULL else {"llama": (0, 2), "gpt2": (1, 3)}
"""The layouts from which a model is written, by their numbers."""
WAYS = ("from_pretrained", "meta", "imported")
"""How a folder of a model comes into a layout."""


def engine_of(model: torch.nn.Module, layout: tuple) -> mizzen.Engine:
    """An engine for a model at a layout."""
    _, tp, pp, stage = layout
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "tensor_parallel": {"autotp_size": tp},
        "pipeline_parallel_size": pp,
        "progress": {"enabled": False},
        "seed": 1,
    }
    return mizzen.initialize(model=model, config=config)[0]


def step(engine: mizzen.Engine, number: int) -> float:
    """The loss of a step."""
    ranks, rank, parts = engine.dp_world_size, engine.get_data_parallel_rank(), engine.gradient_accumulation_steps()
    mine = {name: value.chunk(ranks)[rank].chunk(parts) for name, value in batch(engine.module, number).items()}
    micros = [dict(zip(mine, part, strict=True)) for part in zip(*mine.values(), strict=True)]
    return engine.train_batch(iter(micros)).loss


def values_of(engine: mizzen.Engine) -> dict[str, torch.Tensor]:
    """Whole values of what this rank has a part of."""
    return {
        name: mizzen.zero.safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }


def write(kind: str, layout: tuple, folder: Path) -> dict[str, torch.Tensor]:
    """Train a model at a layout, and write it as a checkpoint and in the two ways for others; gives its values."""
    model = built(kind)
    engine = engine_of(model, layout)
    for number in range(2):
        step(engine, number)
    engine.save_checkpoint(folder / "checkpoints")
    engine.save_16bit_model(folder / "saved", "model.safetensors")
    if comm.get_rank() == 0:
        words = ("checkpoint", "export", folder / "checkpoints", "--to", folder / "exported", "--dtype", "saved")
        assert command([*map(str, words)]) == 0
        for name in ("saved", "exported"):
            model.config.save_pretrained(folder / name)
    comm.barrier()
    values = values_of(engine)
    engine.destroy()
    return values


def read_alone(folder: Path, values: dict[str, torch.Tensor]) -> tuple[dict[str, bool], torch.nn.Module]:
    """Whether one process that reads a folder has these values, name by name."""
    model, told = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(told.values()), told
    found = dict(model.named_parameters(remove_duplicate=False))
    return {name: torch.equal(found[name], value) for name, value in values.items()}, model


def read_at(layout: tuple, way: str, folder: Path, kind: str) -> mizzen.Engine:
    """An engine of a folder of a model, at a layout."""
    if way == "from_pretrained":
        return engine_of(hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), layout)
    if way == "meta":
        with torch.device("meta"):
            model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder))
        return engine_of(model, layout)
    if comm.get_rank() == 0:
        assert command(["checkpoint", "import", str(folder), "--to", str(folder / "imported")]) == 0
    comm.barrier()
    engine = engine_of(built(kind), layout)  # its values are those of before any step
    assert engine.load_checkpoint(folder / "imported", load_module_only=True)[0] is not None
    return engine


def exchange(kind: str, folder: Path) -> dict:
    """Each layout writes, one process reads, and the next layout reads, too."""
    found: dict = {"names": [name for name, _ in built(kind).named_parameters(remove_duplicate=False)], "same": []}
    for number in WRITERS[kind]:
        layout = LAYOUTS[number]
        place = folder / kind / str(number)
        values = write(kind, layout, place)
        for name in ("saved", "exported"):
            same, model = read_alone(place / name, values)
            found["same"].append([f"{name} of {layout}", same])
        whole = dict(model.named_parameters(remove_duplicate=False))
        model.config.use_cache = False
        loss = model(**batch(model, 5)).loss.item()
        following, way = LAYOUTS[(number + 1) % len(LAYOUTS)], WAYS[(number + KINDS.index(kind)) % len(WAYS)]
        engine = read_at(following, way, place / "saved", kind)
        same = {name: torch.equal(whole[name], value) for name, value in values_of(engine).items()}
        found["same"].append([f"{way} of {layout} at {following}", same])
        found.setdefault("losses", []).append([step(engine, 5), loss])
        engine.destroy()
    return found
