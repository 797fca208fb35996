"""A small transformer with all that recomputation can get wrong: dropout, attention, keywords, tuples, a tied head."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 40


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, scale: Tensor, *, rotation: tuple[Tensor, Tensor], loud: bool = False) -> Tensor:
        turned = self.norm(hidden) * rotation[0] + rotation[1]
        query, key, value = (part.unsqueeze(1) for part in self.mix(turned).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        hidden = hidden + self.drop(self.out(mixed)) * scale
        return hidden + self.drop(self.down(functional.gelu(self.up(hidden)))) * (2 if loud else 1)


class Transformer(nn.Module):
    """Predicts the next token; returns the mean loss."""

    def __init__(self, *, layers: int = 4, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens[:, :-1])
        rotation = (torch.ones(hidden.shape[-1]), torch.zeros(hidden.shape[-1]))
        for block in self.blocks:
            hidden = block(hidden, scale=self.scale, rotation=rotation)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def build(**keys) -> Transformer:
    torch.manual_seed(11)
    return Transformer(**keys)


def tokens_of(step: int, rank: int = 0, *, length: int = 12, samples: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (samples, length), generator=generator)


def config_of(stage: int, world: int, **keys) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "seed": 5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2000,
            "stage3_param_persistence_threshold": 20,
        },
        "progress": {"enabled": False},
        **keys,
    }
