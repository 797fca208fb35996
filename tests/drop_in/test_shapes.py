"""What calls return and objects say of themselves, as scripts that were written for DeepSpeed read it."""

import argparse
import math

import pytest
import torch
from torch import nn

from drop_in import programs
from mizzen.errors import NotBuilt, UsageError


@pytest.fixture
def package():
    return programs.deepspeed()


class Broken(nn.Module):
    """A model whose loss can be made infinite."""

    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(2, 1), 1.0

    def forward(self, inputs):
        return self.layer(inputs).mean() * self.factor


def stepped(engine, factors):
    for factor in factors:
        engine.module.factor = factor
        engine.backward(engine(torch.ones(1, 2)))
        engine.step()


def test_counters_count_skipped_steps(package, tmp_path):
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
    engine = package.initialize(model=Broken(), config=settings)[0]
    assert engine.get_global_grad_norm() is None
    stepped(engine, [1.0, math.inf])
    assert (engine.global_steps, engine.skipped_steps, engine.applied_steps) == (2, 1, 1)
    assert engine.get_global_grad_norm() == math.inf and not engine.was_step_applied()
    stepped(engine, [1.0])
    assert engine.global_steps == 3 and math.isfinite(engine.get_global_grad_norm())
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "latest").read_text().strip() == "global_step3" and (tmp_path / "global_step3").is_dir()
    other = package.initialize(model=Broken(), config=settings)[0]
    assert other.load_checkpoint(tmp_path)[0].endswith("global_step3")
    assert (other.global_steps, other.skipped_steps) == (3, 1)
    other.global_steps = 7
    assert (other.global_steps, other.applied_steps) == (7, 6)


def test_a_loss_scaler_tells_where_it_stands(package):
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 50, "hysteresis": 2, "min_loss_scale": 0.5}
    model = Broken().half()
    engine = package.initialize(model=model, config={**settings, "fp16": fp16})[0]
    scaler = engine.optimizer.loss_scaler
    assert (scaler.scale_window, scaler.cur_iter, scaler.cur_scale, scaler.min_scale) == (50, 0, 16, 0.5)
    for factor in (1.0, math.inf):
        model.factor = factor
        engine.backward(engine(torch.ones(1, 2).half()))
        engine.step()
    assert (scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis) == (2, 1, 1)


def test_leaf_modules_are_matched_and_missing(package):
    from deepspeed import utils

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert utils.set_z3_leaf_modules_by_name(model, ["1", "7"], raise_if_not_found=False) == ([model[1]], ["7"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0"]) == ([model[0], model[1][0]], [])
    assert model[1]._z3_leaf and utils.z3_leaf_module(model[1])
    assert utils.set_z3_leaf_modules_by_name(model, ["1"], flag=False) == ([model[1]], [])
    assert not model[1]._z3_leaf and utils.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert utils.unset_z3_leaf_modules(model, [nn.Linear, nn.Conv1d]) == [model[0], model[1][0]]
    assert utils.set_z3_leaf_modules(model, [nn.Conv1d], raise_if_not_found=False) == []


def whole_model_is_a_leaf(by_hand):
    package = programs.deepspeed()
    torch.manual_seed(0)
    model = programs.Model()
    if by_hand:
        model._z3_leaf = True
    else:
        assert package.utils.set_z3_leaf_modules(model, [programs.Model]) == [model] and model._z3_leaf
    engine = package.initialize(model=model, config=programs.config(3))[0]
    data = programs.batches(2)
    return [engine.train_batch(data).item() for _ in range(2)]


def test_the_whole_model_may_be_a_leaf(world):
    plain = world(2).run(programs.trained, 3)[0][0][:2]
    for by_hand in (True, False):
        assert world(2).run(whole_model_is_a_leaf, by_hand)[0] == pytest.approx(plain)


def test_one_rank_marks_what_is_built_for_stage_3(package):
    status = package.zero.ZeroParamStatus
    with package.zero.Init(config_dict_or_path=programs.config(3)):
        model = programs.Model()
    outside = nn.Linear(1, 1)
    weight = model.layers[0].weight
    assert (tuple(weight.ds_shape), weight.ds_numel, weight.ds_status) == ((32, 8), 256, status.NOT_AVAILABLE)
    with package.zero.GatheredParameters(weight):
        assert weight.ds_status == status.AVAILABLE
        with package.zero.GatheredParameters([weight]):
            pass
        assert weight.ds_status == status.AVAILABLE
    assert weight.ds_status == status.NOT_AVAILABLE and not hasattr(outside.weight, "ds_numel")
    assert isinstance(package.zero.GatheredParameters([weight]), package.zero.GatheredParameters)
    engine = package.initialize(model=model, config=programs.config(3))[0]
    assert all(parameter.ds_status == status.AVAILABLE for parameter in engine.module.parameters())
    plain = nn.Linear(2, 2)
    package.zero.Init(module=plain)
    assert plain.weight.ds_numel == 4


def statuses():
    package = programs.deepspeed()
    with package.zero.Init(config_dict_or_path={**programs.config(3), "bf16": {"enabled": True}}):
        model = programs.Model()
    weight = model.layers[0].weight
    before = weight.ds_status.name
    with package.zero.GatheredParameters([weight]):
        inside = weight.ds_status.name
    return before, inside, weight.ds_status.name, str(weight.dtype)


def test_the_status_follows_a_gather_before_there_is_an_engine(world):
    for ranks in (1, 2):
        found = world(ranks).run(statuses)[0]
        assert found == ("NOT_AVAILABLE", "AVAILABLE", "NOT_AVAILABLE", "torch.bfloat16")


def test_a_model_is_built_in_the_dtype_of_its_configuration(package):
    for section, dtype in (({"fp16": {"enabled": True}}, torch.half), ({}, torch.float32)):
        with package.zero.Init(config_dict_or_path={**programs.config(3), **section}):
            model = programs.Model()
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_schedules(package):
    from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR

    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = torch.optim.Adam(groups, lr=0.5)
    cycle = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2, cycle_min_mom=[0.7, 0.8], cycle_max_mom=[0.9, 0.95])
    assert cycle.get_mom() == [(0.9, 0.99), (0.95, 0.99)]
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.7, 0.8]
    cycle.step()
    assert [round(group["betas"][0], 6) for group in optimizer.param_groups] == [0.8, 0.875]
    assert [betas for betas in cycle.get_mom()] == [group["betas"] for group in optimizer.param_groups]
    cosine = WarmupCosineLR(optimizer, total_num_steps=10, warmup_num_steps=2, warmup_type="linear")
    cosine.step(1)
    assert cosine.get_lr_ratio() == pytest.approx(0.5)


def test_layers_are_dropped_as_the_step_had_it(package):
    class Dropping(programs.Model):
        def forward(self, inputs, progressive_layer_drop=False, pld_theta=1.0):
            return super().forward(inputs)

    section = {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.1}}
    engine = package.initialize(model=Dropping(), config={**programs.config(0), **section})[0]
    seen = [engine.get_pld_theta()]
    for _ in range(2):
        engine.train_batch(programs.batches(1))
        seen.append(engine.get_pld_theta())
    assert seen == pytest.approx([1.0, 1.0, 0.5 * math.exp(-0.1) + 0.5])


def test_old_attributes_of_a_section(package):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 7, "stage3_gather_16bit_weights_on_model_save": True}
    section = package.DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": zero}).zero_config
    kind = package.runtime.zero.config.DeepSpeedZeroConfig
    assert type(section) is kind and isinstance(section, kind)
    assert (section.prefetch_bucket_size, section.gather_16bit_weights_on_model_save) == (7, True)
    assert section.param_persistence_threshold == section.stage3_param_persistence_threshold
    with pytest.raises(AttributeError):
        section.colour  # noqa: B018
    assert package.runtime.zero.config.get_zero_config({"zero_optimization": zero}).max_live_parameters > 0


def test_tiles_say_where_they_begin(package):
    layer = package.runtime.zero.tiling.TiledLinear(8, 6, in_splits=2, out_splits=3)
    assert (layer.in_parts, layer.out_parts) == ([0, 4, 8], [0, 2, 4, 6])


def test_files_of_ranks_are_in_their_order(package, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_optim_files

    for rank in (10, 2, 0):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text("")
    ranks = [path.split("rank_")[1].split("_")[0] for path in get_optim_files(str(tmp_path))]
    assert ranks == ["0", "2", "10"]


def test_files_of_bf16_have_its_name(package, tmp_path):
    engine = programs.build(package, 1, bf16={"enabled": True})
    engine.save_checkpoint(tmp_path, tag="x")
    assert (tmp_path / "x" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").is_file()


def test_devices_of_a_host_are_told_by_its_launcher(package, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert package.accelerator.get_accelerator().device_count() == 3
    monkeypatch.delenv("LOCAL_SIZE")
    assert package.accelerator.get_accelerator().device_count() == 1


def test_numbers_for_true_and_false(package):
    settings = {
        **programs.config(1),
        "bf16": {"enabled": 1},
        "wall_clock_breakdown": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": 0}},
    }
    config = package.DeepSpeedConfig(settings)
    assert config.bfloat16_enabled is True and config.wall_clock_breakdown is False
    engine = package.initialize(model=programs.Model(), config=settings)[0]
    assert engine.bfloat16_enabled() is True and not engine.basic_optimizer.param_groups[0]["decoupled_weight_decay"]
    assert engine.steps_per_print() is None


def test_groups_come_back_where_there_are_no_experts(package):
    from deepspeed.moe import utils

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    group = {"params": parameters, "name": "all"}
    assert utils.split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert utils.split_params_into_different_moe_groups_for_optimizer((group, group)) == [group, group]
    assert utils.configure_moe_param_groups(parameters)[0]["params"] == parameters
    assert utils.split_params_into_shared_and_expert_params(parameters) == (parameters, [])
    parameters[0].allreduce = False
    assert utils.is_moe_param(parameters[0])
    with pytest.raises(NotBuilt, match="mixture of experts"):
        utils.split_params_into_different_moe_groups_for_optimizer(group)


def test_one_monitor_for_each_sink(package, tmp_path):
    from deepspeed.monitor.config import CSVConfig
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.monitor import Monitor

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    for number, given in enumerate((section, CSVConfig(**section))):
        monitor = csvMonitor(given)
        monitor.write_events([(f"Train/score{number}", 0.5, 8)])
        assert isinstance(monitor, Monitor) and monitor.enabled
        assert "0.5" in next(tmp_path.rglob(f"*score{number}*")).read_text()
    assert not package.monitor.tensorboard.TensorBoardMonitor({"enabled": False}).enabled


def test_values_are_read_from_a_dict(package):
    from deepspeed.runtime import config, precision_config

    given = {"train_batch_size": 8, "gradient_clipping": 0.5, "fp16": {"enabled": True, "loss_scale": 4}}
    assert config.get_train_batch_size(given) == 8 and config.get_gradient_clipping(given) == 0.5
    assert config.get_steps_per_print({}) is None and config.get_optimizer_name({}) is None
    section = precision_config.get_float16_config(given)
    assert isinstance(section, precision_config.DeepSpeedFP16Config) and section.loss_scale == 4
    assert not precision_config.get_bfloat16_config(given).enabled


def test_the_words_of_the_launcher(package):
    runner = package.launcher.runner
    given = runner.parse_args(["--num_gpus", "2", "--include", "a:0", "train.py", "--lr", "3"])
    assert (given.num_gpus, given.include, given.num_nodes, given.launcher) == (2, "a:0", -1, "pdsh")
    assert (given.user_script, given.user_args) == ("train.py", ["--lr", "3"])
    assert runner.parse_num_nodes("2:4", True) == (2, 4) and runner.parse_num_nodes("3", False) == (3, -1)
    with pytest.raises(UsageError, match="elastic_training"):
        runner.parse_num_nodes("2:4", False)
    assert runner.parse_node_config_list("a:2,0@b") == {"a": [0, 2], "b": []}
    flags = argparse.Namespace(lr_schedule="WarmupLR", warmup_num_steps=5, cycle_max_lr=3)
    from deepspeed.runtime.lr_schedules import get_config_from_args, get_lr_from_config

    assert get_config_from_args(flags) == ({"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, None)
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 3}}) == (3, "")


def test_cores_of_ranks(package):
    numa = package.utils.numa
    assert numa.parse_range_list("0-2,5") == [0, 1, 2, 5]
    for wrong in ("3-1", "x", "0-2,1"):
        with pytest.raises(ValueError):  # noqa: PT011  (any text: the kind is what is tested)
            numa.parse_range_list(wrong)
    words, count = numa.get_numactl_cmd("0-3", 2, 1)
    assert words[:3] == ["numactl", "-C", "2,3"] and count == 2


def test_what_torch_was_built_with(package):
    assert {"version", "cuda_version", "nccl_version", "hip_version"} <= package.git_version_info.torch_info.keys()
