"""The work of `cpu_ranks`: a small GPT in fp32, and every system that trains it, all on the same data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from bench.player import Step
from mizzen.environment import World, environ

RATE: Final = 3e-4
MAX_NORM: Final = 1.0
DECAY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """The model, and what one rank sees of a step. As it stands, it has 17.4 M parameters."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    vocabulary: int = 4096
    samples: int = 4
    length: int = 128


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.before_feed = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        joined = self.queries_keys_values(self.before_attention(hidden))
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joined.chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(seen.transpose(1, 2).flatten(-2))
        fed: Tensor = self.down(functional.gelu(self.up(self.before_feed(hidden))))
        return hidden + fed


class Gpt(nn.Module):
    """Predicts the next token; returns the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Work:
    """What a system is given."""

    model: Gpt
    batch: Callable[[int], Tensor]
    config: dict[str, Any]
    """The JSON of those systems that have one."""


def floor(work: Work) -> Step:
    """Every rank trains a model of its own: what the step costs without the other ranks."""
    return _loop(work.model, work)


def ddp(work: Work) -> Step:
    """torch's data parallelism: whole states on every rank."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.model, gradient_as_bucket_view=True)
    return _loop(model, work)


def fsdp2(work: Work) -> Step:
    """FSDP2 that keeps parameters after forward: states and gradients are sharded, as in ZeRO stage 2."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for block in work.model.blocks:
        fully_shard(block, reshard_after_forward=False)
    model: Any = fully_shard(work.model, reshard_after_forward=False)
    return _loop(model, work)


def fsdp2_resharding(work: Work) -> Step:
    """torch's FSDP2 as ZeRO stage 3: block by block, sharded again after forward."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for block in work.model.blocks:
        fully_shard(block, reshard_after_forward=True)
    return _loop(fully_shard(work.model), work)


def dtensor(work: Work) -> Step:
    """torch's own tensor parallelism. Q, K and V are laid so that a rank's part has whole heads of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {"queries_keys_values": ColwiseParallel(), "mix": RowwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in work.model.blocks:
        block.heads //= ranks
        for parameter in block.queries_keys_values.parameters():
            parts = parameter.data.unflatten(0, (3, ranks, -1)).transpose(0, 1)
            parameter.data = parts.flatten(0, 2).contiguous()
        parallelize_module(block, mesh, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(work.model, mesh, ends)
    parameters: list[Any] = list(work.model.parameters())
    is_cut = torch.tensor([hasattr(parameter, "to_local") for parameter in parameters])
    local = [p.to_local() if cut else p.data for p, cut in zip(parameters, is_cut, strict=True)]
    local = [value.detach() for value in local]
    optimizer = torch.optim.AdamW(local, lr=RATE, weight_decay=DECAY, fused=True)

    def step(number: int) -> Any:
        loss = work.model(work.batch(number))
        loss.backward()
        for parameter, value, cut in zip(parameters, local, is_cut, strict=True):
            gradient: Any = parameter.grad
            # That of a table may come as a sum that is still to be made, of all of its rows.
            value.grad = gradient.redistribute(mesh, parameter.placements).to_local() if cut else gradient
            parameter.grad = None
        squares = torch.stack(torch._foreach_norm([value.grad for value in local])).square()
        total = (squares * is_cut).sum()
        dist.all_reduce(total)
        norm = (total + (squares * ~is_cut).sum()).sqrt()
        torch._foreach_mul_([value.grad for value in local], (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mizzen_tensor(work: Work) -> Step:
    """Matrices cut over all ranks, by one key."""
    ranks = World.detect(environ()).size
    config = {key: value for key, value in work.config.items() if not key.startswith("train_")}
    samples = work.config["train_micro_batch_size_per_gpu"]
    tensor = {"train_batch_size": samples, "tensor_parallel": {"autotp_size": ranks}}
    return mizzen(replace(work, config=config | tensor))


def _loop(model: nn.Module, work: Work) -> Step:
    """The loop of a plain torch script."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    def step(number: int) -> Any:
        loss = model(work.batch(number))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mizzen(work: Work) -> Step:
    """The open loop of a mizzen user."""
    import mizzen as library

    engine, *_ = library.initialize(model=work.model, config={**work.config, "progress": {"enabled": False}})
    return _engine_loop(engine, work)


def deepspeed(work: Work) -> Step:
    """The open loop of a DeepSpeed user, with the JSON that mizzen gets."""
    import deepspeed as library

    engine, *_ = library.initialize(
        model=work.model, model_parameters=work.model.parameters(), config={**work.config, "steps_per_print": 10**9}
    )
    return _engine_loop(engine, work)


def _engine_loop(engine: Any, work: Work) -> Step:
    def step(number: int) -> Any:
        loss = engine(work.batch(number))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


SYSTEMS: Final[dict[str, Callable[[Work], Step]]] = {
    "floor": floor,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-3": fsdp2_resharding,
    "deepspeed-0": deepspeed,
    "deepspeed-1": deepspeed,
    "deepspeed-2": deepspeed,
    "deepspeed-3": deepspeed,
    "mizzen-0": mizzen,
    "mizzen-1": mizzen,
    "mizzen-2": mizzen,
    "mizzen-3": mizzen,
    "dtensor": dtensor,
    "mizzen+tp": mizzen_tensor,
}
ALIKE: Final = ("dtensor", "mizzen+tp")
"""Systems whose ranks see one batch."""


def prepare(system: str, settings: dict[str, Any]) -> Step:
    """Build one system; `settings` are the fields of `Size`."""
    torch.set_num_threads(1)
    size = Size(**settings)
    torch.manual_seed(0)
    rank = 0 if system in ALIKE else dist.get_node_local_rank(fallback_rank=0)

    def batch(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        return torch.randint(0, size.vocabulary, (size.samples, size.length + 1), generator=generator)

    stage = int(system.partition("-")[2] or 0)  # those without one have no "-"
    config = {
        "train_micro_batch_size_per_gpu": size.samples,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
    }
    return SYSTEMS[system](Work(Gpt(size), batch, config))
