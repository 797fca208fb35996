"""An engine, or its optimizer, in the hands of something that takes a plain module or optimizer: our own error."""

import copy
import io
import pickle

import pytest
import torch

from ranks.parallel.zero.full.models import rows, start
from ranks.parallel.zero.full.test_access import touched


def handed_over(stage: int) -> dict[str, bool]:
    engine = start("Base", stage)
    data = rows(0, engine.global_rank)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(data)).backward()
    found = {
        "scaler": "fp16.enabled" in touched(lambda: scaler.step(engine.optimizer)),
        "engine saved": "save_checkpoint" in touched(lambda: torch.save(engine, io.BytesIO())),
        "engine pickled": "save_checkpoint" in touched(lambda: pickle.dumps(engine)),
        "engine copied": "save_checkpoint" in touched(lambda: copy.deepcopy(engine)),
        "optimizer saved": "state_dict()" in touched(lambda: torch.save(engine.optimizer, io.BytesIO())),
        "optimizer copied": "state_dict()" in touched(lambda: copy.deepcopy(engine.optimizer)),
    }
    engine.zero_grad()
    idle = torch.amp.GradScaler("cpu", enabled=False)
    engine.backward(idle.scale(engine(data)))
    idle.step(engine.optimizer)
    found["a scaler that does nothing"] = engine.last_step.applied
    if stage == 3:
        found["compiled"] = "engine.compile()" in touched(lambda: torch.compile(engine))
        found["its model compiled"] = "engine.compile()" in touched(lambda: torch.compile(engine.module))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_error_is_ours_and_has_a_way_out(world, stage):
    for found in world(2).run(handed_over, stage):
        assert [what for what, holds in found.items() if not holds] == []


def resized() -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8))
    engine = start(model, 3)

    def resize():
        engine.module.resize_token_embeddings(40)
        engine(input_ids=torch.zeros(1, 4, dtype=torch.long))

    return touched(resize)


def test_embeddings_are_not_resized_under_an_engine(world):
    pytest.importorskip("transformers")
    for found in world(2).run(resized):
        assert "wte.weight" in found
