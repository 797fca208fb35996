"""A GPT whose matrices are cut over ranks by the configuration alone: the model knows nothing of it.

    python examples/tensor.py
    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/tensor.py --tp 2

All runs print the same losses: two tensor-parallel ranks see the same samples, and pairs of them different ones.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen

WIDTH, HEADS, VOCABULARY, LENGTH, SAMPLES = 64, 4, 257, 32, 8


class Block(nn.Module):
    """Attention and a feed-forward layer, as anybody writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """One layer of the model."""
        parts = self.qkv(self.before_attention(hidden)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.before_mlp(hidden))))


class Gpt(nn.Module):
    """Predicts the next byte; returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each byte but the first."""
        hidden = self.embed(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": options.tp},
        "seed": 1,
    }
    engine, *_ = mizzen.initialize(model=Gpt(), config=config)
    text = torch.frombuffer(bytearray(__doc__ * 4, "utf-8"), dtype=torch.uint8).long()
    for step in range(options.steps):
        starts = torch.randint(len(text) - LENGTH, (SAMPLES,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[start : start + LENGTH] for start in starts])
        mine = batch.chunk(engine.dp_world_size)[engine.get_data_parallel_rank()]
        report = engine.train_batch(iter([mine]))
        if engine.global_rank == 0:
            print(f"step {step} loss {report.loss:.4f}")


if __name__ == "__main__":
    main()
