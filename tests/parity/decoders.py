"""Small models of the kinds that tensor parallelism meets, written as people write them: nothing knows of ranks."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH = 37, 16, 7


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, given: Tensor) -> Tensor:
        return given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Queries and fewer keys and values, each with a norm of its own per head."""

    def __init__(self, heads: int, kv: int, *, fused: str = "") -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.fused = heads, kv, 4, fused
        self.groups = heads // kv
        if fused:
            self.qkv = nn.Linear(WIDTH, (heads + 2 * kv) * 4)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n * 4, bias=n == heads) for n in (heads, kv, kv))
            self.q_norm, self.k_norm = Norm(4), Norm(4)
        self.out = nn.Linear(heads * 4, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.parts(hidden)
        k, v = (each.repeat_interleave(self.groups, 1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def parts(self, hidden: Tensor) -> list[Tensor]:
        if self.fused == "runs":
            sizes = [self.num_heads * 4, self.num_kv_heads * 4, self.num_kv_heads * 4]
            found = self.qkv(hidden).split(sizes, -1)
        elif self.fused == "stacked":
            found = self.qkv(hidden).view(*hidden.shape[:2], 3, self.num_heads, 4).unbind(2)
        elif self.fused == "interleaved":
            found = self.qkv(hidden).view(*hidden.shape[:2], self.num_heads, 3, 4).unbind(3)
        else:
            found = [self.q(hidden), self.k(hidden), self.v(hidden)]
        q, k, v = (each.reshape(*hidden.shape[:2], -1, 4).transpose(1, 2) for each in found)
        return [q, k, v] if self.fused else [self.q_norm(q), self.k_norm(k), v]


class LatentAttention(nn.Module):
    """Keys and values come out of a few features, and the last of these are keys for all heads."""

    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.num_heads, self.how = heads, how
        self.q, self.squeeze = nn.Linear(WIDTH, heads * 6), nn.Linear(WIDTH, 5 + 2)
        self.norm, self.spread = Norm(5), nn.Linear(5, heads * (4 + 3))
        self.out = nn.Linear(heads * 3, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        few, shape = self.squeeze(hidden), hidden.shape[:2]
        inner, shared = few.split([5, 2], -1) if self.how == "latent" else (few[..., :5], few[..., 5:])
        keys, values = self.spread(self.norm(inner)).view(*shape, -1, 7).transpose(1, 2).split([4, 3], -1)
        keys = self.with_shared(keys, shared.unsqueeze(1).expand(-1, keys.shape[1], -1, -1))
        queries = self.q(hidden).view(*shape, -1, 6).transpose(1, 2)
        if self.how == "latent":
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            scores = queries @ keys.transpose(2, 3) / 6**0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        return self.out(mixed.transpose(1, 2).flatten(2))

    def with_shared(self, keys: Tensor, shared: Tensor) -> Tensor:
        if self.how == "latent":
            return torch.cat([keys, shared], -1)
        found = keys.new_empty(*keys.shape[:-1], 6)
        found[..., :4] = keys
        found[..., 4:] = shared
        return found


class Mlp(nn.Module):
    def __init__(self, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up, self.down = nn.Linear(WIDTH, inner * (1 + gated)), nn.Linear(inner, WIDTH)
        self.scale = nn.Parameter(torch.rand(inner) + 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.up(hidden)
        if self.gated:
            gate, value = found.chunk(2, -1)
            found = functional.silu(gate) * value
        return self.down(functional.gelu(found) * self.scale)


class Adapted(nn.Module):
    """A frozen layer and a small one beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.low, self.high = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.high(self.low(hidden))


class Block(nn.Module):
    def __init__(self, heads: int, kv: int, inner: int, fused: str) -> None:
        super().__init__()
        self.first, self.second = Norm(WIDTH), nn.LayerNorm(WIDTH)
        is_latent = fused.startswith("latent")
        self.attention = LatentAttention(heads, fused) if is_latent else Attention(heads, kv, fused=fused)
        self.mlp = Mlp(inner, gated=fused != "interleaved")

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.mlp(self.second(hidden))


class Decoder(nn.Module):
    """Predicts the next token; returns the mean loss, or logits where it is told to."""

    def __init__(self, heads=4, kv=2, inner=24, fused="", tied=True, adapted=False, blocks=2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, kv, inner, fused) for _ in range(blocks))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if adapted:
            for block in self.blocks:
                block.attention.q, block.attention.out = Adapted(block.attention.q), Adapted(block.attention.out)

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens)[:, :-1].reshape(-1, VOCABULARY)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1))


MODELS = {
    "grouped": {},
    "one key": {"kv": 1},
    "runs": {"fused": "runs"},
    "stacked": {"fused": "stacked", "kv": 4},
    "interleaved": {"fused": "interleaved", "kv": 4, "tied": False},
    "uneven": {"heads": 6, "kv": 3, "inner": 23},
    "adapted": {"adapted": True, "kv": 4},
    "latent": {"fused": "latent"},
    "latent, written": {"fused": "latent, written", "heads": 3},
}
