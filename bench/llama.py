"""The work of `gpu_llama`: Hugging Face's Llama in bf16 with fp32 master weights, for every system of `systems.py`."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.player import Step
from bench.systems import PRETENDED, assemble

BATCHES: Final = 4
"""Batches that lie ready on the device and are used in turn."""


@dataclass(frozen=True, slots=True)
class Size:
    """The model and a micro-batch. As it stands, it has 1.107 B parameters."""

    hidden: int = 2048
    layers: int = 16
    feed: int = 8192
    heads: int = 32
    groups: int = 8
    """Heads of keys and values."""
    vocabulary: int = 32768
    samples: int = 8
    length: int = 2048

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        attention = 2 * self.hidden**2 * (1 + self.groups / self.heads)
        block = attention + 3 * self.hidden * self.feed + 2 * self.hidden
        return int(self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.samples * self.length

    @property
    def flops(self) -> int:
        """Of one step: 6 for each parameter and token, and those of causal attention."""
        return 6 * self.tokens * (self.parameters + self.layers * self.hidden * self.length)


HOLLOW: Final = Size(hidden=64, feed=128, heads=4, groups=2, vocabulary=256, samples=1, length=32)
"""As many tensors and calls as the real one, and next to nothing in them: its time is the host's."""


EAGER: Final = (
    *("plain", "flat", "fsdp2", "deepspeed-0", "deepspeed-1", "deepspeed-2"),
    *("mizzen-0", "mizzen-1", "mizzen-2"),
)
"""A kind, and a ZeRO stage where it has one."""
FULL: Final = (
    *("fsdp2-3", "fsdp2-3+told", "deepspeed-3", "mizzen-3"),
    *(f"{kind}+{ranks}" for ranks in PRETENDED for kind in ("fsdp2-3", "fsdp2-3+told", "mizzen-3")),
)
"""Parameters sharded too; on one rank mizzen has nothing to shard, and wraps nothing."""
TENSOR: Final = tuple(
    f"{kind}+{ranks}"
    for ranks in PRETENDED
    for kind in ("dtensor", "mizzen-0+tp", "mizzen-0+tp+fused", "deepspeed-0+tp")
)
"""Matrices cut over all ranks."""
COMPILED: Final = tuple(f"{name}+compile" for name in (*EAGER, *FULL))
"""Systems with every decoder layer compiled on its own."""
FUSED: Final = tuple(f"{name}+fused" for name in (*EAGER, *FULL, *COMPILED) if name.startswith("mizzen"))
"""Ours with its fused operations; in a compiled layer the compiler has its own, and the head is left."""


def prepare(system: str, settings: dict[str, Any]) -> Step:
    """Build one system; `settings` are the fields of `Size`."""
    size = Size(**settings)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with device:
        model = build(size)
    generator = torch.Generator(device).manual_seed(1)
    shape = (BATCHES, size.samples, size.length)
    extras = system.split("+")
    is_cut = extras[0] == "dtensor" or "tp" in extras
    # Of a table that is cut, a rank that only pretends to have others has its own rows alone.
    rows = size.vocabulary // max(PRETENDED.get(extra, 1) for extra in extras) if is_cut else size.vocabulary
    tokens = torch.randint(0, rows, shape, generator=generator, device=device)
    batches = [{"input_ids": each, "labels": each, "use_cache": False} for each in tokens]
    return assemble(system, model, model.model.layers, lambda number: batches[number % BATCHES])


def build(size: Size) -> LlamaForCausalLM:
    """The model, with random weights."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.feed,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
