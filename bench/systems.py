"""The systems that take part in benches on one GPU, as loops over any model of transformers.

All loops are plain ones: a loss lives until the next forward has made another. What is trained is said by a workload,
such as `llama.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.player import Step

RATE: Final = 3e-4
MAX_NORM: Final = 1.0
DECAY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Work:
    """What a system is given."""

    model: Any
    """A model of transformers: called with a batch by name, its output has a `loss`."""
    blocks: Sequence[nn.Module]
    """Its layers, which FSDP2 gathers and a compiler compiles one by one."""
    batch: Callable[[int], dict[str, Any]]
    device: torch.device
    config: dict[str, Any]
    """The JSON of those systems that have one."""
    is_told: bool = False
    """Whether a loop without an engine looks at its norm, and leaves a step out that would break the weights."""


def plain(work: Work) -> Step:
    """A plain script: fp32 weights, autocast, fused AdamW."""
    parameters = list(work.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)

    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        with torch.autocast(work.device.type, torch.bfloat16):
            loss = work.model(**work.batch(number)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def flat(work: Work) -> Step:
    """What an engine of flat buffers comes to without an engine: bf16 weights and gradients, fp32 masters, one rank."""
    parameters = list(work.model.parameters())
    master = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    values = master.to(torch.bfloat16)
    gradients = torch.zeros_like(values)
    place = 0
    for parameter in parameters:
        end = place + parameter.numel()
        parameter.data = values[place:end].view(parameter.shape)
        parameter.grad = gradients[place:end].view(parameter.shape)
        place = end
    optimizer = torch.optim.AdamW([master], lr=RATE, weight_decay=DECAY, fused=True)

    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        loss = work.model(**work.batch(number)).loss
        loss.backward()
        master.grad = gradients.float()
        nn.utils.clip_grad_norm_([master], MAX_NORM)
        optimizer.step()
        master.grad = None
        values.copy_(master)
        gradients.zero_()
        return loss.detach()

    return step


def fsdp2(work: Work) -> Step:
    """FSDP2 on one rank: bf16 compute, fp32 sums, parameters kept after forward, or not at stage 3."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        kinds = (
            "cpu:gloo,cuda:nccl" if work.device.type == "cuda" else "gloo"
        )  # what rests on the host is clipped there
        dist.init_process_group(kinds, device_id=work.device if work.device.index is not None else None)
    is_freed = work.config["zero_optimization"]["stage"] == 3
    rests = {"offload_policy": CPUOffloadPolicy()} if "offload_optimizer" in work.config["zero_optimization"] else {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in work.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=is_freed, **rests)
    model: Any = fully_shard(work.model, mp_policy=policy, reshard_after_forward=False, **rests)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        loss = model(**work.batch(number)).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if not work.is_told or math.isfinite(norm.item()):
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def dtensor(work: Work) -> Step:
    """torch's own tensor parallelism over all ranks, by the plan of transformers: bf16 weights, fp32 masters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if not dist.is_initialized():
        dist.init_process_group()
    mesh = init_device_mesh(work.device.type, (dist.get_world_size(),))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    model = work.model.to(torch.bfloat16)
    for block in work.blocks:
        plan = {
            name: ColwiseParallel() if name.endswith(columns) else RowwiseParallel()
            for name, _ in block.named_modules()
            if name.endswith((*columns, *rows))
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
    }
    parallelize_module(model, mesh, ends)
    parameters = list(model.parameters())
    local = [p.detach().to_local() if hasattr(p, "to_local") else p.data for p in parameters]
    is_cut = [hasattr(p, "placements") and isinstance(p.placements[0], Shard) for p in parameters]
    masters = [value.detach().float() for value in local]
    optimizer = torch.optim.AdamW(masters, lr=RATE, weight_decay=DECAY, fused=True)

    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        loss = model(**work.batch(number)).loss
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            gradient: Any = parameter.grad
            if hasattr(gradient, "to_local"):  # that of a table may come as a sum that is still to be made
                placed: Any = parameter
                gradient = gradient.redistribute(mesh, placed.placements).to_local()
            master.grad = gradient.float()
            parameter.grad = None
        _clip(masters, is_cut)
        optimizer.step()
        torch._foreach_copy_(local, masters)
        optimizer.zero_grad()
        return loss.detach()

    return step


def _clip(masters: Sequence[Tensor], is_cut: Sequence[bool]) -> None:
    """One norm over all ranks: the squares of cut gradients are added up, others count once."""
    norms = torch._foreach_norm([master.grad for master in masters])
    squares = torch.stack(norms).square()
    cut = torch.tensor(is_cut, device=squares.device)
    total = (squares * cut).sum()
    dist.all_reduce(total)
    norm = (total + (squares * ~cut).sum()).sqrt()
    torch._foreach_mul_([master.grad for master in masters], (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


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
    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        for _ in range(work.config.get("gradient_accumulation_steps", 1)):
            loss = engine(**work.batch(number)).loss
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


KINDS: Final[dict[str, Callable[[Work], Step]]] = {
    "plain": plain,
    "flat": flat,
    "fsdp2": fsdp2,
    "dtensor": dtensor,
    "deepspeed": deepspeed,
    "mizzen": mizzen,
}

PRETENDED: Final = {"pretend2": 2, "pretend8": 8}
"""One of so many ranks, whose collectives do next to nothing: sharding then costs what it costs, without a wire. The
losses of such a run mean nothing."""
NUMBERS: Final = 64
"""Elements; what is larger is no list of numbers, and stays as it is."""
FUSED_KEYS: Final = {
    "LlamaForCausalLM": dict.fromkeys(("head_loss", "rms_norm", "rotary", "swiglu"), True),
    "BertForPreTraining": {"head_loss": True},
}
"""The fused operations that a model has a use for."""


def assemble(system: str, model: Any, blocks: Sequence[nn.Module], batch: Callable[[int], dict[str, Any]]) -> Step:
    """Build a system, by a name such as `mizzen-2+compile+fused`, for a model that is on its device."""
    name, *extras = system.split("+")
    kind, _, stage = name.partition("-")
    device = next(model.parameters()).device
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(batch(0)["input_ids"]),
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "zero_optimization": {"stage": int(stage or 0)},
    }
    if ranks := max(PRETENDED.get(extra, 0) for extra in ("", *extras)):
        pretend(ranks)
    if "tp" in extras:
        config["tensor_parallel"] = {"autotp_size": ranks or dist.get_world_size()}
        config["train_batch_size"] = config.pop("train_micro_batch_size_per_gpu")
    for extra in extras:
        config |= _offload_keys(extra, config)
    if "fused" in extras:
        config["fused"] = FUSED_KEYS[type(model).__name__]
    if "whole" in extras:
        model.compile()
    elif "compile" in extras and kind == "mizzen":
        config["compile"] = {"enabled": True}
    elif "compile" in extras:
        for block in blocks:
            block.compile()
    return KINDS[kind](Work(model.train(), blocks, batch, device, config, "told" in extras))


def _offload_keys(extra: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `cpu`: states in host memory; of `params`: parameters too; of `stream30`: 30 % through the device; of
    `auto`: as much on the device as there is room for; of `early`: stepped during backward."""
    zero = config["zero_optimization"]
    if extra == "auto":
        return {"offload": {"device_bytes": "auto", "host_bytes": "auto"}}
    if extra == "early":
        return {"offload": {"step_in_backward": True}}
    if extra in ("cpu", "params"):
        key = "offload_optimizer" if extra == "cpu" else "offload_param"
        return {"zero_optimization": {**zero, key: {"device": "cpu", "pin_memory": True}}}
    if extra.startswith("stream"):
        return {"offload": {"device_bytes": 0, "streamed_ratio": int(extra.removeprefix("stream")) / 100}}
    if extra.startswith("accumulate"):
        return {"gradient_accumulation_steps": int(extra.removeprefix("accumulate"))}
    return {}


def pretend(ranks: int) -> None:
    """Be one of so many ranks that do the same: a collective does nothing, but that numbers summed are multiplied."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        work = reduce(tensor, op, *args, **kwargs)
        if op == dist.ReduceOp.SUM and tensor.numel() <= NUMBERS:
            tensor.mul_(ranks)
        return work

    dist.all_reduce = all_reduce
