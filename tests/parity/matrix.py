"""A small model in which all of the matrix finds something to do, and how it trains with and without an engine."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from mizzen.plan.matrix import Combination, keys_of
from mizzen.rewrite.fused_modules import FusedModule
from mizzen.rewrite.recompute import Recomputed

VOCABULARY, WIDTH, LENGTH, SAMPLES, STEPS, BLOCKS = 37, 16, 6, 8, 2, 2


class PlainRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.q, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias of keys has a gradient of zero
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        split = (layer(hidden).view(*hidden.shape[:2], -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(24, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = PlainRMSNorm(), Attention()
        self.second, self.mlp = PlainRMSNorm(), GatedLayer()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.mlp(self.second(hidden))


class Model(nn.Module):
    """Its head is tied to its table, and its loss is its own, as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = PlainRMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def loss_function(self) -> None:
        """That it has one is looked at; that it is not called, too."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if labels is None:
            return logits
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@cache
def reference() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first values and updates of one process, plain torch."""
    model = Model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    rule, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, before, {name: value.detach() - before[name] for name, value in model.named_parameters()}


def config_of(combination: Combination) -> dict:
    """The configuration of a combination; what is compiled, is without a C++ compiler."""
    keys = keys_of(combination)
    zero = keys["zero_optimization"]
    keys["zero_optimization"] = zero | ({"stage3_param_persistence_threshold": 0} if zero["stage"] == 3 else {})
    if "compile" in keys:
        keys["compile"] = keys["compile"] | {"backend": "aot_eager"}
    return keys | {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "progress": {"enabled": False},
        "seed": 1,
    }


def train(combination: Combination) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and whole values of what this rank holds; an error says in which combination."""
    try:
        return _train(combination)
    except Exception as error:
        error.add_note(" / ".join(combination))
        raise


def _train(combination: Combination) -> tuple[list[float], dict[str, Tensor]]:
    engine, *_ = mizzen.initialize(model=Model(), config=config_of(combination))
    check_changes(engine, combination)
    ranks, rank, micros = engine.dp_world_size, engine.get_data_parallel_rank(), engine.gradient_accumulation_steps()
    losses = []
    for step in range(STEPS):
        own = {name: value.chunk(ranks)[rank].chunk(micros) for name, value in batch(step).items()}
        parts = [dict(zip(own, part, strict=True)) for part in zip(*own.values(), strict=True)]
        losses.append(engine.train_batch(iter(parts)).loss)
    values = {
        name: mizzen.zero.safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }
    engine.destroy()
    return losses, values


def check_changes(engine: mizzen.Engine, combination: Combination) -> None:
    """What was asked for is in the blocks that this rank runs, and in all of them."""
    blocks = [module for module in engine.module.modules() if isinstance(module, Block)]
    own = BLOCKS // 2 if "pp 2" in combination else BLOCKS
    assert len(blocks) == own
    forwards = [type(vars(module).get("forward")) for module in engine.module.modules()]
    recomputed = sum(issubclass(kind, Recomputed) for kind in forwards)
    assert recomputed == (0 if "kept" in combination else own)
    fused = sum(issubclass(kind, FusedModule) for kind in forwards)
    wanted = "fused" in combination and "compiled" not in combination
    assert fused >= 3 * own if wanted else not fused
    hooks = (hook for block in blocks for hook in block.attention._forward_pre_hooks.values())
    gathering = sum("_change_argument" in hook.__qualname__ for hook in hooks)
    assert gathering == (own if "tp 2 with cut sequences" in combination else 0)
    compiled = sum(block._compiled_call_impl is not None for block in blocks)
    assert compiled == (own if "compiled" in combination else 0)
