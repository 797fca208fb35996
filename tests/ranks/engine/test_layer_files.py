"""The layers of a stage as files by hand, and what a `PipelineModule` says of its ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from mizzen import comm, pipe
from mizzen.config.topology import PipeModelDataParallelTopology
from mizzen.errors import CheckpointError, UsageError
from mizzen.zero import safe_get_full_fp32_param


def model_of(seed=1, **more):
    torch.manual_seed(seed)
    layers = [
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4),
        torch.tanh,
        pipe.LayerSpec(nn.Linear, 4, 4),
        pipe.TiedLayerSpec("mix", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
    ]
    options = {"num_stages": 2, "loss_fn": nn.functional.mse_loss, "partition_method": "uniform"}
    return pipe.PipelineModule(layers, **options | more)


def config(**more):
    return {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progress": {"enabled": False},
        **more,
    }


def by_hand(folder):
    """Everything that needs no engine, on one of two stages."""
    model, rank = model_of(), comm.get_rank()
    grid = model.mpu()
    said = {
        "dims": model.topology().dims,
        "stage": (model.stage_id, grid.get_stage_id(), model.num_stages, model.num_pipeline_stages()),
        "same grid": model.mpu() is grid,
        "path": Path(model.ckpt_layer_path(folder, 0)).name,
        "none yet": model.ckpt_layer_path_list(folder, 0),
        "prefix": model.ckpt_prefix(folder, "tag"),
    }
    model.save_state_dict(folder)
    comm.barrier()
    said["paths"] = [Path(path).name for path in model.ckpt_layer_path_list(folder, 0)]
    other = model_of(seed=2)
    other.load_state_dir(folder)
    own = {name: value for name, value in model.named_parameters() if not value.is_meta}
    said["same"] = [torch.equal(other.get_parameter(name), value) for name, value in own.items()]
    tied = model.get_tied_weights_and_groups()
    said["tied"] = [tuple(weight.shape) for weight, _ in tied], {comm.get_world_size(group) for _, group in tied}
    for weight, _ in tied:
        weight.grad = torch.full_like(weight, 1.0 + rank)
    model.allreduce_tied_weight_gradients()
    said["sums"] = [float(weight.grad.mean()) for weight, _ in tied]
    model.compile(backend="eager")
    compiled = [module._compiled_call_impl is not None for module in model.children() if isinstance(module, nn.Linear)]
    said["compiled"] = compiled[: 1 if rank else 0]
    return said


def test_a_stage_writes_its_layers_and_says_where_it_is(world, tmp_path):
    first, last = world(2).run(by_hand, str(tmp_path))
    for number, said in enumerate((first, last)):
        assert said["dims"] == [2, 1] and said["stage"] == (number, number, 2, 2) and said["same grid"]
        assert said["none yet"] == [] and said["paths"] == [said["path"]]
        assert said["prefix"].endswith(f"tag/pipe_{number:02d}")
        assert len(said["same"]) >= 2 and all(said["same"])
        assert said["tied"] == ([(4, 4)], {2}) and said["sums"] == [3.0]
    assert (first["path"], last["path"]) == ("layer_00-model_states.pt", "layer_02-model_states.pt")
    assert last["compiled"] == [True]
    names = [f"layer_{number:02d}-model_states.pt" for number in (0, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.load(tmp_path / names[0]).keys() == {"weight", "bias"}


def gradient_of_one_stage(is_frozen):
    """Gradients of a shared weight of which the last stage has used its copy, and no other."""
    model = model_of()
    ((weight, _),) = model.get_tied_weights_and_groups()
    weight.requires_grad_(not is_frozen)
    if comm.get_rank() and not is_frozen:
        weight.grad = torch.full_like(weight, 5.0)
    model.allreduce_tied_weight_gradients()
    return None if weight.grad is None else weight.grad.unique().tolist()


@pytest.mark.parametrize(("is_frozen", "found"), [(False, [5.0]), (True, None)])
def test_a_stage_without_a_gradient_of_a_shared_weight_brings_zeros(world, is_frozen, found):
    assert world(2).run(gradient_of_one_stage, is_frozen) == [found] * 2


def test_a_model_for_more_ranks_than_there_are_says_where_its_stages_are():
    model = model_of()
    assert (model.stage_id, model.num_stages) == (0, 2)
    assert model.topology().dims == [2, 1]
    assert model.ckpt_prefix("folder", "tag") == "folder/tag/pipe_00"


def into_an_engine(folder, stage):
    """Values of an engine that has read layers of another model, and of a step later."""
    source = model_of()
    source.save_state_dict(folder)
    comm.barrier()
    model = model_of(seed=2)
    more = {"bf16": {"enabled": True}} if stage else {}
    engine, *_ = mizzen.initialize(model=model, config=config(zero_optimization={"stage": stage}, **more))
    engine.module.load_state_dir(folder)
    return [
        torch.equal(safe_get_full_fp32_param(value), source.get_parameter(name))
        for name, value in engine.module.named_parameters()
    ]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_layers_that_are_read_reach_the_masters_of_an_engine(world, tmp_path, stage):
    for same in world(2).run(into_an_engine, str(tmp_path), stage):
        assert len(same) >= 2 and all(same)


def at_stage_3(folder):
    engine, *_ = mizzen.initialize(
        model=model_of(num_stages=1),
        config=config(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}),
    )
    with pytest.raises(UsageError, match="cut over ranks by its engine.*mizzen checkpoint export --layers"):
        engine.module.save_state_dict(folder)
    with pytest.raises(CheckpointError, match="there is no such file, and layer . is on this rank"):
        model_of().load_state_dir(folder)


def test_what_no_rank_has_whole_is_refused(world, tmp_path):
    world(2).run(at_stage_3, str(tmp_path))


def test_files_of_layers_that_come_cut_name_their_rank(tmp_path):
    model = model_of(num_stages=None, topology=PipeModelDataParallelTopology(num_pp=1, num_mp=1, num_dp=1))
    model.save_state_dict(str(tmp_path), exclude_frozen_params=True)
    assert Path(model.ckpt_layer_path(tmp_path, 2)).name == "layer_02-model_00-model_states.pt"
    assert len(model.ckpt_layer_path_list(str(tmp_path), 2)) == 1
