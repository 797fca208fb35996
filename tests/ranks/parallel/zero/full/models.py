"""Models that are hard to shard, each with a loss; and how they are trained at any stage."""

import torch
from torch import nn
from torch.nn import functional

import mizzen

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Base(nn.Module):
    """A stack of blocks between two layers."""

    def __init__(self, blocks=3, block=Block):
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 1)

    def hidden(self, rows):
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, rows):
        return functional.mse_loss(self.last(self.hidden(rows)).squeeze(-1), rows.sum(-1))


class Long(Base):
    def __init__(self):
        super().__init__(blocks=8)


class TiedBlocks(Base):
    """One matrix in two blocks, another in a block and in the model."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.extra = nn.Linear(2 * WIDTH, WIDTH)
        self.extra.weight = self.blocks[1].down.weight

    def hidden(self, rows):
        return super().hidden(rows) + self.extra(rows.repeat(1, 4))


class Odd(Base):
    """Shapes that do not divide: of 7 and 1 rows, without rows, without dimensions."""

    def __init__(self):
        super().__init__()
        self.seven = nn.Parameter(torch.randn(7, WIDTH))
        self.one = nn.Parameter(torch.randn(1, 40))
        self.single = nn.Parameter(torch.randn(1, 37))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def hidden(self, rows):
        hidden = super().hidden(rows) * self.scalar + self.seven.sum(0)
        return hidden + self.one.view(5, WIDTH).mean(0) + self.single.mean() + self.empty.sum()


class Twice(Base):
    """A block that runs twice, and one that has two names."""

    def __init__(self):
        super().__init__()
        self.blocks.append(self.blocks[0])

    def hidden(self, rows):
        return self.blocks[1](super().hidden(rows))


class Outside(Base):
    """Parameters of blocks in the hands of the model, and of another block."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self.blocks[2], "neighbour", self.blocks[0])

    def hidden(self, rows):
        hidden = super().hidden(rows)
        hidden = functional.linear(hidden, self.blocks[1].up.weight, self.blocks[1].up.bias)
        neighbour = self.blocks[2].neighbour
        return hidden @ neighbour.down.weight.t() + neighbour.down.bias.sum()


class Registered(Outside):
    """The same, registered."""

    def __init__(self):
        super().__init__()
        for parameter in (self.blocks[1].up.weight, self.blocks[0].down.weight):
            mizzen.zero.register_external_parameter(self, parameter)


class Direct(Base):
    """Blocks that are never called: only their methods are."""

    def hidden(self, rows):
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block.forward(hidden)
        return hidden


class Flat(nn.Module):
    """No block at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, rows):
        return functional.mse_loss(self.layers(rows).squeeze(-1), rows.sum(-1))


class Adapted(nn.Module):
    """A frozen bf16 layer with a trained fp32 adapter."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.base = nn.Linear(width, width).bfloat16().requires_grad_(False)
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.a = nn.Linear(width, 2, bias=False)
        self.b = nn.Linear(2, width, bias=False)

    def forward(self, hidden):
        return self.norm(hidden + self.base(hidden.bfloat16()).float() + self.b(self.a(hidden)))


class Lora(Base):
    def __init__(self):
        super().__init__(block=Adapted)
        self.first.requires_grad_(False)


class Dtypes(Base):
    """fp32, bf16 and fp64 in one unit."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.gain = nn.Linear(WIDTH, WIDTH).double()
            block.low = nn.Linear(WIDTH, WIDTH).bfloat16()
            block.forward = _mixed.__get__(block)


def _mixed(self, hidden):
    hidden = Block.forward(self, hidden)
    return hidden + self.gain(hidden.double()).float() + self.low(hidden.bfloat16()).float()


class Branching(Base):
    """A branch inside a block that depends on the data."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.other = nn.Linear(WIDTH, WIDTH)
            block.forward = _branching.__get__(block)


def _branching(self, hidden):
    if hidden[0, 0] > 0:
        return Block.forward(self, hidden)
    return hidden + self.other(hidden)


class Checkpointed(Base):
    def hidden(self, rows):
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
        return hidden


MODELS = {
    kind.__name__: kind
    for kind in (
        Base,
        Long,
        TiedBlocks,
        Odd,
        Twice,
        Outside,
        Registered,
        Direct,
        Flat,
        Lora,
        Dtypes,
        Branching,
        Checkpointed,
    )
}


def rows(step, rank, count=4):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def config(stage, ranks, **changes):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | changes.pop("zero", {})
    return {
        "train_batch_size": 4 * ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "gradient_clipping": 0.5,
        "progress": {"enabled": False},
        **changes,
    }


def start(kind, stage, **changes):
    torch.manual_seed(3)
    model = MODELS[kind]() if isinstance(kind, str) else kind
    ranks = torch.distributed.get_world_size()
    return mizzen.initialize(model=model, config=config(stage, ranks, **changes))[0]


def train(kind, stage, steps=4, **changes):
    """Losses and norms of some steps, and the masters after them."""
    engine = start(kind, stage, **changes)
    accumulation = engine.gradient_accumulation_steps()
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulation):
            engine.backward(engine(rows(step * accumulation + micro, engine.global_rank, 4 // accumulation)))
            report = engine.step()
        assert report.applied, report.reason
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms, values_of(engine)


def values_of(engine):
    get = mizzen.zero.safe_get_full_fp32_param
    return {name: get(p) for name, p in engine.module.named_parameters() if p.requires_grad}
