"""Strategies for tests alone: a model whose matrices are cut over tp, its blocks over pp, its experts over ep.

Each is a transform of few lines that redraws homes and exchanges tensors in the plainest way there is. If the spine
obeys homes, any mixture of them trains as one process does.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from mizzen.model.home import evenly
from mizzen.plan.losses import Role, Tally, pull
from mizzen.plan.transform import Transform

VOCABULARY, WIDTH, EXPERTS, LENGTH, HEADS = 16, 8, 4, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.enter = self.leave = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.leave(self.down(functional.gelu(self.up(self.enter(self.norm(hidden))))))


class Grouped(nn.Module):
    """Attention whose queries are more than its keys and values, all in one matrix: Q, then K, then V."""

    def __init__(self, kv: int) -> None:
        super().__init__()
        self.kv, size = kv, WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * kv) * size), nn.Linear(WIDTH, WIDTH, bias=False)
        self.enter = self.leave = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        every, size = self.qkv(self.enter(self.norm(hidden))), WIDTH // HEADS
        heads = self.out.weight.shape[1]
        keys = (every.shape[-1] - heads) // 2
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in every.split([heads, keys, keys], dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return hidden + self.leave(self.out(mixed.transpose(1, 2).flatten(2)))


class Crowd(nn.Module):
    """Each token goes to the expert that its place in the sequence says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.gather = self.add = self.own = nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        every = self.gather(hidden)
        place = torch.arange(every.shape[1]) % EXPERTS
        here = [(place == number).view(1, -1, 1) * expert(every) for number, expert in self.mine()]
        return hidden + self.own(self.add(torch.stack(here).sum(0)))

    def mine(self) -> list[tuple[int, nn.Module]]:
        return [(number, each) for number, each in enumerate(self.experts) if isinstance(each, nn.Linear)]


class Toy(nn.Module):
    """With `kv` heads of keys and values there is attention in the place of experts."""

    def __init__(self, kv: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Grouped(kv) if kv else Crowd(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        if isinstance(self.embed, nn.Embedding):
            hidden = self.embed(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        if not isinstance(self.head, nn.Linear):
            return hidden
        logits = self.head(self.norm(hidden)).reshape(-1, VOCABULARY)
        return functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


class Exchange(nn.Module):
    """Forward and backward are a sum over a group, or nothing; or a gathering along the batch."""

    def __init__(self, group, forward: bool, backward: bool) -> None:
        super().__init__()
        self.call = lambda tensor: _Sum.apply(tensor, group, forward, backward)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.call(tensor)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, forward, backward):
        ctx.group, ctx.backward_too = group, backward
        return _added(tensor, group) if forward else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return (_added(gradient, ctx.group) if ctx.backward_too else gradient), None, None, None


def _added(tensor: Tensor, group) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


class Padded(nn.Module):
    """The tokens of a rank among zeros in the places of the others': a sum then gathers them."""

    def __init__(self, group, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks, self.add = rank, ranks, Exchange(group, forward=True, backward=True)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = [hidden if rank == self.rank else torch.zeros_like(hidden) for rank in range(self.ranks)]
        return self.add(torch.cat(rows))


class Own(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

    def forward(self, every: Tensor) -> Tensor:
        return every.chunk(self.ranks)[self.rank]


@dataclass(frozen=True)
class Chosen:
    layout: object
    words: str

    def __str__(self) -> str:
        return self.words


def redrawn(drafts, draw):
    """The same drafts with `draw(name, parameter)` as homes."""
    return tuple(
        replace(draft, parameters=tuple(replace(p, home=draw(p.name, p)) for p in draft.parameters)) for draft in drafts
    )


class Columns(Transform):
    """`up` and `qkv` cut by their outputs, `down` and `out` by their inputs, over tp; everything else is a copy."""

    name = "columns"

    def wants(self, config, layout, drafts):
        return Chosen(layout, "matrices over tp") if layout.tp > 1 else None

    def redraw(self, choice, drafts):
        def draw(name, parameter):
            layer, tp, size = name.split(".")[-2], choice.layout.tp, WIDTH // HEADS
            if layer not in ("up", "down", "qkv", "out"):
                return parameter.home
            dim = 0 if layer in ("up", "qkv") else 1
            if layer != "qkv":
                return parameter.home.cut("tp", dim, evenly(parameter.shape[dim], tp))
            kv = (parameter.shape[0] // size - HEADS) // 2
            keys = evenly(kv * size, min(kv, tp))
            return parameter.home.cut("tp", 0, evenly(WIDTH, tp), keys, keys)

        return redrawn(drafts, draw)

    def apply(self, parts, choice, mesh):
        group = mesh.group("tp")
        for part in parts:
            for block in (module for module in part.module.modules() if isinstance(module, Block | Grouped)):
                block.enter = Exchange(group, forward=False, backward=True)
                block.leave = Exchange(group, forward=True, backward=False)
        return parts


class Flock(Transform):
    """Experts over ep; the ranks of a group show each other all of their tokens."""

    name = "flock"

    def wants(self, config, layout, drafts):
        return Chosen(layout, "experts over ep") if layout.ep > 1 else None

    def redraw(self, choice, drafts):
        each = EXPERTS // choice.layout.ep

        def draw(name, parameter):
            _, found, rest = name.partition(".experts.")
            return parameter.home.at("ep", int(rest.split(".")[0]) // each) if found else parameter.home

        return redrawn(drafts, draw)

    def apply(self, parts, choice, mesh):
        group, ep, place = mesh.group("ep"), choice.layout.ep, mesh.coordinate("ep")
        for part in parts:
            for crowd in (module for module in part.module.modules() if isinstance(module, Crowd)):
                for number in range(EXPERTS):
                    if number // (EXPERTS // ep) != place:
                        crowd.experts[number] = nn.Identity()
                crowd.gather, crowd.own = Padded(group, place, ep), Own(place, ep)
                crowd.add = Exchange(group, forward=True, backward=True)
        return parts


class Halves(Transform):
    """Two pieces over pp, one micro-batch after the other; the embedding is on both, as the head of the second."""

    name = "halves"

    def wants(self, config, layout, drafts):
        return Chosen(layout, "two halves over pp") if layout.pp == 2 else None

    def redraw(self, choice, drafts):
        (whole,) = drafts
        first = {p.name for p in whole.parameters if p.name.startswith(("embed", "blocks.0", "blocks.1"))}
        last = {p.name for p in whole.parameters} - first | {"embed.weight"}
        places = {name: [at for at, names in enumerate((first, last)) if name in names] for name in first | last}
        return redrawn((whole.having(first), whole.having(last)), lambda name, p: p.home.at("pp", *places[name]))

    def runner(self, choice):
        return Turns

    def apply(self, parts, choice, mesh):
        (part,) = parts
        model = part.module
        if mesh.coordinate("pp") == 0:
            model.blocks[2] = model.norm = model.head = nn.Identity()
        else:
            model.blocks[0] = model.blocks[1] = model.embed = nn.Identity()
        return parts


class Turns:
    """Forward on the first half, then on the second, then backward the same way back."""

    def __init__(self, running):
        (self.part,) = running.parts
        stages, self.group = running.mesh.ranks("pp"), running.mesh.group("pp")
        self.is_last, self.changes = running.mesh.rank == stages[1], running.changes
        self.peer = stages[0] if self.is_last else stages[1]
        self.role = Role(running.mesh.layout.world // 2, has_losses=self.is_last)

    def pull(self, source, count):
        return pull(source(), count)

    def check_open_loop(self, call):
        pass

    def run(self, micros, loss_function):
        self.changes.adopt()
        tally = Tally()
        for number, tokens in enumerate(micros, 1):
            for store in self.part.stores:
                store.begin_forward()
            hidden = torch.empty(tokens.shape[0], LENGTH - 1, WIDTH, requires_grad=True)
            if self.is_last:
                dist.recv(hidden.detach(), self.peer, group=self.group)
                hidden = hidden.detach().requires_grad_()
                out = self.part.module(tokens, hidden)
                tally = tally.plus(out, 1.0)
                self.backward(out / len(micros), None, hidden, last=number == len(micros))
            else:
                out = self.part.module(tokens)
                dist.send(out.detach(), self.peer, group=self.group)
                gradient = torch.empty_like(out)
                dist.recv(gradient, self.peer, group=self.group)
                self.backward(out, gradient, None, last=number == len(micros))
        return tally

    def backward(self, out, gradient, hidden, *, last):
        for store in self.part.stores:
            store.begin_backward(last)
        out.backward(gradient)
        if hidden is not None:
            dist.send(hidden.grad, self.peer, group=self.group)
        for store in self.part.stores:
            store.end_backward()
