"""A small GPT of the layers of `mizzen.tensor`, as models for Megatron are written: sequence first, bias apart."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mizzen import tensor

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 37, 8, 4, 8, 2


class Attention(nn.Module):
    def __init__(self, group, sequence: bool, drop: float) -> None:
        super().__init__()
        ranks = group.size() if group is not None else 1
        options = {"sequence_parallel": sequence, "tp_group": group}
        self.heads, self.size, self.drop, self.group = HEADS // ranks, WIDTH // HEADS, drop, group
        self.qkv = tensor.ColumnParallelLinear(WIDTH, 3 * WIDTH, gather_output=False, stride=3, **options)
        self.out = tensor.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=True, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, _ = self.qkv(x)
        length, samples, _ = mixed.shape
        q, k, v = (
            each.reshape(length, samples, self.heads, self.size).permute(1, 2, 0, 3) for each in mixed.chunk(3, -1)
        )
        with tensor.get_cuda_rng_tracker().fork(tp_group=self.group):  # each rank has other heads
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0
            )
        return self.out(attended.permute(2, 0, 1, 3).reshape(length, samples, -1))


class Block(nn.Module):
    def __init__(self, group, sequence: bool, drop: float) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence, "tp_group": group}
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(group, sequence, drop)
        self.up = tensor.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **options)
        self.down = tensor.RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, **options)
        if sequence:
            tensor.mark_sequence_parallel(self.norm1, self.norm2)

    def forward(self, x: Tensor) -> Tensor:
        attended, bias = self.attention(self.norm1(x))
        x = x + attended + bias
        hidden, _ = self.up(self.norm2(x))
        return x + self.down(functional.gelu(hidden))[0]


class GPT(nn.Module):
    """Takes tokens and targets of shape (samples, length); the mean loss of all tokens."""

    def __init__(self, group=None, *, sequence: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.group, self.sequence = group, sequence
        self.embed = tensor.VocabParallelEmbedding(
            VOCABULARY, WIDTH, nn.init.normal_, reduce_scatter_embeddings=sequence, tp_group=group
        )
        self.place = nn.Parameter(torch.randn(LENGTH, 1, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block(group, sequence, drop) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        if sequence:
            tensor.mark_sequence_parallel(self.norm)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = tensor.scatter_to_sequence_parallel_region(self.place, self.group) if self.sequence else self.place
        x = self.embed(tokens.t()) + place
        for block in self.blocks:
            x = block(x)
        logits = tensor.parallel_lm_logits(
            self.norm(x), self.embed.weight, sequence_parallel=self.sequence, tp_group=self.group
        )
        return tensor.vocab_parallel_cross_entropy(
            logits, targets.t(), vocab_size=VOCABULARY, tp_group=self.group
        ).mean()


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
