"""Classes that clients name: engines, optimizers and schedules are of them, and can be mocked, patched and extended."""

import inspect
import logging
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drop_in import programs
from mizzen.errors import NotBuilt


@pytest.fixture
def package():
    return programs.deepspeed()


def test_an_engine_is_of_the_class_that_clients_ask_for(package):
    engine = programs.build(package, 0)
    kind = package.DeepSpeedEngine
    assert type(engine) is kind is package.runtime.engine.DeepSpeedEngine
    assert issubclass(kind, nn.Module) and not isinstance(nn.Linear(1, 1), kind)
    assert package.PipelineEngine is kind
    for name in ("DeepSpeedHybridEngine",):
        waiting = getattr(package, name)
        assert issubclass(waiting, kind) and not isinstance(engine, waiting)
        with pytest.raises(NotBuilt, match=f"{name} waits for"):
            waiting(model=nn.Linear(1, 1))
    assert package.PipelineEngine is package.runtime.pipe.engine.PipelineEngine
    assert issubclass(package.pipe.PipelineModule, nn.Module) and package.PipelineModule is package.pipe.PipelineModule


def test_an_engine_can_be_mocked(package):
    mocked = Mock(spec=package.DeepSpeedEngine)
    mocked.zero_optimization_stage.return_value = 3
    assert isinstance(mocked, package.DeepSpeedEngine) and mocked.zero_optimization_stage() == 3
    mocked.save_checkpoint("here", tag="x")
    with pytest.raises(AttributeError):
        mocked.no_such_method()


def test_a_method_can_be_patched_for_all_engines(package):
    engine = programs.build(package, 0)
    with patch.object(package.DeepSpeedEngine, "backward", return_value=7) as patched:
        assert engine.backward(None) == 7
    patched.assert_called_once()
    with patch.object(package.DeepSpeedEngine, "zero_optimization_stage", return_value=2):
        assert engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_stage() == 0


def test_an_engine_can_be_extended(package):
    class Mine(package.DeepSpeedEngine):
        def __init__(self, model, note):
            super().__init__(args=None, model=model, config=programs.config(1))
            self.note = note

        def step(self, lr_kwargs=None):
            self.note += "!"
            return super().step(lr_kwargs)

    engine = Mine(programs.Model(), "hello")
    assert type(engine) is Mine and isinstance(engine.optimizer, package.ZeROOptimizer)
    engine.backward(engine(torch.ones(4, 8)))
    engine.optimizer.step()
    assert engine.note == "hello!" and engine.micro_steps == 1


def test_clients_see_the_signatures(package):
    assert "exclude_frozen_parameters" in inspect.signature(programs.build(package, 0).save_checkpoint).parameters
    assert [*inspect.signature(package.initialize).parameters][:3] == ["args", "model", "optimizer"]
    assert "make_engine" not in inspect.signature(package.initialize).parameters


def test_an_engine_has_the_methods_that_scripts_call(package):
    private = ("_backward_epilogue", "_backward_prologue", "_forward_prologue", "_forward_epilogue", "_config")
    names = (*private, "checkpoint_tag_validation_enabled", "get_data_types", "communication_data_type")
    assert [name for name in names if not hasattr(package.DeepSpeedEngine, name)] == []
    engine = programs.build(package, 2, bf16={"enabled": True}, communication_data_type="bf16")
    assert engine.communication_data_type is torch.bfloat16
    config = engine._config
    assert isinstance(config, package.DeepSpeedConfig) and config.zero_config.stage == 2
    assert config.train_micro_batch_size_per_gpu == 4


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_optimizers_are_of_the_classes_of_their_stage(package, stage):
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    engine = programs.build(package, stage)
    optimizer = engine.optimizer
    assert isinstance(optimizer, package.DeepSpeedOptimizer) and isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, package.ZeROOptimizer) == (stage > 0)
    assert type(engine.basic_optimizer) is FusedAdam
    if stage:
        assert type(optimizer) is {1: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}[stage]
    else:
        assert isinstance(optimizer, FusedAdam)
        assert type(programs.build(package, 0, bf16={"enabled": True}).optimizer) is FP16_Optimizer


def test_what_is_given_comes_back_at_stage_0(package):
    model = programs.Model()
    given = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = programs.config(0)
    del settings["optimizer"]
    engine, optimizer, *_ = package.initialize(model=model, optimizer=given, config=settings)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert engine.basic_optimizer is given
    named = type("Lightning" + type(optimizer).__name__, (type(optimizer),), {})
    assert issubclass(named, torch.optim.SGD)
    other = package.initialize(model=programs.Model(), config={**programs.config(0), "optimizer": {"type": "SGD"}})
    assert isinstance(other[1], torch.optim.SGD)


def test_a_rule_that_is_torch_s_by_name_stays_it(package):
    for params, name in (({"torch_adam": True}, "AdamW"), ({}, "FusedAdam")):
        section = {"type": "AdamW", "params": {"lr": 0.01, **params}}
        engine = package.initialize(model=programs.Model(), config={**programs.config(1), "optimizer": section})[0]
        assert type(engine.basic_optimizer).__name__ == name
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    offloaded = package.initialize(model=programs.Model(), config={**programs.config(1), "zero_optimization": zero})[0]
    assert type(offloaded.basic_optimizer) is package.ops.adam.DeepSpeedCPUAdam


def test_hooks_of_steps_run_under_the_other_name(package):
    """torch hooks the step of a class when its first object is made."""
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        engine = programs.build(package, 1)
        engine.train_batch(programs.batches(1))
    finally:
        handle.remove()
    assert engine.basic_optimizer in seen


def two_models(by_hand):
    """Two engines whose losses are added; the gradients of both come from one backward."""
    package = programs.deepspeed()
    first, second = (programs.build(package, 2, gradient_accumulation_steps=1) for _ in range(2))
    for batch in list(programs.batches(1)):
        losses = first(batch), second(batch)
        if by_hand:
            sum(losses).backward()
            for engine in (first, second):
                engine._backward_epilogue()
        else:
            first.backward(losses[0])
            second.backward(losses[1])
        first.step()
        second.step()
    return [engine._consolidated_16bit_state_dict() for engine in (first, second)]


def test_several_models_are_trained_by_one_backward(world):
    ours, theirs = world(2).run(two_models, True)[0], world(2).run(two_models, False)[0]
    assert all(torch.allclose(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


def test_logs_have_the_line_that_is_searched_for(package, caplog):
    with caplog.at_level(logging.INFO, logger=package.utils.logger.name):
        package.utils.logger.addHandler(caplog.handler)
        try:
            programs.build(package, 0)
        finally:
            package.utils.logger.removeHandler(caplog.handler)
    lines = [record for record in caplog.records if record.message.startswith("DeepSpeed info: version=0.19.8")]
    assert lines and lines[0].levelno == logging.INFO
    caplog.clear()
    programs.build(package, 0)  # where nobody has chosen a level, which is then above that of the line
    assert any("DeepSpeed info" in record.message for record in caplog.records)
