"""A run that DeepSpeed has saved goes on at another layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mizzen
from mizzen.checkpoint.convert import convert
from mizzen.checkpoint.open import open_source
from mizzen.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state
from unit.checkpoint.test_fp32 import HERE, Tiny


def go_on(folder, stage):
    """What an engine has after loading: masters and first moments by name, and the report of one more step."""
    torch.manual_seed(3)
    model = Tiny()
    model.adapted.base.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "progress": {"enabled": False},
    }
    engine, *_ = mizzen.initialize(model=model, config=config)
    path, _ = engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    trained = {name: p for name, p in engine.module.named_parameters(remove_duplicate=True) if p.requires_grad}
    masters = {name: safe_get_full_fp32_param(p) for name, p in trained.items()}
    moments = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in trained.items()}
    steps = engine.global_steps
    engine.destroy()
    return Path(path).name, steps, masters, moments


@pytest.mark.parametrize(
    ("case", "size", "stage"), [("zero2", 1, 0), ("zero2", 2, 2), ("zero3", 3, 3), ("zero3", 2, 1)]
)
def test_a_saved_run_of_deepspeed_goes_on(world, tmp_path, case, size, stage):
    convert(open_source(HERE / case), tmp_path, "imported")
    told = load_file(HERE / f"{case}.safetensors")
    kept = {kind: {} for kind in ("master", "exp_avg")}
    for key, value in told.items():
        kind, _, name = key.partition("/")
        kept.setdefault(kind, {})[name] = value
    for name, steps, masters, moments in world(size).run(go_on, tmp_path, stage):
        assert (name, steps) == ("imported", 3)
        assert masters.keys() == moments.keys() == kept["exp_avg"].keys()
        for key in moments:
            assert torch.equal(moments[key], kept["exp_avg"][key]), key
            assert torch.equal(masters[key], kept["master"].get(key, kept["model"].get(key))), key
