"""Models that do something between their blocks, or have adapters beside their layers, written as people write them."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from parity.decoders import VOCABULARY, WIDTH, Attention, Block, Mlp, Norm


class Stack(nn.Module):
    """Predicts the next token; what stands between its blocks is up to those that come of it."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(count))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.more = 0.0

    def block(self) -> nn.Module:
        return Block(4, 2, 24, "")

    def between(self, hidden: Tensor, at: int) -> Tensor:
        return hidden

    def stream(self, hidden: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            hidden = self.between(block(hidden), at)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        self.more = 0.0
        logits = self.head(self.norm(self.stream(self.embed(tokens))))[:, :-1].reshape(-1, VOCABULARY)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1)) + self.more


class Norms(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(WIDTH) for _ in self.blocks)

    def between(self, hidden, at):
        return self.norms[at](hidden)


class Scales(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def between(self, hidden, at):
        return hidden * self.scale


class Links(Stack):
    """A whole layer behind each block."""

    def __init__(self) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.blocks)

    def between(self, hidden, at):
        return self.links[at](hidden)


class Shifted(Stack):
    """Each token sees the one before it, between two blocks."""

    def between(self, hidden, at):
        return hidden + functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class Early(Stack):
    """A second head reads what the first block gives."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(WIDTH, 3)

    def between(self, hidden, at):
        if at == 0:
            self.more = self.early(hidden).pow(2).mean()
        return hidden


class Remembering(Stack):
    """Each block is given what the first was given as well, added up."""

    def stream(self, hidden):
        first = hidden
        for block in self.blocks:
            hidden = block(hidden) + first
        return hidden


class Half(nn.Module):
    """A block of attention alone, or of what stands beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = Norm(WIDTH), inner

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(self.norm(hidden))


class TwoLists(Stack):
    """Attention and what stands beside it are in lists of their own."""

    def __init__(self) -> None:
        super().__init__(0)
        self.attentions = nn.ModuleList(Half(Attention(4, 2)) for _ in range(2))
        self.others = nn.ModuleList(Half(Mlp(24, gated=True)) for _ in range(2))

    def stream(self, hidden):
        for attention, other in zip(self.attentions, self.others, strict=True):
            hidden = other(attention(hidden))
        return hidden


STACKS = {
    "plain": (Stack, [["blocks.0", "blocks.1", "blocks.2"]]),
    "norms": (Norms, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "a parameter": (Scales, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "whole layers": (Links, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "tokens that meet": (Shifted, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "a second head": (Early, [["blocks.0"], ["blocks.1", "blocks.2"]]),
    "what came first": (Remembering, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "two lists": (TwoLists, [["attentions.0", "others.0", "attentions.1", "others.1"]]),
    "a whole block": (Stack, [["blocks.0"], ["blocks.2"]]),
}
"""What stands between the blocks of a model, and the blocks that hand parts of sequences on to each other."""
SECTIONS = {
    "a whole block": {
        "partition_config": {"layer_specs": [{"patterns": [r"blocks\.1\."], "partition_type": "skip"}]},
    }
}
"""More of the section `tensor_parallel`, where a model needs it."""


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, with the names and in the order of peft's LoRA."""

    def __init__(self, base: nn.Module, dropout: float) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        inputs, outputs = (rows, columns) if type(base).__name__ == "Conv1D" else (columns, rows)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.base_layer(hidden)
        low = self.lora_A["default"](self.lora_dropout["default"](hidden))
        return (found + self.lora_B["default"](low) * 2.0).to(found.dtype)


def adapted(model: nn.Module, pattern: str, dropout: float = 0.0) -> nn.Module:
    """The model with adapters beside the layers whose paths end like that, of which nothing else is trained."""
    model.requires_grad_(False)
    torch.manual_seed(11)
    for path in list(_fitting(model, pattern)):
        around, _, name = path.rpartition(".")
        setattr(model.get_submodule(around), name, Adapted(model.get_submodule(path), dropout))
    return model


def _fitting(model: nn.Module, pattern: str) -> Iterator[str]:
    for path, _ in model.named_modules():
        if re.search(f"(?:{pattern})$", path):
            yield path
