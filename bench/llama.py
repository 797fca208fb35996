"""The work of `gpu_llama`: Hugging Face's Llama in bf16 with fp32 master weights, and every system that trains it.

All loops are plain ones: a loss lives until the next forward has made another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.player import Step

RATE: Final = 3e-4
MAX_NORM: Final = 1.0
DECAY: Final = 0.01
BATCHES: Final = 4
"""Batches that lie ready on the device and are used in turn."""


@dataclass(frozen=True, slots=True)
class Size:
    """The model and a micro-batch. As it stands, it has 1.107 B parameters."""

    hidden: int = 2048
    layers: int = 16
    feed: int = 8192
    heads: int = 32
    groups: int = 8
    """Heads of keys and values."""
    vocabulary: int = 32768
    samples: int = 8
    length: int = 2048

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        attention = 2 * self.hidden**2 * (1 + self.groups / self.heads)
        block = attention + 3 * self.hidden * self.feed + 2 * self.hidden
        return int(self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.samples * self.length

    @property
    def flops(self) -> int:
        """Of one step: 6 for each parameter and token, and those of causal attention."""
        return 6 * self.tokens * (self.parameters + self.layers * self.hidden * self.length)


HOLLOW: Final = Size(hidden=64, feed=128, heads=4, groups=1, vocabulary=256, samples=1, length=32)
"""As many tensors and calls as the real one, and next to nothing in them: its time is the host's."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a system is given."""

    model: LlamaForCausalLM
    batch: Callable[[int], Tensor]
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
        tokens = work.batch(number)
        with torch.autocast(work.device.type, torch.bfloat16):
            loss = work.model(input_ids=tokens, labels=tokens, use_cache=False).loss
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
        tokens = work.batch(number)
        loss = work.model(input_ids=tokens, labels=tokens, use_cache=False).loss
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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group(device_id=work.device if work.device.index is not None else None)
    is_freed = work.config["zero_optimization"]["stage"] == 3
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in work.model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=is_freed)
    model: Any = fully_shard(work.model, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        tokens = work.batch(number)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if not work.is_told or math.isfinite(norm.item()):
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
    """The same loop, the same JSON."""
    import deepspeed as library

    engine, *_ = library.initialize(
        model=work.model, model_parameters=work.model.parameters(), config={**work.config, "steps_per_print": 10**9}
    )
    return _engine_loop(engine, work)


def _engine_loop(engine: Any, work: Work) -> Step:
    loss: Tensor

    def step(number: int) -> Any:
        nonlocal loss
        tokens = work.batch(number)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


KINDS: Final[dict[str, Callable[[Work], Step]]] = {
    "plain": plain,
    "flat": flat,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "mizzen": mizzen,
}
EAGER: Final = (
    *("plain", "flat", "fsdp2", "deepspeed-0", "deepspeed-1", "deepspeed-2"),
    *("mizzen-0", "mizzen-1", "mizzen-2"),
)
"""A kind, and a ZeRO stage where it has one."""
PRETENDED: Final = {"pretend2": 2, "pretend8": 8}
"""One of so many ranks, whose collectives do next to nothing: sharding then costs what it costs, without a wire. The
losses of such a run mean nothing."""
NUMBERS: Final = 64
"""Elements; what is larger is no list of numbers, and stays as it is."""
FULL: Final = (
    *("fsdp2-3", "fsdp2-3+told", "deepspeed-3", "mizzen-3"),
    *(f"{kind}+{ranks}" for ranks in PRETENDED for kind in ("fsdp2-3", "fsdp2-3+told", "mizzen-3")),
)
"""Parameters sharded too; on one rank mizzen has nothing to shard, and wraps nothing."""
COMPILED: Final = tuple(f"{name}+compile" for name in (*EAGER, *FULL))
"""The same, with every decoder layer compiled on its own."""
FUSED: Final = tuple(f"{name}+fused" for name in (*EAGER, *FULL, *COMPILED) if name.startswith("mizzen"))
"""Ours with its fused operations; in a compiled layer the compiler has its own, and the head is left."""
FUSED_KEYS: Final = dict.fromkeys(("head_loss", "rms_norm", "rotary", "swiglu"), True)


def prepare(system: str, settings: dict[str, Any]) -> Step:
    """Build one system; `settings` are the fields of `Size`."""
    name, *extras = system.split("+")
    kind, _, stage = name.partition("-")
    is_compiled = "compile" in extras
    size = Size(**settings)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with device:
        model = build(size)
    generator = torch.Generator(device).manual_seed(1)
    shape = (BATCHES, size.samples, size.length)
    batches = torch.randint(0, size.vocabulary, shape, generator=generator, device=device)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.samples,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "zero_optimization": {"stage": int(stage or 0)},
    }
    if ranks := max(PRETENDED.get(extra, 0) for extra in ("", *extras)):
        pretend(ranks)
    if "fused" in extras:
        config["fused"] = FUSED_KEYS
    if is_compiled and kind == "mizzen":
        config["compile"] = {"enabled": True}
    elif is_compiled:
        for layer in model.model.layers:
            layer.compile()
    is_told = "told" in extras
    return KINDS[kind](Work(model.train(), lambda number: batches[number % BATCHES], device, config, is_told))


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


def build(size: Size) -> LlamaForCausalLM:
    """The model, with random weights."""
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.feed,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
