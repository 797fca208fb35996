"""Tiny models of transformers with rotary attention, RMSNorm and gated layers, and what one batch gives on them."""

import torch

from groups import Later
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.model.sketch import Sketch
from mizzen.plan.parts import Part
from mizzen.rewrite.fused import Fused, FusedChoice

transformers = Later("transformers")

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "head_dim": 8,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
KEYS = ("head_loss", "rms_norm", "rotary", "swiglu")
ALL = dict.fromkeys(KEYS, True) | {"head_chunk": 5}


def build(family: str = "Llama", **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for module in model.modules():  # norms start as ones, which would hide a weight that is forgotten
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.normal_(module.weight, mean=1.0, std=0.3)
    return model


def batch(samples: int = 2, length: int = 9) -> dict:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def choose(model, sections=None, **keys) -> FusedChoice | None:
    return Fused().wants(load({"fused": keys} | (sections or {})), Layout(), (Sketch.of(model),))


def fuse(model, **keys):
    Fused().apply((Part(model),), choose(model, **keys), None)
    return model


def gradients(model, **more) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch(), use_cache=False, **more).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
