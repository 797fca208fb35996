"""A tiny Llama, its batches, and one training run of it under any plan."""

import torch

import mizzen
from groups import Later
from mizzen.rewrite.forward import ReplacedForward
from mizzen.rewrite.head import LateLogits
from ranks.rewrite.programs import config_of

transformers = Later("transformers")

ALL = {"head_loss": True, "head_chunk": 7, "rms_norm": True, "rotary": True, "swiglu": True}
STEPS = 3


def build(tied: bool = False):
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def batch_of(step: int, rank: int) -> dict:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 40, (3, 12), generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100), "use_cache": False}


def train(stage: int, tied: bool = False, frozen: bool = False, **sections) -> tuple:
    """Losses, gradient norms and master values; the model is given back as it was."""
    model = build(tied)
    if frozen:
        model.lm_head.requires_grad_(False)
    engine, *_ = mizzen.initialize(model=model, config=config_of(stage, 2, **sections))
    losses, norms = [], []
    for step in range(STEPS):
        for half in range(2):
            output = engine(**batch_of(2 * step + half, engine.global_rank))
            assert not isinstance(output.logits, LateLogits) or not output.logits.is_computed
            engine.backward(output.loss)
            report = engine.step()
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    values = {
        name: mizzen.zero.safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters() if p.requires_grad
    }
    engine.destroy()
    assert not any(isinstance(vars(module).get("forward"), ReplacedForward) for module in model.modules())
    return losses, norms, values
