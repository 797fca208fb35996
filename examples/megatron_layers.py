"""A byte-level GPT of layers that are cut over tensor-parallel ranks, as models for Megatron are written.

On four ranks, two for each matrix: mizzen run --num_gpus 4 examples/megatron_layers.py --tp 2 --sequence_parallel
"""

import argparse

import torch
from gpt_bytes import library_text
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from mizzen import tensor


class Block(nn.Module):
    """Attention to earlier places, then a small network at each. Tensors are (length, batch, width), as in Megatron."""

    def __init__(self, width: int, heads: int, cut: bool) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Q, K and V are three matrices in one: each rank has some heads of each.
        self.qkv = tensor.ColumnParallelLinear(width, 3 * width, gather_output=False, stride=3, sequence_parallel=cut)
        self.out = tensor.RowParallelLinear(width, width, input_is_parallel=True, sequence_parallel=cut)
        self.up = tensor.ColumnParallelLinear(width, 4 * width, gather_output=False, sequence_parallel=cut)
        self.down = tensor.RowParallelLinear(4 * width, width, input_is_parallel=True, sequence_parallel=cut)
        if cut:  # each rank norms its part of the sequence, and their gradients are summed
            tensor.mark_sequence_parallel(self.norm1, self.norm2)

    def forward(self, hidden: Tensor) -> Tensor:
        """What came in, with this block's part added."""
        mixed, _ = self.qkv(self.norm1(hidden))
        q, k, v = (each.unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for each in mixed.chunk(3, -1))
        with tensor.get_cuda_rng_tracker().fork():  # other heads on each rank, and so another dropout
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        hidden = hidden + self.out(seen.permute(2, 0, 1, 3).flatten(-2))[0]
        inner, _ = self.up(self.norm2(hidden))
        return hidden + self.down(functional.gelu(inner))[0]


class GPT(nn.Module):
    """Given tokens of shape (batch, length), it returns the mean loss of predicting each from those before it."""

    def __init__(self, width: int, layers: int, heads: int, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.embed = tensor.VocabParallelEmbedding(256, width, reduce_scatter_embeddings=cut)
        self.place = nn.Parameter(torch.randn(128, 1, width) / 50)
        self.blocks = nn.Sequential(*(Block(width, heads, cut) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        if cut:
            tensor.mark_sequence_parallel(self.norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss. No rank ever has the logits of the whole vocabulary."""
        place = tensor.scatter_to_sequence_parallel_region(self.place) if self.cut else self.place
        hidden = self.norm(self.blocks(self.embed(tokens[:, :-1].t()) + place))
        logits = tensor.parallel_lm_logits(hidden, self.embed.weight, sequence_parallel=self.cut)
        return tensor.vocab_parallel_cross_entropy(logits, tokens[:, 1:].t()).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    mpu = tensor.initialize_model_parallel(args.tp)  # before the model: its layers ask for the ranks of a matrix
    torch.manual_seed(0)  # alike on all ranks: a layer draws the whole matrix, and keeps its part
    model = GPT(args.width, layers=2, heads=4, cut=args.sequence_parallel)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002}},
        "zero_optimization": {"stage": args.stage},
        "progress": {"enabled": False},
        "seed": 0,
    }
    engine, _, loader, _ = mizzen.initialize(model=model, training_data=library_text(), config=config, mpu=mpu)
    batches = iter(mizzen.RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        report = engine.train_batch(batches)
        if engine.global_rank == 0 and engine.global_steps % max(1, args.steps // 5) == 0:
            print(f"step {engine.global_steps} loss {report.loss:.4f}")
    held = sum(parameter.numel() for parameter in model.embed.parameters())
    if engine.global_rank == 0:
        print(f"tp={args.tp}: this rank has {held} of {256 * args.width} elements of the embedding")
    engine.destroy()


if __name__ == "__main__":
    main()
