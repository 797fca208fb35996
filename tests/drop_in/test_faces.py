"""Faces that stand behind import paths: optimizers, accelerator, groups, builders, configuration, small functions."""

import argparse
import copy
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


def stepped(optimizer_of, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_adam_is_torch_s(package):
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    decoupled = stepped(lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=True))
    plain = stepped(lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1, fused=True))
    assert not torch.equal(decoupled, plain)
    assert torch.equal(stepped(lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1)), decoupled)
    assert torch.equal(stepped(lambda params: FusedAdam(params, 0.1, weight_decay=0.1, adam_w_mode=False)), plain)
    assert torch.equal(stepped(lambda params: DeepSpeedCPUAdam(params, 0.1, weight_decay=0.1)), decoupled)
    assert torch.equal(stepped(lambda params: DeepSpeedCPUAdam([{"params": params}], 0.1, weight_decay=0.1)), decoupled)
    with pytest.raises(NotBuilt, match="bias_correction"):
        FusedAdam([nn.Parameter(torch.ones(1))], bias_correction=False)
    with pytest.raises(NotBuilt, match="AdamW8bit"):
        DeepSpeedCPUAdam([nn.Parameter(torch.ones(1))], fp32_optimizer_states=False)


@pytest.mark.parametrize(
    "name",
    ["adam.DeepSpeedCPUAdam", "adam.FusedAdam", "lion.FusedLion", "lamb.FusedLamb", "adagrad.DeepSpeedCPUAdagrad"],
)
def test_a_group_without_parameters_is_refused(package, name):
    module, _, kind = name.partition(".")
    with pytest.raises(UsageError, match="parameter group 1 has lr, and no 'params'"):
        getattr(getattr(package.ops, module), kind)([{"params": [nn.Parameter(torch.ones(1))]}, {"lr": 1}])


def test_accelerate_makes_every_host_optimizer_with_arguments_of_adam(package):
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    adagrad = stepped(lambda params: torch.optim.Adagrad(params, lr=0.1))
    assert torch.equal(stepped(lambda params: DeepSpeedCPUAdagrad(params, lr=0.1, adamw_mode=False)), adagrad)
    lion = stepped(lambda params: FusedLion(params, lr=0.1))
    assert torch.equal(stepped(lambda params: DeepSpeedCPULion(params, lr=0.1, adamw_mode=False)), lion)
    with pytest.raises(UsageError, match="no argument speed"):
        DeepSpeedCPULion([nn.Parameter(torch.ones(1))], speed=3)


def test_lamb_refuses_what_it_cannot_do(package):
    from deepspeed.ops.lamb import FusedLamb

    assert stepped(lambda params: FusedLamb(params, lr=0.1)).isfinite().all()
    with pytest.raises(UsageError, match="gradient_clipping"):
        FusedLamb([nn.Parameter(torch.ones(1))], max_grad_norm=1.0)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_takes_such_an_optimizer(world, stage):
    assert world(2).run(trained_with_fused_adam, stage) == world(2).run(trained_with_fused_adam, None)


def trained_with_fused_adam(stage):
    package = programs.deepspeed()
    from deepspeed.ops.adam import FusedAdam

    torch.manual_seed(0)
    model = programs.Model()
    settings = programs.config(stage or 0)
    if stage is not None:
        del settings["optimizer"]
    optimizer = FusedAdam(model.parameters(), lr=0.01) if stage is not None else None
    engine, *_ = package.initialize(model=model, optimizer=optimizer, config=settings)
    data = programs.batches(2)
    return [engine.train_batch(data).item() for _ in range(2)]


def test_the_accelerator_is_wide(package):
    device = package.accelerator.get_accelerator()
    assert isinstance(device, package.accelerator.DeepSpeedAccelerator)
    assert (device.device_name(), device.communication_backend_name()) == ("cpu", "gloo")
    assert (device.device_name(0), device.current_device_name()) == ("cpu", "cpu")
    assert device.is_available() and device.is_synchronized_device() and device.use_host_timers()
    assert torch.float in device.supported_dtypes() and isinstance(device.is_bf16_supported(), bool)
    assert device.memory_allocated() > 0 and device.max_memory_allocated() >= 0
    assert device.total_memory() >= device.available_memory() > 0
    assert device.on_accelerator(torch.ones(1)) and device.is_pinned(device.pin_memory(torch.ones(1)))
    assert device.FloatTensor([1.0, 2.0]).tolist() == [1.0, 2.0] and device.LongTensor(2, 3).shape == (2, 3)
    state = device.get_rng_state()
    first = torch.rand(1)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(1), first)
    with device.stream(device.Stream()), device.capture_to_graph(device.create_graph()):
        event = device.Event(enable_timing=True)
        event.record()
    device.synchronize()
    device.range_push("x")
    device.range_pop()
    assert device.create_op_builder("FusedAdamBuilder").NAME == "fused_adam"
    assert device.get_op_builder("NoBuilder") is None
    assert device.visible_devices_envs() == [] and device.lazy_call(lambda: 3) == 3
    package.accelerator.set_accelerator(device)
    assert package.accelerator.is_current_accelerator_supported()
    assert copy.copy(device).device_name() == "cpu"


def test_accelerators_by_their_classes(package):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    device = package.accelerator.get_accelerator()
    assert isinstance(device, CPU_Accelerator) and not isinstance(device, CUDA_Accelerator)
    assert CUDA_Accelerator().device_name(1) == "cuda:1" and CPU_Accelerator().communication_backend_name() == "gloo"


def test_a_log_of_a_script_s_own(package, capsys):
    from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log

    log = CommsLogger()
    assert not log.enabled and log.prof_all and not log.has_data()
    log.configure({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}})
    log.prof_all = False
    log.start_profiling_op(["broadcast"])
    assert log.enabled and not log.prof_all and log.prof_ops == ("all_reduce", "broadcast")
    for milliseconds in (1.0, 3.0):
        log.append("all_reduce", "mine", milliseconds, 1_000_000)
    assert log.get_raw_data() == {"mine": {1_000_000: [2, [1.0, 3.0], [16.0, 16 / 3], [0.0, 0.0]]}}
    assert log.get_total_operations() == 2 and calc_bw_log("all_reduce", 1_000_000, 1.0) == (16.0, 0.0)
    row = log.log_all(return_dict=True)["summary"]["mine"][1_000_000]
    assert row["avg_latency_ms"] == 2.0 and "mine" in capsys.readouterr().out
    log.reset_data()
    assert log.get_operation_names() == []
    with pytest.raises(AttributeError):
        log.colour  # noqa: B018


def test_collectives_are_not_turned_off(package):
    package.comm.torch.all_reduce_comm_off(False)
    with pytest.raises(NotBuilt, match=r"all_reduce_comm_off\(True\)"):
        package.comm.torch.all_reduce_comm_off(True)


def test_what_zero_init_changes_of_tensors(package):
    both = list(package.zero.DeepSpeedTensorOverride)
    package.zero.Init(enabled=False, tensor_overrides=both)
    with pytest.raises(NotBuilt, match="leave the argument out"):
        package.zero.Init(enabled=False, tensor_overrides=both[:1])


def test_defaults_of_sections_and_numbers_with_commas(package):
    from deepspeed.runtime.config_utils import get_config_default, pp_int

    section = package.runtime.zero.config.DeepSpeedZeroConfig
    assert get_config_default(section, "stage") == 0 and get_config_default(section, "reduce_bucket_size") == 5e8
    with pytest.raises(UsageError, match="'colour'.*is no field"):
        get_config_default(section, "colour")
    assert repr(pp_int(1e5)) == "100,000" and repr(pp_int(7, "many")) == "many" and pp_int(3) + 1 == 4


RUNNERS = {
    "PDSHRunner": "pdsh",
    "OpenMPIRunner": "mpirun",
    "MPICHRunner": "mpirun",
    "IMPIRunner": "mpirun",
    "SlurmRunner": "srun",
    "MVAPICHRunner": "mpirun",
}


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_runner_gives_the_command_of_mizzen_s_launcher(package, monkeypatch, kind):
    from deepspeed.launcher.multinode_runner import MultiNodeRunner

    from mizzen.launcher.job import Job

    args = argparse.Namespace(
        user_script="train.py", user_args=["--name", "a b"], master_addr="a", master_port=29500, launcher_args="--more"
    )
    args.include, args.num_nodes, args.venv_script, args.enable_each_rank_log = "", -1, None, "None"
    runner = getattr(package.launcher.multinode_runner, kind)(args, "ignored", {"a": 4, "b": 4})
    assert isinstance(runner, MultiNodeRunner)
    monkeypatch.setenv("PATH", "")
    assert not runner.backend_exists()
    runner.add_export("COLOUR", "light blue")
    environment = {}
    command = runner.get_cmd(environment, {"a": [0, 1], "b": [3]})
    if kind == "PDSHRunner":
        command, end, same = command
        assert same is environment and end[0] == "pdsh" and "--ask end" in end[-1]
    job = Job.decode(environment["MIZZEN_JOB"] if "MIZZEN_JOB" in environment else command[-1].split()[-1])
    assert command[0] == RUNNERS[kind] and "--more" in command
    assert [(host.name, host.slots) for host in job.hosts] == [("a", (0, 1)), ("b", (3,))]
    assert job.program.arguments == ("--name", "a b") and job.environment["COLOUR"] == "light blue"


def test_groups_are_of_data_parallel_ranks(world):
    assert world(2).run(groups_of) == [(2, 0, 1, 0, True), (2, 1, 1, 0, True)]


def groups_of():
    groups = programs.deepspeed().utils.groups
    return (
        groups._get_data_parallel_world_size(),
        groups._get_data_parallel_rank(),
        groups._get_sequence_parallel_world_size(),
        groups._get_model_parallel_rank(),
        groups._get_sequence_parallel_group() is None and groups._get_data_parallel_group() is not None,
    )


def test_experts_are_refused(package):
    with pytest.raises(NotBuilt, match="mixture of experts"):
        package.utils.groups.initialize(ep_size=2)
    with pytest.raises(NotBuilt, match="tensor parallelism"):
        package.tp_model_init(nn.Linear(1, 1), tp_size=2, dtype=torch.float32)
    model = nn.Linear(1, 1)
    assert package.tp_model_init(model=model, tp_size=1, dtype=torch.float32, config={}) is model
    for wrong in (
        {"tp_size": "2", "dtype": torch.half},
        {"tp_size": 0, "dtype": torch.half},
        {"tp_size": 1, "dtype": 3},
    ):
        with pytest.raises(UsageError, match="tp_model_init"):
            package.tp_model_init(model, **wrong)
    assert package.moe.utils.has_moe_layers(model) == (False, 0)


def test_builders_load_what_there_is(package):
    from deepspeed.ops import op_builder

    assert op_builder.fused_adam.FusedAdamBuilder is op_builder.FusedAdamBuilder
    assert package.ops.__compatible_ops__["fused_adam"] and not package.ops.__compatible_ops__["async_io"]
    for name, builder in package.ops.op_builder.all_ops.ALL_OPS.items():
        assert builder.name == name and builder.absolute_name() == f"deepspeed.ops.{name}"
        if builder.is_compatible():
            assert builder.load()
        else:
            with pytest.raises(NotBuilt, match=f"{name} waits"):
                builder.load()


def test_operations_flatten_tensors(package):
    utils = package.ops.op_builder.UtilsBuilder().load()
    tensors = [torch.ones(2, 3), torch.zeros(4)]
    flat = utils.flatten(tensors)
    assert flat.shape == (10,) and [each.shape for each in utils.unflatten(flat, tensors)] == [(2, 3), (4,)]


def step_by_step(step):
    """A tensor after two steps with the same gradient, by a function that is given its states."""
    parameter, states = torch.ones(3), [torch.zeros(3), torch.zeros(3)]
    for number in (1, 2):
        step(number, parameter, torch.tensor([0.5, -1.0, 2.0]), *states)
    return parameter


def rule_by_rule(kind, **settings):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], **settings)
    for _ in range(2):
        parameter.grad = torch.tensor([0.5, -1.0, 2.0])
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("mode", "kind"), [(1, torch.optim.AdamW), (0, torch.optim.Adam)])
def test_operations_of_adam(package, mode, kind):
    builders, numbers = package.ops.op_builder, (0.9, 0.999, 1e-8)
    fused, host = builders.FusedAdamBuilder().load(), builders.CPUAdamBuilder().load()

    def step(number, p, g, m, v):
        fused.multi_tensor_adam(2048, p, [[g], [p], [m], [v]], 0.1, *numbers, number, mode, 1, 0.1)

    wanted = rule_by_rule(kind, lr=0.1, weight_decay=0.1)
    assert torch.allclose(step_by_step(step), wanted)
    host.create_adam(7, 0.1, *numbers, 0.1, bool(mode), False)
    found = step_by_step(lambda n, p, g, m, v: host.adam_update(7, n, 0.1, *numbers, 0.1, True, p, g, m, v))
    assert torch.allclose(found, wanted)
    host.destroy_adam(7)
    with pytest.raises(UsageError, match="number 7"):
        host.adam_update(7, 1, 0.1, *numbers, 0.1, True, *[torch.ones(1)] * 4)
    with pytest.raises(NotBuilt, match="bias_correction"):
        fused.multi_tensor_adam(0, None, [[]] * 4, 0.1, *numbers, 1, 1, 0, 0.1)


def test_operations_of_other_rules(package):
    builders = package.ops.op_builder
    adagrad = builders.CPUAdagradBuilder().load()
    adagrad.create_adagrad(0, 0.1, 1e-10, 0.1, False)
    found = step_by_step(lambda n, p, g, s, _: adagrad.adagrad_update(0, n, 0.1, 1e-10, 0.1, p, g, s))
    assert torch.allclose(found, rule_by_rule(torch.optim.Adagrad, lr=0.1, weight_decay=0.1))
    lion = builders.CPULionBuilder().load()
    lion.create_lion(0, 0.1, 0.9, 0.99, 0.1, False)
    found = step_by_step(lambda n, p, g, m, _: lion.lion_update(0, n, 0.1, 0.9, 0.99, 0.1, p, g, m))
    assert torch.allclose(found, rule_by_rule(package.ops.lion.FusedLion, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1))
    for refused in (
        lambda: builders.QuantizerBuilder().load().quantize(torch.ones(8), 1, 8, 0),
        lambda: builders.FusedLambBuilder().load().lamb(),
        lambda: builders.CPUAdamBuilder().load().adam_rollback(7),
    ):
        with pytest.raises(NotBuilt):
            refused()


def test_a_configuration_answers_by_the_names_of_scripts(package):
    config = package.DeepSpeedConfig({**programs.config(2), "gradient_clipping": 0.5, "bf16": {"enabled": True}})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert (config.gradient_accumulation_steps, config.gradient_clipping) == (2, 0.5)
    assert (config.zero_optimization_stage, config.zero_config.stage) == (2, 2)
    assert config.bfloat16_enabled and not config.fp16_enabled and config.optimizer_name == "adamw"
    assert config.zero_enabled and config.aio_config.queue_depth == 8 and config.initial_dynamic_scale == 65536
    assert config.checkpoint_tag_validation_enabled and not config.checkpoint_tag_validation_fail
    assert not config.pld_enabled and config.grad_accum_dtype is None and config.compile_config is not None
    assert package.DeepSpeedConfig({"train_batch_size": 1}).optimizer_name is None
    assert package.DeepSpeedConfig({"train_batch_size": 1}).optimizer_params is None
    assert not hasattr(config, "colour")


def test_every_name_of_a_configuration_is_a_key(package):
    from deepspeed.faces.config import OTHER_NAMES
    from deepspeed.faces.getters import KEYS
    from mizzen.config.migrate import name_keys, spread_paths
    from mizzen.config.schema import Config

    for key in {*OTHER_NAMES.values(), *KEYS.values()}:
        raw = {key: None}
        spread_paths(raw)
        assert not name_keys(raw, Config), key
    strict = {"train_batch_size": 1, "checkpoint": {"tag_validation": "fail"}}
    assert package.DeepSpeedConfig(strict).checkpoint_tag_validation_fail


def test_a_section_is_made_as_from_a_file(package):
    section = package.runtime.zero.config.DeepSpeedZeroConfig
    made = section(stage=2, reduce_bucket_size="auto", cpu_offload=False)
    assert (made.stage, made.reduce_bucket_size) == (2, 5e8)
    assert isinstance(made, section) and isinstance(package.DeepSpeedConfig(programs.config(1)).zero_config, section)
    assert not isinstance(3, section)
    with pytest.raises(ConfigError, match=r"zero_optimization.stage: 9 is not one of \[0, 1, 2, 3\]"):
        section(stage=9)


def test_a_configuration_refuses_what_makes_no_sense(package):
    with pytest.raises(package.DeepSpeedConfigError):
        package.DeepSpeedConfig({"train_batch_size": -1})


def test_a_configuration_is_put_together_and_written(package, tmp_path):
    writer = package.runtime.config.DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(tmp_path / "config.json")
    other = package.runtime.config.DeepSpeedConfigWriter()
    other.load_config(tmp_path / "config.json")
    assert other.data == {"train_batch_size": 4}


def test_numbers_go_where_the_configuration_says(package, tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = package.DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section})
    monitor = package.monitor.monitor.MonitorMaster(config.monitor_config)
    monitor.write_events([("Train/score", 0.5, 8)])
    assert monitor.enabled and "0.5" in next(tmp_path.rglob("*score*")).read_text()


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

    with pytest.raises(PipelineError, match="not built yet"):
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
