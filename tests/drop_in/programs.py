"""What ranks do with the drop-in."""

import sys
from itertools import chain

import pytest
import torch
from torch import nn

import mizzen
from behind import use_behind
from mizzen.errors import NotBuilt, UsageError
from mizzen.launcher.job import DROP_IN


def deepspeed():
    """The package, in a process that has only mizzen on its path."""
    if str(DROP_IN) not in sys.path:
        sys.path.insert(0, str(DROP_IN))
    import deepspeed

    return deepspeed


class Model(nn.Module):
    """Returns its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs):
        return (self.layers(inputs).squeeze(-1) - inputs.sum(-1)).square().mean()


def config(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 10,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **more,
    }


def build(package, stage, **more):
    torch.manual_seed(0)
    model = Model()
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **more))
    return engine


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return iter([torch.randn(4, 8, generator=generator) for _ in range(2 * count)])


def trained(stage):
    """Losses of both packages, and what the drop-in's are."""
    package = deepspeed()
    theirs, ours = build(package, stage), build(mizzen, stage)
    data, same = batches(3), batches(3)
    losses = [theirs.train_batch(data) for _ in range(3)]
    reports = [ours.train_batch(same) for _ in range(3)]
    assert theirs.zero_optimization_partition_gradients() == (stage >= 2)
    assert theirs.zero_round_robin_gradients() is False and theirs.get_data_types() == (torch.float32, torch.float32)
    assert theirs.save_non_zero_checkpoint == (theirs.global_rank == 0) and theirs.flops_profiler is None
    kinds = {
        "engine": type(theirs) is package.DeepSpeedEngine and not isinstance(ours, package.DeepSpeedEngine),
        "any": isinstance(theirs.optimizer, package.runtime.base_optimizer.DeepSpeedOptimizer),
        "sharded": isinstance(theirs.optimizer, package.ZeROOptimizer),
        "stage 1 and 2": isinstance(theirs.optimizer, package.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer),
        "stage 3": isinstance(theirs.optimizer, package.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3),
        "torch": isinstance(theirs.optimizer, torch.optim.Optimizer),
    }
    assert all(isinstance(loss, torch.Tensor) and loss.ndim == 0 for loss in losses)
    assert theirs.last_step.loss == losses[-1].item()
    return [loss.item() for loss in losses], [report.loss for report in reports], kinds


def facts():
    """What parameters say of themselves while they are built, in an engine, and gathered."""
    package = deepspeed()
    assert not hasattr(nn.Parameter(torch.ones(2)), "ds_numel")
    status = package.runtime.zero.partition_parameters.ZeroParamStatus
    with package.zero.Init(config_dict_or_path=config(3)):
        model = Model()
    early = [(p.ds_numel, tuple(p.ds_shape), p.ds_status.name) for p in model.parameters()]
    engine, *_ = package.initialize(model=model, config=config(3))
    own = list(model.parameters())
    here = [p.partition_numel() for p in own]
    sharded = [p.ds_status == status.NOT_AVAILABLE for p in own]
    numbers = [p.ds_id for p in own]
    is_zero_param = package.runtime.zero.utils.is_zero_param
    with package.zero.GatheredParameters(own):
        assert all(map(is_zero_param, model.parameters()))
        inside = {p.ds_status for p in model.parameters()} == {status.AVAILABLE}
    assert len(set(numbers)) == len(own) and numbers == [p.ds_id for p in model.parameters()]
    assert not hasattr(torch.ones(2), "ds_numel") and not hasattr(nn.Parameter(torch.ones(2)), "ds_id")
    adapted = Model().requires_grad_(False)
    adapted.layers[0].weight.requires_grad_()
    package.initialize(model=adapted, config=config(3))
    assert all(p.ds_status in status and p.ds_numel for p in adapted.parameters())
    other = build(package, 2).module
    assert not any(hasattr(p, "ds_id") or hasattr(p, "ds_numel") for p in other.parameters())
    summary = own[0].ds_summary()
    assert (summary["ds_shape"], summary["status"], summary["id"]) == ((32, 8), "NOT_AVAILABLE", numbers[0])
    assert own[0].ds_secondary_tensor is None and own[0].partition() is None and own[3].all_gather() is None
    with pytest.raises(UsageError, match=r"all_gather\(\).*\[32, 8\].*deepspeed.zero.GatheredParameters"):
        own[0].all_gather()
    assert all(map(is_zero_param, own)) and not is_zero_param(nn.Parameter(torch.ones(2))) and not is_zero_param(3)
    return early, here, sharded, inside, [p.ds_tensor.numel() for p in own]


def generated():
    """What TRL does around generation with the parameters of ZeRO-3, word by word."""
    package = deepspeed()
    engine = build(package, 3)
    engine.train_batch(batches(1))
    with package.zero.GatheredParameters(engine.parameters()):
        offload = engine.optimizer.parameter_offload
        inner = offload.module
        for _, parameter in chain(inner.named_parameters(recurse=True), inner.ds_external_parameters()):
            parameter.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        # Ranks may do different things here: nothing is communicated.
        inside = [engine.module(torch.ones(4, 8)).item() for _ in range(1 + engine.global_rank)][-1]
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    outside = engine(torch.ones(4, 8)).item()
    engine.train_batch(batches(1))
    return inside, outside


def saved(folder, stage):
    """A checkpoint, what lies in it, and what comes back."""
    package = deepspeed()
    engine = build(package, stage, checkpoint={"keep_last": 1})
    data = batches(3)
    for _ in range(2):
        engine.train_batch(data)
        engine.save_checkpoint(folder, client_state={"epoch": engine.global_steps})
    whole = engine._consolidated_16bit_state_dict()
    other = build(package, stage)
    path, client = other.load_checkpoint(folder)
    assert engine.train_batch(batches(1)).item() == other.train_batch(batches(1)).item()
    return path, client, whole


def exported(folder, stage):
    """The weights, and what lies in two folders that were given no name of a file."""
    engine = build(deepspeed(), stage)
    engine.train_batch(batches(1))
    engine.save_16bit_model(f"{folder}/new")
    engine.save_fp16_model(f"{folder}/old")
    return engine._consolidated_16bit_state_dict()


def stepped_by_hand(stage):
    """Weights after steps through calls of the optimizer and of the engine, and the learning rates in between."""
    package = deepspeed()
    theirs, ours = build(package, stage), build(package, stage)
    rates = [theirs.optimizer.get_lr()]
    theirs.optimizer.set_lr(0.25)
    ours.optimizer.param_groups[0]["lr"] = 0.25
    rates.append(theirs.optimizer.param_groups[0]["lr"])
    for batch in batches(2):
        theirs.optimizer.backward(theirs(batch) / 2, retain_graph=False)
        theirs.optimizer.step()
        ours.backward(ours(batch))
        ours.step()
    with pytest.raises(NotBuilt, match="gradients of gradients"):
        theirs.optimizer.backward(theirs(batch), create_graph=True)
    return rates, theirs._consolidated_16bit_state_dict(), ours._consolidated_16bit_state_dict()


def late(is_beside):
    """The classes of an engine with ZenFlow, outside and inside, and whether it trains by the published section."""
    use_behind()
    package = deepspeed()
    section = {"topk_ratio": 0.05, "select_strategy": "auto", "select_interval": "auto", "update_interval": 4}
    section |= {"full_warm_up_rounds": 0, "overlap_step": is_beside}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "zenflow": section}
    engine = build(package, 2, zero_optimization=zero)
    data = batches(20)
    losses = [engine.train_batch(data).item() for _ in range(20)]
    return type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__, losses[0], losses[-1]
