"""Tiny models, their data, the plain torch loop that every plan is held against, and what a user writes.

Ranks import this and not the grid, which chooses its cases when it is imported.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import mizzen
from behind import use_behind
from mizzen.model.sketch import Sketch
from mizzen.optim.own_rules import Lamb, Lion, Muon, split_groups

VOCABULARY = 48
LENGTH = 12
OWN = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}
STEPS = 5
SCALE = 1024.0
PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "low": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "autocast16": {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale": SCALE}},
}
FAMILY = {
    "alone": {},
    "copies": {"mics_shard_size": 2},
    "hpz": {"zero_hpz_partition_size": 2},
    "qwz": {"zero_quantized_weights": True},
    "qgz": {"zero_quantized_gradients": True},
    "loco": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 3}},
    "zeropp": {
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 64},
    },
    "params": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "params alone": {"offload_param": {"device": "cpu"}},
    "params copies": {"offload_param": {"device": "cpu"}, "mics_shard_size": 2},
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = {"autocast": torch.bfloat16, "autocast16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One run: the plan's degrees and the peculiarities of the model."""

    stage: int = 0
    world: int = 1
    accumulation: int = 1
    clip: float = 0.0
    variant: str = "plain"
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    deterministic: bool = False
    samples: int = 8
    family: str = "alone"

    def __str__(self) -> str:
        clip = f"clip{self.clip:g}" if self.clip else "free"
        order = "-ordered" if self.deterministic else ""
        degrees = f"z{self.stage}-w{self.world}-a{self.accumulation}"
        family = f"-{self.family}" if self.family != "alone" else ""
        return f"{degrees}-{clip}-{self.variant}-{self.dtype}-{self.optimizer}{order}{family}"

    @property
    def config(self) -> dict:
        found = {
            "train_batch_size": self.samples,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 2000,
                "stage3_param_persistence_threshold": 20,
                **FAMILY[self.family],
            },
            "deterministic": self.deterministic,
            "progress": {"enabled": False},
        }
        if self.variant == "recompute":
            found["activation_checkpointing"] = {"mode": "full"}
        if self.optimizer == "SGD":
            found["optimizer"]["params"]["momentum"] = 0.9
        return found | PRECISION[self.dtype]


class Block(nn.Module):
    def __init__(self, width: int, adapted: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.tensor(1.0))  # 0-d, as real models have them
        self.requires_grad_(not adapted)
        low = (nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)) if adapted else ()
        self.adapter = nn.Sequential(*low)

    def forward(self, hidden: Tensor) -> Tensor:
        added = self.gain * self.down(functional.gelu(self.up(self.norm(hidden))))
        return hidden + (added + self.adapter(hidden) if len(self.adapter) else added)


class TinyLanguageModel(nn.Module):
    """Predicts the next token; returns the mean loss."""

    def __init__(self, variant: str = "plain", width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.variant = variant
        self.calls = 0
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, adapted=variant == "lora") for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if variant == "tied":
            self.head.weight = self.embed.weight
        if variant == "frozen":
            self.embed.weight.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
        if variant == "unused":
            self.sometimes = nn.Linear(width, width)
            self.never = nn.Parameter(torch.ones(7))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens[:, :-1]) * self.scale.to(self.embed.weight.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        if self.variant == "unused" and int(tokens[0, 0]) % 2:
            hidden = hidden + self.sometimes(hidden)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def build(case: Case) -> TinyLanguageModel:
    torch.manual_seed(7)
    return TinyLanguageModel(case.variant)


def groups(model: nn.Module, case: Case) -> list:
    """The parameter groups of a case: one, or several with rates of their own."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if case.variant != "groups":
        return [{"params": [parameter for _, parameter in named]}]
    plain = [parameter for name, parameter in named if parameter.dim() > 1]
    small = [parameter for name, parameter in named if parameter.dim() <= 1]
    return [{"params": plain, "lr": 2e-2}, {"params": small, "weight_decay": 0.0}]


def batch(step: int, samples: int) -> Tensor:
    """The same tokens of a step, whoever asks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)


def micro_batches(case: Case, step: int, rank: int) -> list[Tensor]:
    """What one rank sees of a step: micro-step by micro-step, its share of the samples."""
    micro = case.samples // (case.accumulation * case.world)
    tokens = batch(step, case.samples).view(case.accumulation, case.world, micro, LENGTH)
    return [tokens[index, rank] for index in range(case.accumulation)]


def plain_optimizer(masters: nn.Module, case: Case) -> torch.optim.Optimizer:
    """The rule on whole parameters; those of our own are held against their formulas in tests/unit/optim."""
    given, arguments = groups(masters, case), case.config["optimizer"]["params"]
    if case.optimizer in OWN:
        sketches = Sketch.of(masters).by_name()
        facts = {id(parameter): sketches[name] for name, parameter in masters.named_parameters()}
        given = split_groups(given, facts) if case.optimizer == "Muon" else given
        return OWN[case.optimizer](given, **arguments)
    return getattr(torch.optim, case.optimizer)(given, **arguments, fused=True)


def reference(case: Case, steps: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """One process, plain torch: every micro-batch of every rank in turn; a missing gradient counts as zero."""
    masters = build(case)
    model = masters
    if case.dtype in LOW:
        model = build(case)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(LOW[case.dtype])
    autocast = torch.autocast("cpu", dtype=AUTOCAST.get(case.dtype), enabled=case.dtype in AUTOCAST)
    scale = SCALE if case.dtype.endswith("16") and case.dtype != "bf16" else 1.0
    optimizer = plain_optimizer(masters, case)
    trained = [(m, p) for m, p in zip(masters.parameters(), model.parameters(), strict=True) if m.requires_grad]
    losses = []
    for step in range(steps):
        sums = [torch.zeros_like(master) for master, _ in trained]
        total = 0.0
        count = case.accumulation * case.world
        for rank in range(case.world):
            for tokens in micro_batches(case, step, rank):
                with autocast:
                    loss = model(tokens)
                found = torch.autograd.grad(scale * loss / count, [p for _, p in trained], allow_unused=True)
                for place, gradient in zip(sums, found, strict=True):
                    if gradient is not None:
                        place += gradient
                total += loss.item() / count
        for (master, _), gradient in zip(trained, sums, strict=True):
            master.grad = gradient / scale
        if case.clip:
            torch.nn.utils.clip_grad_norm_([master for master, _ in trained], case.clip)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in trained:
                parameter.copy_(master)
        losses.append(total)
    return losses, {name: parameter.detach().clone() for name, parameter in masters.named_parameters()}


def train(case: Case, with_train_batch: bool = False) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """What a user writes, on one rank."""
    if case.family.startswith("params"):
        use_behind()
    model = build(case)
    engine, *_ = mizzen.initialize(model=model, model_parameters=groups(model, case), config=case.config)
    losses, norms = [], []
    for step in range(STEPS):
        micros = micro_batches(case, step, engine.global_rank)
        if with_train_batch:
            report = engine.train_batch(iter(micros))
        else:
            for tokens in micros:
                engine.backward(engine(tokens))
                report = engine.step()
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    values = {name: mizzen.zero.safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
    engine.destroy()
    return losses, values, norms


def train_at(case: Case, stages: tuple[int, ...]) -> list:
    """One stage after the other, on the same ranks."""
    return [train(replace(case, stage=stage)) for stage in stages]
