"""The engine on an accelerator: the same losses as on the CPU, and all memory back in the end."""

import gc

import pytest
import torch

import mizzen
from mizzen.accelerator import get_accelerator
from parity.programs import STEPS, Case, build, groups, micro_batches, reference


def train(case: Case) -> tuple[list[float], list[torch.dtype]]:
    model = build(case)
    engine, *_ = mizzen.initialize(model=model, model_parameters=groups(model, case), config=case.config)
    losses = []
    for step in range(STEPS):
        for tokens in micro_batches(case, step, 0):
            engine.backward(engine(tokens.to(engine.device)))
            report = engine.step()
        losses.append(report.loss)
    kinds = [parameter.dtype for parameter in model.parameters()]
    assert {parameter.device.type for parameter in model.parameters()} == {get_accelerator().name}
    engine.destroy()
    return losses, kinds


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_losses_are_those_of_the_cpu(stage, dtype, optimizer):
    case = Case(stage, 1, 2, 0.5, "tied", dtype, optimizer)
    losses, kinds = train(case)
    expected, _ = reference(case)
    assert losses == pytest.approx(expected, rel={"fp32": 1e-4, "bf16": 1e-2}[dtype])
    assert set(kinds) == {{"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}


def test_all_memory_comes_back():
    train(Case(2, 1, 2, 0.5))  # whatever a first run leaves behind for good
    gc.collect()
    before = get_accelerator().memory().allocated
    train(Case(2, 1, 2, 0.5))
    gc.collect()
    assert get_accelerator().memory().allocated == before


def test_a_gradient_that_is_not_finite_is_named():
    case = Case(0, 1)
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    engine.module.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    (tokens,) = micro_batches(case, 0, 0)
    engine.backward(engine(tokens.to(engine.device)))
    report = engine.step()
    assert not report.applied
    assert "norm.weight" in report.reason
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


def test_train_batch_moves_data_to_the_device():
    case = Case(0, 1, 2, samples=8)
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    report = engine.train_batch(iter(micro_batches(case, 0, 0)))
    assert report.applied
    assert report.tokens == 8 * 12


def weights_after(case: Case, change=lambda model: None) -> list[torch.Tensor]:
    """Train two steps with a change in between."""
    engine, *_ = mizzen.initialize(model=build(case), config=case.config)
    for step in range(2):
        (tokens,) = micro_batches(case, step, 0)
        engine.backward(engine(tokens.to(engine.device)))
        assert engine.step().applied
        if step == 0:
            change(engine.module)
    found = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return found


def to_the_host_and_back(model: torch.nn.Module) -> None:
    model.cpu().to(get_accelerator().device())


def shrink(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_was_moved_or_written_to_is_trained_on(dtype):
    case = Case(0, 1, dtype=dtype, optimizer="SGD")
    plain, moved, shrunk = (
        weights_after(case, change) for change in (lambda model: None, to_the_host_and_back, shrink)
    )
    for expected, same, other in zip(plain, moved, shrunk, strict=True):
        assert torch.equal(same, expected)
        assert not torch.equal(other, expected)
        assert other.dim() < 2 or other.norm() < 0.75 * expected.norm()
