"""A small model written as a list of layers, one process's training of it, and that of any pipeline."""

import torch
from torch import nn
from torch.nn import functional

import mizzen
import mizzen.pipe as pipe

VOCABULARY, WIDTH, SAMPLES, LENGTH, STEPS = 16, 8, 24, 6, 3


class Block(nn.Module):
    """Takes hidden states and a mask, and gives both on: a tuple of a float and an integer tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: tuple) -> tuple:
        hidden, mask = inputs
        added = self.down(functional.gelu(self.up(self.norm(hidden))))
        return hidden + added * mask.unsqueeze(-1), mask


def enter(module: nn.Module, tokens: torch.Tensor) -> tuple:
    return module(tokens), (tokens > 0).long()


def leave(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, module.weight)


def without_mask(inputs: tuple) -> torch.Tensor:
    return inputs[0]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def build(stages: int, blocks: int = 5) -> pipe.PipelineModule:
    torch.manual_seed(5)
    return pipe.PipelineModule(
        [
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=enter),
            *(pipe.LayerSpec(Block, WIDTH) for _ in range(blocks)),
            without_mask,
            nn.ReLU(inplace=True),
            pipe.LayerSpec(nn.Linear, WIDTH, WIDTH),
            pipe.TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=leave),
        ],
        num_stages=stages,
        loss_fn=loss_of,
    )


def config(stage: int = 0, schedule: str = "1f1b", micros: int = 4, **more) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": micros,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": schedule},
        "progress": {"enabled": False},
        "seed": 1,
        **more,
    }


def batches(engine, step: int) -> list:
    """The micro-batches of a rank; each stage of a pipeline is offered all of them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    ranks, rank, micros = engine.dp_world_size, engine.get_data_parallel_rank(), engine.gradient_accumulation_steps()
    tokens = tokens.view(micros, ranks, -1, LENGTH + 1)[:, rank]
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


FROZEN = {
    "first stage": ("tied_modules.", "1.", "2.", "3."),
    "last stage": ("tied_modules.", "4.", "5.", "8."),
    "some": ("2.norm", "3.", "5.up.weight"),
}
"""Names of what is not trained begin so; of two stages the first has layers 0 to 3."""


def freeze(model: nn.Module, which: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN.get(which, "nothing")))
    return model


def train_frozen(which: str, stage: int, schedule: str) -> tuple:
    return train(2, stage, schedule, model=freeze(build(2), which))


def train(
    stages: int,
    stage: int = 0,
    schedule: str = "1f1b",
    micros: int = 4,
    steps: int = STEPS,
    more: dict | None = None,
    model: nn.Module | None = None,
) -> tuple:
    """Losses, norms and, by global name, values of one rank."""
    settings = config(stage, schedule, micros)
    settings["zero_optimization"] |= more or {}
    engine, *_ = mizzen.initialize(model=model or build(stages), config=settings)
    losses, norms = [], []
    for step in range(steps):
        report = engine.train_batch(iter(batches(engine, step)))
        assert report.applied
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms, values(engine)


def values(engine) -> dict:
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = mizzen.zero.safe_get_full_fp32_param(parameter)
        found[name] = (parameter.detach() if master is None else master).clone()  # nobody has masters of what is frozen
    return found
