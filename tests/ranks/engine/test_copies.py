"""A model in training can be copied, as for a moving average; the copy is a plain model."""

import copy
import pickle

import torch
from torch import nn

import mizzen


def copy_a_model_in_training() -> tuple[bool, bool, float]:
    model = nn.Linear(4, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    engine, *_ = mizzen.initialize(model=model, config=config | {"bf16": {"enabled": True}})
    twin = copy.deepcopy(model)
    same = torch.equal(twin.weight, model.weight) and twin.weight.data_ptr() != model.weight.data_ptr()
    restored = pickle.loads(pickle.dumps(model))
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).mean())
    engine.step()
    return same, type(restored) is nn.Linear, mizzen.zero.safe_get_full_fp32_param(model.weight).abs().sum().item()


def test_a_model_in_training_can_be_copied(world):
    for same, restored, size in world(2).run(copy_a_model_in_training):
        assert same and restored and size > 0
