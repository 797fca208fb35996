"""A byte-level GPT in three dimensions: matrices over ranks, layers in stages, and copies for the data, with ZeRO.

    mizzen run --num_gpus 8 examples/gpt_3d.py --tp 2 --pp 2 --steps 200

The layers are Megatron's, cut as they are built; the list of them is a PipelineModule, of which each stage builds its
own. One rank without arguments prints the same losses.
"""

import argparse

import torch
from gpt_bytes import library_text
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from mizzen import tensor
from mizzen.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, TiedLayerSpec


class Place(nn.Module):
    """Adds what each place of a sequence has of its own. Tensors are (length, batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 1, width) / 50)

    def forward(self, hidden: Tensor) -> Tensor:
        """What came in, with its places."""
        return hidden + self.weight[: len(hidden)]


class Block(nn.Module):
    """Attention to earlier places, then a small network at each; every rank of a matrix has some heads of both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = tensor.ColumnParallelLinear(width, 3 * width, gather_output=False, stride=3)
        self.out = tensor.RowParallelLinear(width, width, input_is_parallel=True)
        self.up = tensor.ColumnParallelLinear(width, 4 * width, gather_output=False)
        self.down = tensor.RowParallelLinear(4 * width, width, input_is_parallel=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """What came in, with this block's part added."""
        mixed, _ = self.qkv(self.norm1(hidden))
        q, k, v = (each.unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for each in mixed.chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(seen.permute(2, 0, 1, 3).flatten(-2))[0]
        inner, _ = self.up(self.norm2(hidden))
        return hidden + self.down(functional.gelu(inner))[0]


def logits(embed: nn.Module, hidden: Tensor) -> Tensor:
    """The table of tokens once more, as the head: of each rank's part of the vocabulary."""
    return tensor.parallel_lm_logits(hidden, embed.weight)


def loss(found: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens; no rank ever has the logits of the whole vocabulary."""
    return tensor.vocab_parallel_cross_entropy(found, labels.t()).mean()


def layers(width: int, blocks: int) -> list:
    """The model as a list: the first and the last stage share one table."""
    table = (tensor.VocabParallelEmbedding, 256, width)
    return [
        lambda tokens: tokens.t(),
        TiedLayerSpec("embed", *table),
        LayerSpec(Place, width),
        *(LayerSpec(Block, width, heads=4) for _ in range(blocks)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embed", *table, forward_fn=logits),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    mpu = tensor.initialize_model_parallel(args.tp, args.pp)  # before the model: its layers ask for their ranks
    torch.manual_seed(0)
    ranks = PipeModelDataParallelTopology(args.pp, args.tp, mpu.get_data_parallel_world_size())
    model = PipelineModule(layers(args.width, blocks=4), topology=ranks, loss_fn=loss)
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002}},
        "zero_optimization": {"stage": args.stage},
        "progress": {"enabled": False},
        "seed": 0,
    }
    data = [(text[:-1], text[1:]) for text in library_text()]
    engine, *_ = mizzen.initialize(model=model, training_data=data, config=config)
    while engine.global_steps < args.steps:
        report = engine.train_batch()
        if engine.global_rank == 0 and engine.global_steps % max(1, args.steps // 5) == 0:
            print(f"step {engine.global_steps} loss {report.loss:.4f}")
    held = sum(parameter.numel() for parameter in engine.module.parameters())
    print(f"rank {engine.global_rank} holds {held} elements of the model")
    engine.destroy()


if __name__ == "__main__":
    main()
