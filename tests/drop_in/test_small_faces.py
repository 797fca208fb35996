"""Faces of small things: functions, arguments, hostfiles, timers, schedules, loaders, loss scalers, collectives."""

import argparse
import json
import logging
import re

import pytest
import torch
from torch import nn

from drop_in import programs
from mizzen.errors import ConfigError, NotBuilt, UsageError


@pytest.fixture
def package():
    return programs.deepspeed()


def test_elastic_batches(package):
    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4], "version": 0.1}
    config = {"elasticity": section}
    batch, gpus = package.elasticity.compute_elastic_config(config, "0.19")
    assert package.elasticity.elasticity_enabled(config) and all(batch % count == 0 for count in gpus)
    *same, micro = package.elasticity.compute_elastic_config(config, "0.19", world_size=gpus[-1])
    assert same == [batch, gpus] and micro in (2, 4)
    assert not package.elasticity.elasticity_enabled({"elasticity": None})
    with pytest.raises(ConfigError, match="elasticity is off"):
        package.elasticity.compute_elastic_config({}, "0.19")


def test_small_functions(package, capsys):
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.utils import move_to_device, required_torch_version
    from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

    tied = torch.ones(3)
    clones = clone_tensors_for_torch_save({"a": tied, "b": [tied, 4]})
    assert clones["a"] is clones["b"][0] is not tied and clones["b"][1] == 4
    assert move_to_device({"a": tied}, "meta")["a"].is_meta
    assert required_torch_version(min_version=2.11) and not required_torch_version(max_version=1.13)
    timers = SynchronizedWallClockTimer()
    timers("x").start()
    timers("x").stop()
    assert timers("x").elapsed() >= 0
    throughput = ThroughputTimer(batch_size=2, start_step=0)
    throughput.start()
    throughput.stop()
    assert throughput.avg_samples_per_sec() > 0
    assert package.utils.instrument_w_nvtx(lambda: 5)() == 5
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live

    estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), num_gpus_per_node=8)
    assert "1,001,000 parameters" in capsys.readouterr().out


def test_estimates_of_memory(package, capsys):
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    two, three = (
        stage_1_and_2.estimate_zero2_model_states_mem_needs,
        stage3.estimate_zero3_model_states_mem_needs,
    )
    assert two(1000, 4, 2) == two(1000, 4, 2, True, 1.5) == (24_000, 2_000)
    assert two(1000, 4, 2, False, 1.0) == (16_000, 4_000)
    assert three(1000, 100, 4, 2) == three(1000, 100, 4, 2, True, True, True, 1.5) == (13_500, 400, 400)
    assert three(1000, 100, 4, 2, True, False, False, 1.0) == (16_000, 650, 400)
    assert three(1000, 100, 4, 2, cpu_offload=False, additional_buffer_factor=1.0) == (1_600, 2_650, 400)
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(3, 3), 4, 2, 1.5)
    said = capsys.readouterr().out
    assert "offload_optimizer=cpu" in said and "offload_optimizer=none" in said
    stage3.estimate_zero3_model_states_mem_needs_all_cold(10**9, 10**8, 8, 1, 1.0)
    assert capsys.readouterr().out.count("per GPU") == 6


def test_modules_by_their_paths(package, tmp_path):
    from deepspeed.compression.helper import recursive_getattr, recursive_setattr
    from deepspeed.runtime import utils

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    recursive_setattr(model, "0.0", nn.Identity())
    assert isinstance(recursive_getattr(model, "0.0"), nn.Identity)
    recursive_setattr(model, "0", nn.Linear(3, 4))
    model(torch.ones(1, 3)).sum().backward()
    assert utils.get_grad_norm(model.parameters()) == pytest.approx(4.0)  # 12 weights and 4 biases of 1
    utils.ensure_directory_exists(str(tmp_path / "a" / "b.txt"))
    assert (tmp_path / "a").is_dir() and utils.noop_decorator(model) is model
    utils.empty_cache()


def test_arguments_of_scripts(package):
    parser = package.add_config_arguments(argparse.ArgumentParser())
    package.add_tuning_arguments(parser)
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json", "--warmup_num_steps", "5"])
    assert given.deepspeed and given.deepspeed_config == "x.json" and given.warmup_num_steps == 5
    assert not given.deepscale and given.deepscale_config is None


def test_a_file_under_its_old_flag(package, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(programs.config(0)))
    path = str(tmp_path / "config.json")
    parser = package.add_config_arguments(argparse.ArgumentParser())
    engine, *_ = package.initialize(parser.parse_args(["--deepscale_config", path]), programs.Model())
    assert engine.train_micro_batch_size_per_gpu() == 4
    both = parser.parse_args(["--deepscale_config", path, "--deepspeed_config", path])
    with pytest.raises(ConfigError, match="old name"):
        package.initialize(both, programs.Model())


def test_parameters_of_modules_that_are_one_unit():
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module, z3_leaf_parameter

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    set_z3_leaf_module(model[1], True)
    assert [z3_leaf_parameter(parameter) for parameter in model.parameters()] == [False, False, True, True]
    set_z3_leaf_module(model[1], False)
    assert not any(map(z3_leaf_parameter, model.parameters()))


def test_an_error_of_pipelines_can_be_caught():
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.engine import PipelineError

    with pytest.raises(PipelineError, match="without layers"):
        PipelineModule(layers=[])


def test_a_filter_leaves_slots_that_were_given():
    from deepspeed.launcher.runner import parse_inclusion_exclusion, parse_resource_filter

    hosts = {"w0": [2, 3], "w1": [0, 5]}
    assert parse_resource_filter(hosts) == hosts
    assert parse_resource_filter(hosts, "w0:3@w1") == {"w0": [3], "w1": [0, 5]}
    assert parse_resource_filter(hosts, "", "w0@w1:0") == {"w1": [5]}
    assert parse_inclusion_exclusion({"w0": 2}, "", "w0:0") == {"w0": [1]}
    with pytest.raises(UsageError, match="w0 has no slot 0; it has 2, 3"):
        parse_resource_filter(hosts, "w0:0")


@pytest.mark.parametrize(("hosts", "said"), [({"a": []}, "leave a out"), ({}, "none was given")])
def test_a_host_without_slots_is_refused(hosts, said, capsys):
    from deepspeed.launcher.launch import main
    from deepspeed.launcher.runner import encode_world_info, parse_resource_filter

    with pytest.raises(UsageError, match=said):
        parse_resource_filter(hosts, "", "")
    assert main([f"--world_info={encode_world_info(hosts)}", "script.py"]) == 2
    assert said in capsys.readouterr().err


def test_a_hostfile_that_cannot_be_read(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile

    (tmp_path / "hosts").write_text("a slots=2\n")
    assert fetch_hostfile(str(tmp_path / "hosts")) == {"a": 2} and fetch_hostfile(str(tmp_path / "none")) is None
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes"):
        with pytest.raises(UsageError, match="cannot be read"):
            fetch_hostfile(str(path))


def test_what_is_forced_is_printed_on_rank_0(package, capsys, monkeypatch):
    from deepspeed.utils.debug import print_rank_0

    def say(**how):
        package.utils.see_memory_usage("here", **how)
        print_rank_0("there", **how)
        return capsys.readouterr().out

    assert say() == ""
    said = say(force=True)
    assert re.fullmatch(r"here: \d+\.\d\d GB allocated.* GB reserved\nthere\n", said), said
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert say(force=True) == ""


def test_timers_print_what_they_have_measured(capsys):
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    timers = SynchronizedWallClockTimer()
    assert not timers.has_timer("x")
    timers("x").start()
    timers("x").stop()
    assert timers.has_timer("x")
    timers.log(["x", "y"], reset=False, memory_breakdown=True)
    assert re.fullmatch(r"time \(ms\) \| x: \d+\.\d\d \| mem_allocated: .* GB\n", capsys.readouterr().out)
    assert timers("x").elapsed() > 0
    assert timers("x").elapsed() == 0


def test_a_level_by_its_name(package):
    own = logging.getLogger("a client's own")
    package.utils.logging.set_log_level_from_string("ERROR", own)
    assert own.level == logging.ERROR
    for custom in (None, own):
        with pytest.raises(UsageError, match="'loud' is no level of a log: choose one of debug, info"):
            package.utils.logging.set_log_level_from_string("loud", custom)


def test_schedules_take_their_step_by_its_place(package):
    from deepspeed.runtime.lr_schedules import OneCycle, WarmupCosineLR, WarmupLR

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    assert WarmupLR(optimizer, 0.0, 0.001, 1000, "log", -1).last_batch_iteration == -1
    placed = WarmupLR(optimizer, 0.0, 1.0, 10, "linear", 4)
    named = WarmupLR(optimizer, 0.0, 1.0, 10, "linear", last_batch_iteration=4)
    assert placed.get_lr() == named.get_lr() != WarmupLR(optimizer, 0.0, 1.0, 10, "linear").get_lr()
    assert WarmupCosineLR(optimizer, 20, 0.0, 10, 0.1, "linear", 4).last_batch_iteration == 4
    assert OneCycle(optimizer, 0.1, 1.0).last_batch_iteration == -1
    with pytest.raises(TypeError, match="positional"):
        WarmupLR(optimizer, 0.0, 1.0, 10, "linear", 4, 5)
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine, *_, schedule = package.initialize(
        model=programs.Model(), config={**programs.config(0), "scheduler": section}
    )
    assert isinstance(schedule, WarmupLR) and schedule is engine.lr_scheduler


def test_loaders_are_made_as_scripts_do(package):
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from torch.utils.data import SequentialSampler

    data = list(range(6))
    given = {"batch_size": 2, "pin_memory": False, "local_rank": 0, "tput_timer": None}
    ranks = [DeepSpeedDataLoader(data, **given, data_parallel_world_size=3, data_parallel_rank=rank) for rank in (0, 2)]
    assert all(isinstance(loader, package.DeepSpeedDataLoader) and len(loader) == 1 for loader in ranks)
    first, last = ([batch.tolist() for batch in loader] for loader in ranks)
    assert len({*first[0], *last[0]}) == 4
    own = DeepSpeedDataLoader(data, **given, collate_fn=tuple, data_sampler=SequentialSampler(data))
    assert list(own) == [(0, 1), (2, 3), (4, 5)]
    drops = DeepSpeedDataLoader([1] * 5, 2, False, 0, None, dataloader_drop_last=True)
    assert len(list(drops)) == 2
    engine, _, loader, _ = package.initialize(model=programs.Model(), config=programs.config(0), training_data=data * 2)
    assert isinstance(loader, package.DeepSpeedDataLoader)
    with pytest.raises(NotBuilt, match="data efficiency"):
        DeepSpeedDataLoader(data, **given, deepspeed_dataloader_config={"curriculum_learning": True})


def test_loss_scalers_are_made_as_scripts_do(package):
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler, LossScalerBase

    from mizzen.errors import StepError

    fixed = LossScaler(scale=8)
    weight = nn.Parameter(torch.ones(2))
    fixed.backward(weight.sum())
    assert weight.grad.tolist() == [8, 8] and (fixed.loss_scale, fixed.dynamic) == (8, False)
    moving = DynamicLossScaler(init_scale=4, scale_window=2, min_scale=2, delayed_shift=1, consecutive_hysteresis=False)
    scales = []
    for overflow in (False, False, True, True):
        moving.update_scale(overflow)
        scales.append(moving.cur_scale)
    assert scales == [4, 8, 4, 2] and moving.dynamic
    with pytest.raises(StepError, match="at its minimum"):
        moving.update_scale(True)
    calm = DynamicLossScaler(1.0, 1000, 1, 1, False, raise_error_at_min_scale=False)
    calm.update_scale(True)
    assert calm.cur_scale == 1 and not calm.has_overflow_serial([weight])
    weight.grad[0] = torch.inf
    assert calm.has_overflow_serial([weight])
    assert isinstance(CreateLossScaler(torch.bfloat16, 64, True, None), LossScaler)
    assert CreateLossScaler(torch.half, 64, False, None).cur_scale == 64
    with pytest.raises(UsageError, match="dynamic_loss_args"):
        CreateLossScaler(torch.half, 64, True, None)
    with pytest.raises(UsageError, match="above 0"):
        LossScaler(scale=0)
    engine = programs.build(package, 0, fp16={"enabled": True})
    assert isinstance(engine.optimizer.loss_scaler, DynamicLossScaler)
    assert isinstance(programs.build(package, 1).optimizer.loss_scaler, LossScalerBase)


def by_other_names():
    package = programs.deepspeed()
    comm, rank = package.comm, torch.distributed.get_rank()
    mine, gathered, scattered, exchanged = torch.arange(2.0) + 10 * rank, torch.zeros(4), torch.zeros(1), torch.zeros(2)
    comm.configure(deepspeed_config={"comms_logger": {"enabled": True, "debug": True}})
    comm.all_gather_into_tensor(output_tensor=gathered, tensor=mine)
    comm.reduce_scatter_tensor(output_tensor=scattered, tensor=mine, op=comm.ReduceOp.MAX)
    comm.all_to_all_single(output=exchanged, tensor=mine)
    comm.all_to_all_single(output=exchanged, input=mine)
    wholes = [torch.zeros(4)]
    comm.all_gather_coalesced(output_tensors=wholes, input_tensors=[mine])
    logged = comm.get_logged_comm_ops()
    assert all(name.endswith("by_other_names]") for name in logged), logged
    with pytest.raises(TypeError, match="multiple values"):
        comm.all_to_all_single(exchanged, input=mine, tensor=mine)
    return gathered.tolist(), scattered.tolist(), exchanged.tolist(), torch.equal(wholes[0], gathered)


def test_arguments_of_collectives_have_both_names(world):
    whole = [0.0, 1.0, 10.0, 11.0]
    assert world(2).run(by_other_names) == [(whole, [10.0], [0.0, 10.0], True), (whole, [11.0], [1.0, 11.0], True)]


def under_names_of_its_own():
    comm, rank = programs.deepspeed().comm, torch.distributed.get_rank()
    mine = torch.arange(2.0) + 10 * rank
    total, gathered, scattered = mine.clone(), torch.zeros(4), torch.zeros(1)
    logged = [comm.has_comm_data()]
    comm.configure(enabled=True)
    comm.inference_all_reduce(total)
    comm.allgather_fn(gathered, mine)
    comm.reduce_scatter_fn(scattered, tensor=mine, op=comm.ReduceOp.MAX)
    logged += [comm.get_comm_operation_count(), sorted(comm.get_logged_comm_ops())]
    comm.configure(enabled=False)
    mesh = comm.initialize_mesh_device((2, 1), ("dp", "tp"))
    comm.enable_symm_mem_for_group("0")
    ranks = (comm.get_world_rank_from_launcher(), comm.get_local_rank_from_launcher())
    has = (comm.has_all_gather_into_tensor(), comm.has_reduce_scatter_tensor(), comm.has_all_reduce_coalesced())
    return {
        "numbers": (total.tolist(), gathered.tolist(), scattered.tolist()),
        "log": logged,
        "mesh": (mesh.mesh_dim_names, tuple(mesh.shape)),
        "launcher": (*ranks, comm.get_world_size_from_launcher()),
        "has": (*has, comm.has_coalescing_manager()),
    }


def test_collectives_and_questions_under_names_of_its_own(world, monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")
    for rank, answer in enumerate(world(2).run(under_names_of_its_own)):
        assert answer == {
            "numbers": ([10.0, 12.0], [0.0, 1.0, 10.0, 11.0], [10.0 + rank]),
            "log": [False, 3, ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]],
            "mesh": (("dp", "tp"), (2, 1)),
            "launcher": (rank, rank, 2),
            "has": (True, True, True, False),
        }


def test_an_operation_may_be_none(package):
    from deepspeed.comm.reduce_op import ReduceOp

    assert ReduceOp is package.comm.ReduceOp and ReduceOp.UNUSED not in (ReduceOp.SUM, ReduceOp.AVG)
    assert ReduceOp.SUM == torch.distributed.ReduceOp.SUM and isinstance(torch.distributed.ReduceOp.SUM, ReduceOp)


def test_a_backend_without_a_name_is_torch_s(package):
    package.comm.set_backend()
    package.init_distributed(dist_backend="gloo")
    package.comm.set_backend()
    assert package.comm.get_backend() == "gloo"
    with pytest.raises(UsageError, match="not initialized"):
        package.comm.comm.set_backend("nccl")
