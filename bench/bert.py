"""The work of `gpu_bert`: pre-training of Hugging Face's BERT-large in bf16 with fp32 masters, for every system."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from bench.player import Step
from bench.systems import assemble

BATCHES: Final = 4
"""Batches that lie ready on the device and are used in turn."""
LABELLED: Final = 0.15
"""The part of all tokens that has a label."""

SYSTEMS: Final = ("plain", "plain+whole", "deepspeed-2", "mizzen-2", "mizzen-2+compile", "mizzen-2+compile+fused")
"""A kind, its ZeRO stage, and how it is compiled: all at once, or layer by layer."""
OTHERS: Final = ("plain+compile", "flat+compile", "deepspeed-2+compile", "deepspeed-2+whole", "mizzen-2+fused")


@dataclass(frozen=True, slots=True)
class Size:
    """The model and a micro-batch. As it stands, it is BERT-large, with sequences of 128 tokens."""

    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    feed: int = 4096
    vocabulary: int = 30528
    """That of the published models, rounded up to a multiple of 64."""
    samples: int = 128
    length: int = 128

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.samples * self.length

    @property
    def flops(self) -> int:
        """Of the products of one step. The head counts for tokens with a label, whoever computes it for all."""
        block = 4 * self.hidden**2 + 2 * self.hidden * self.feed
        attention = 2 * self.layers * self.hidden * self.length
        head = LABELLED * self.vocabulary * self.hidden
        return int(6 * self.tokens * (self.layers * block + attention + self.hidden**2 + head))


def prepare(system: str, settings: dict[str, Any]) -> Step:
    """Build one system; `settings` are the fields of `Size`."""
    size = Size(**settings)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with device:
        model = build(size)
    batches = [batch(size, number, device) for number in range(BATCHES)]
    return assemble(system, model, model.bert.encoder.layer, lambda number: batches[number % BATCHES])


def batch(size: Size, number: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens of two sentences, of which some are masked and have a label."""
    generator = torch.Generator().manual_seed(number)
    shape = (size.samples, size.length)
    tokens = torch.randint(0, size.vocabulary, shape, generator=generator)
    is_masked = torch.rand(shape, generator=generator) < LABELLED
    second = torch.arange(size.length).expand(shape) >= size.length // 2
    made = {
        "input_ids": tokens.masked_fill(is_masked, 0),
        "labels": tokens.masked_fill(~is_masked, -100),
        "token_type_ids": second.long(),
        "next_sentence_label": torch.randint(0, 2, (size.samples,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def build(size: Size) -> BertForPreTraining:
    """The model, with random weights and its usual dropout."""
    config = BertConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.feed,
        vocab_size=size.vocabulary,
        max_position_embeddings=512,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return BertForPreTraining(config)  # type: ignore[no-untyped-call]
