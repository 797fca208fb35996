"""Faces that stand behind import paths: optimizers, accelerator, groups, builders, configuration, small functions."""

import argparse
import copy

import pytest
import torch
from torch import nn

from drop_in import programs
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.errors import ConfigError, LaunchError, NotBuilt, UsageError


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
    if kind == "PDSHRunner":  # what a job holds is no argument
        with pytest.raises(LaunchError, match="no command of pdsh alone starts a job: .*`mizzen run --launcher pdsh`"):
            runner.get_cmd(environment, {"a": [0, 1], "b": [3]})
        return
    command = runner.get_cmd(environment, {"a": [0, 1], "b": [3]})
    job = Job.decode(environment["MIZZEN_JOB"])
    assert command[0] == RUNNERS[kind] and "--more" in command
    assert [(host.name, host.slots) for host in job.hosts] == [("a", (0, 1)), ("b", (3,))]
    assert job.program.arguments == ("--name", "a b") and job.environment["COLOUR"] == "light blue"


def groups_of_a_mesh():
    groups = programs.deepspeed().utils.groups
    Mesh.build(Layout(dp_shard=2, tp=2), device_type="cpu")
    return (
        groups._get_data_parallel_group_ranks(),
        groups._get_data_parallel_rank(),
        groups._get_model_parallel_rank(),
        groups._get_model_parallel_world_size(),
        groups.get_tensor_model_parallel_src_rank(),
    )


def test_groups_answer_from_the_mesh_of_the_engine_that_was_made_last(world):
    assert world(4).run(groups_of_a_mesh) == [
        ([0, 2], 0, 0, 2, 0),
        ([1, 3], 0, 1, 2, 0),
        ([0, 2], 1, 0, 2, 2),
        ([1, 3], 1, 1, 2, 2),
    ]


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
    with pytest.raises(NotBuilt, match="give tp_size alone"):
        package.tp_model_init(nn.Linear(1, 1), tp_size=2, dtype=torch.float32, tp_group=object())
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
    assert package.ops.__compatible_ops__["fused_adam"] and not package.ops.__compatible_ops__["gds"]
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
