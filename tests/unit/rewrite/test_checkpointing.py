"""`mizzen.checkpointing`: what scripts call by hand, and what it makes of arguments that mean nothing here."""

import types

import pytest
import torch

from mizzen import checkpointing
from mizzen.ambient import AMBIENT
from mizzen.config.load import load
from mizzen.errors import ConfigError, NotBuilt
from mizzen.rewrite import recompute
from mizzen.rewrite import recompute as behind
from mizzen.rewrite.recompute import Checkpointing, Keeping


def mpu(rank, ranks, role="tensor_model"):
    return types.SimpleNamespace(
        **{
            f"get_{role}_parallel_rank": lambda: rank,
            f"get_{role}_parallel_world_size": lambda: ranks,
        }
    )


def test_nothing_is_configured_at_first():
    assert not checkpointing.is_configured()
    checkpointing.configure(None)
    assert checkpointing.is_configured()
    assert Checkpointing.current().keeping == Keeping()


@pytest.mark.parametrize("form", [dict, load], ids=["dict", "loaded"])
def test_a_configuration_and_arguments_beside_it(form):
    config = form({"activation_checkpointing": {"cpu_checkpointing": True}})
    checkpointing.configure(None, config)
    assert Checkpointing.current().keeping == Keeping(on_host=True)
    checkpointing.configure(None, deepspeed_config=config, checkpoint_in_cpu=False)
    assert Checkpointing.current().keeping == Keeping()
    checkpointing.configure(mpu_=None, checkpoint_in_cpu=True)
    assert Checkpointing.current().keeping == Keeping(on_host=True)


def test_a_wrong_configuration_is_refused_as_everywhere():
    with pytest.raises(ConfigError, match="activation_checkpointing.cpu_checkpoint: unknown key"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpoint": True}})


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("contiguous_checkpointing", "contiguous_memory_optimization"),
        ("num_checkpoints", "number_checkpoints"),
        ("synchronize", "synchronize_checkpoint_boundary"),
        ("profile", "profile"),
    ],
)
def test_arguments_without_effect_are_named(monkeypatch, argument, key):
    said = []
    monkeypatch.setattr(behind, "warn_once", said.append)
    checkpointing.configure(None, **{argument: 3 if argument == "num_checkpoints" else True})
    (line,) = said
    assert line.startswith(f"checkpointing.configure: {key} has no effect here: ")
    checkpointing.configure(None, **{argument: None})
    assert len(said) == 1


def test_parts_of_inputs():
    checkpointing.configure(None, partition_activations=True)
    checkpointing.configure(mpu(0, 1), partition_activations=True)
    with pytest.raises(NotBuilt, match="over 2 tensor-parallel ranks is not built yet; leave partition_activations"):
        checkpointing.configure(mpu(0, 2), partition_activations=True)
    with pytest.raises(NotBuilt):
        checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.partition_activations_in_checkpoint(False)


@pytest.mark.parametrize("call", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
def test_a_call_is_repeated_in_backward(call):
    count = []

    def function(inputs, *, factor):
        count.append(factor)
        return inputs.sin() * factor

    inputs = torch.ones(3, requires_grad=True)
    call(function, inputs, factor=2.0, use_reentrant=True).sum().backward()
    assert count == [2.0, 2.0]
    assert torch.equal(inputs.grad, 2 * torch.ones(3).cos())


def test_a_call_keeps_inputs_as_configured(monkeypatch):
    seen = []
    monkeypatch.setattr(checkpointing, "replayed", lambda function, args, kwargs, keeping: seen.append(keeping))
    checkpointing.checkpoint(torch.sin, torch.ones(1))
    checkpointing.configure(None, checkpoint_in_cpu=True)
    checkpointing.checkpoint(torch.sin, torch.ones(1))
    assert seen == [Keeping(), Keeping(on_host=True)]


def test_torch_may_be_told_to_call_it(monkeypatch):
    """Scripts put it in the place of torch's own function, which it uses itself."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpointing.checkpoint)
    inputs = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, inputs, use_reentrant=False).sum().backward()
    assert inputs.grad is not None
    assert recompute.checkpoint is not checkpointing.checkpoint


def test_calls_that_have_nothing_to_do():
    checkpointing.set_num_layers(4)
    checkpointing.reset()
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("role", ["tensor_model", "slice", "model"])
def test_ranks_draw_differently_from_the_stream_and_alike_outside(role):
    drawn, outside = [], []
    for rank in (0, 1):
        AMBIENT.checkpointing = None
        checkpointing.configure(mpu(rank, 2, role))
        checkpointing.model_parallel_cuda_manual_seed(10)
        with checkpointing.get_cuda_rng_tracker().fork():
            drawn.append(torch.rand(2))
        outside.append(torch.rand(2))
    assert torch.equal(*outside) and not torch.equal(*drawn)
    assert torch.equal(drawn[1], torch.rand(2, generator=torch.Generator().manual_seed(10 + 2718 + 1)))
    assert torch.equal(outside[0], torch.rand(2, generator=torch.Generator().manual_seed(10)))


def test_seeding_twice_starts_again():
    found = []
    for _ in range(2):
        checkpointing.model_parallel_cuda_manual_seed(10)
        with checkpointing.get_cuda_rng_tracker().fork():
            found.append(torch.rand(2))
    assert torch.equal(*found)


def test_the_stream_alone_is_seeded_anew():
    checkpointing.model_parallel_cuda_manual_seed(10)
    torch.manual_seed(1)
    checkpointing.model_parallel_reconfigure_tp_seed(20)
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
    with checkpointing.get_cuda_rng_tracker().fork("model-parallel-rng"):
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(20 + 2718)))


def test_every_name_is_there():
    assert sorted(checkpointing.__all__) == list(checkpointing.__all__)
    assert all(callable(vars(checkpointing)[name]) for name in checkpointing.__all__)
