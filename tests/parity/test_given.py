"""A model that comes split, by layers as Megatron's: it trains as one process does, and saves what that loads."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import mizzen
import mizzen.errors
from breadth import choice
from parity.toys import Exchange

SAMPLES, WIDTH, INNER, CLASSES, STEPS = 8, 6, 8, 5, 3


class Whole(nn.Module):
    """`up` has a gate and a value in one matrix; with an mpu each rank has its part of both, and of `down`."""

    def __init__(self, mpu=None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.enter = self.leave = nn.Identity()
        if mpu is not None:
            self.split(mpu)

    def split(self, mpu) -> None:
        rank, ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        for parameter, dim, stride in ((self.up.weight, 0, 2), (self.up.bias, 0, 2), (self.down.weight, 1, 1)):
            chunks = parameter.data.chunk(ranks * stride, dim)
            parameter.data = torch.cat(chunks[rank::ranks], dim).contiguous()
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim
            parameter.partition_stride = stride
        group = mpu.get_tensor_model_parallel_group()
        self.enter = Exchange(group, forward=False, backward=True)
        self.leave = Exchange(group, forward=True, backward=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        gate, value = self.up(self.enter(self.norm(inputs))).chunk(2, -1)
        hidden = inputs + self.leave(self.down(functional.silu(gate) * value)) + self.bias
        return functional.cross_entropy(self.head(hidden), targets)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def megatron(tp: int, *, by_column: bool = False) -> SimpleNamespace:
    """What Megatron's parallel_state answers."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [list(range(at, at + tp)) for at in range(0, world, tp)]
    columns = [list(range(at, world, tp)) for at in range(tp)]
    tensor, data = (columns, rows) if by_column else (rows, columns)
    found = SimpleNamespace()
    for role, partition in (("tensor_model", tensor), ("data", data), ("model", tensor)):
        groups = [dist.new_group(ranks) for ranks in partition]
        place, group = next((r, g) for r, g in zip(partition, groups, strict=True) if rank in r)
        for question, answer in (("rank", place.index(rank)), ("world_size", len(place)), ("group", group)):
            setattr(found, f"get_{role}_parallel_{question}", lambda answer=answer: answer)
    return found


def settings(stage: int, optimizer: str, clip: float) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1 if optimizer == "SGD" else 0.01}},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "progress": {"enabled": False},
        "seed": 1,
    }


def start(tp: int, *case):
    mpu = megatron(tp) if tp > 1 else None
    engine, *_ = mizzen.initialize(model=Whole(mpu), config=settings(*case), mpu=mpu)
    return engine


def walk(engine, steps=range(STEPS)) -> tuple[list, list]:
    losses, norms = [], []
    for step in steps:
        ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
        report = engine.train_batch(iter([tuple(each.chunk(ranks)[rank] for each in batch(step))]))
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms


def values_of(engine) -> dict:
    return {name: mizzen.zero.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


def train(tp: int, folder: str, *case) -> tuple:
    engine = start(tp, *case)
    losses, norms = walk(engine)
    assert engine.save_checkpoint(folder)
    return losses, norms, values_of(engine), walk(engine, [STEPS])[0]


def resume(tp: int, folder: str, *case) -> tuple:
    engine = start(tp, *case)
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    return values_of(engine), walk(engine, [STEPS])[0]


def reference(optimizer: str, clip: float) -> tuple:
    model = Whole()
    rate = 0.1 if optimizer == "SGD" else 0.01
    rule = getattr(torch.optim, optimizer)(model.parameters(), lr=rate, weight_decay=0.0)
    losses, norms = [], []
    for step in range(STEPS):
        rule.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


CASES = [(0, "SGD", 0.0), (3, "SGD", 0.0), (1, "AdamW", 0.3), (1, "SGD", 0.0), (2, "SGD", 0.0), (3, "AdamW", 0.3)]


@pytest.mark.parametrize(("stage", "optimizer", "clip"), choice(CASES, CASES[1:3]))
def test_a_model_that_comes_split_trains_as_one_process_and_saves_what_that_loads(
    world, tmp_path, stage, optimizer, clip
):
    expected, norms, parameters = reference(optimizer, clip)
    before = dict(Whole().named_parameters())
    runs = world(4).run(train, 2, str(tmp_path), stage, optimizer, clip)
    for losses, seen, values, _ in runs:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert seen == pytest.approx(norms, rel=1e-5)
        for name, value in values.items():
            moved, wanted = value - before[name], parameters[name] - before[name]
            assert (moved - wanted).norm() <= 2e-3 * wanted.norm(), name
    for tp, ranks in ((1, 1), (2, 2)) if optimizer == "AdamW" else ((1, 1),):
        for values, (loss,) in world(ranks).run(resume, tp, str(tmp_path), 0, optimizer, clip):
            assert all(torch.equal(values[name], runs[0][2][name]) for name in parameters)
            assert loss == pytest.approx(runs[0][3][0], rel=1e-5)


def refused(kind: str) -> str:
    mpu = megatron(2, by_column=kind == "groups")
    model, asked = Whole(mpu), settings(1, "AdamW", 1.0)
    if kind == "silent":
        del model.down.weight.tensor_model_parallel
    if kind == "none":
        model = Whole()
    if kind == "dimension":
        del model.up.weight.partition_dim
    if kind == "twice":
        asked["tensor_parallel"] = {"autotp_size": 2}
    with pytest.raises(mizzen.errors.MizzenError) as refusal:
        mizzen.initialize(model=model, config=asked, mpu=mpu)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("silent", "down.weight"),
        ("none", "no parameter says so"),
        ("dimension", "'up.weight' of shape [8, 6] says that it is a part of a parameter, but not along which"),
        ("twice", "leave that section out"),
        ("groups", "tensor parallelism fastest"),
    ],
)
def test_a_split_that_cannot_be_known_is_refused(world, kind, words):
    for said in world(4).run(refused, kind):
        assert words in said
