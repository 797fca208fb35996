"""Before the parse: paths are spread, spellings settled, old keys moved, and "auto" left to be derived."""

import pytest

from mizzen.ambient import AMBIENT
from mizzen.config import load
from mizzen.config.migrate import drop_autos, move_old_keys, name_keys, spread_paths, walk
from mizzen.config.schema import Config
from mizzen.errors import ConfigError


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    AMBIENT.warned.clear()


def test_walk_finds_parents_before_children_also_in_tables_and_lists():
    raw = {
        "compression_training": {"row_pruning": {"different_groups": {"g": {"params": {"dense_ratio": 0.5}}}}},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["x"]}]}},
        "optimizer": {"type": "Adam", "params": {"lr": 1}},
        "unknown": 1,
    }
    found = {item.path: item.value for item in walk(raw, Config)}
    assert found["compression_training.row_pruning.different_groups.g.params.dense_ratio"] == 0.5
    assert found["tensor_parallel.partition_config.layer_specs.0.patterns"] == ["x"]
    assert found["optimizer.params"] == {"lr": 1}
    assert "optimizer.params.lr" not in found and "unknown" not in found
    paths = list(found)
    assert paths.index("optimizer") < paths.index("optimizer.type")


def test_a_path_at_the_top_goes_where_it_points_and_gives_way(caplog):
    raw = {
        "zero_optimization": {"reduce_bucket_size": 5, "stage": "auto"},
        "zero_optimization.reduce_bucket_size": 6,
        "zero_optimization.stage": 2,
        "fp16.enabled": True,
    }
    with caplog.at_level("INFO", logger="mizzen"):
        spread_paths(raw)
    assert raw == {"zero_optimization": {"reduce_bucket_size": 5, "stage": 2}, "fp16": {"enabled": True}}
    assert caplog.messages == [
        '"zero_optimization.reduce_bucket_size" at the top level gives way to the value inside zero_optimization'
    ]
    with pytest.raises(ConfigError, match=r"^seed\.x: a path to a key, but seed is not an object of keys"):
        spread_paths({"seed": 3, "seed.x": 1})
    odd = {".": 1, "a.": 2}
    spread_paths(odd)
    assert odd == {".": 1, "a.": 2}


def test_other_spellings_become_the_first_one():
    raw = {"bfloat16": {"enabled": True}, "tensor_parallel": {"tp": {"tp_size": 2}, "kernel_inject": False}}
    assert name_keys(raw, Config) == []
    assert raw == {
        "bf16": {"enabled": True},
        "tensor_parallel": {"tensor_parallel": {"tp_size": 2}, "replace_with_kernel_inject": False},
    }
    with pytest.raises(ConfigError, match=r"^bfloat16: given together with bf16, its other spelling: keep one"):
        name_keys({"bf16": {}, "bfloat16": {}}, Config)


def test_unknown_keys_are_all_reported_with_the_best_guess():
    raw = {"tain_batch_size": 1, "fp16": {"enable": 1, "offload_param": 1}, "amp": {"anything": 1}, "enabled": True}
    assert name_keys(raw, Config)[:3] == [
        ("tain_batch_size", "unknown key; did you mean 'train_batch_size'?"),
        ("fp16.enable", "unknown key; did you mean 'enabled'?"),
        ("fp16.offload_param", "unknown key here; did you mean zero_optimization.offload_param?"),
    ]
    assert [path for path, _ in name_keys(raw, Config)] == [
        "tain_batch_size",
        "fp16.enable",
        "fp16.offload_param",
        "enabled",
    ]


@pytest.mark.parametrize(
    ("old", "path", "value"),
    [
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.offload_optimizer.device", "cpu"),
        ({"zero_optimization": {"cpu_offload_param": True}}, "zero_optimization.offload_param.device", "cpu"),
        ({"zero_optimization": {"cpu_offload_params": True}}, "zero_optimization.offload_param.device", "cpu"),
        ({"zero_optimization": {"cpu_offload": False}}, "zero_optimization.offload_optimizer", None),
        ({"zero_optimization": {"cpu_offload": None}}, "zero_optimization.offload_optimizer", None),
        ({"zero_optimization": {"cpu_offload": "auto"}}, "zero_optimization.offload_optimizer", None),
        (
            {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}},
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
        ),
        ({"fp32_allreduce": True}, "communication_data_type", "fp32"),
        ({"fp32_allreduce": False}, "communication_data_type", None),
        ({"allgather_size": 1e6}, "zero_optimization.allgather_bucket_size", 1_000_000),
        ({"aio": {"thread_count": 4}}, "aio.intra_op_parallelism", 4),
        ({"aio": {"thread_count": 4, "intra_op_parallelism": "auto"}}, "aio.intra_op_parallelism", 4),
        ({"checkpoint": {"writer": {"decoupled": True}}}, "checkpoint.async_save", True),
    ],
    ids=str,
)
def test_old_keys_move(old, path, value):
    assert load(old).at(path) == value


def test_an_old_key_warns_once(caplog):
    for _ in range(2):
        load({"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": True}})
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "zero_optimization.cpu_offload is an old key; use zero_optimization.offload_optimizer instead"),
        (
            "WARNING",
            "zero_optimization.cpu_offload_use_pin_memory is an old key without effect "
            "(pin_memory is a key of each offload section)",
        ),
    ]


def test_moves_are_reported_and_leave_no_trace():
    raw = {"allgather_size": 5, "zero_optimization": {"stage": 1}}
    assert move_old_keys(raw, Config) == {"zero_optimization.allgather_bucket_size": "allgather_size"}
    assert raw == {"zero_optimization": {"stage": 1, "allgather_bucket_size": 5}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "cpu_offload": True}},
            "zero_optimization.offload_optimizer: given together with its old name zero_optimization.cpu_offload: "
            "keep only zero_optimization.offload_optimizer",
        ),
        (
            {"zero_optimization": {"allgather_bucket_size": 1}, "allgather_size": 1},
            "zero_optimization.allgather_bucket_size: given together with its old name allgather_size: "
            "keep only zero_optimization.allgather_bucket_size",
        ),
        (
            {"zero_optimization": None, "allgather_size": 1},
            "allgather_size: moves to zero_optimization.allgather_bucket_size, "
            "but zero_optimization is not an object of keys",
        ),
        ({"zero_optimization": {"cpu_offload": "yes"}}, 'zero_optimization.cpu_offload: "yes" is not true or false'),
    ],
    ids=["nested", "flat", "no home", "wrong value"],
)
def test_old_keys_that_cannot_move(source, message):
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert str(caught.value) == message


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_the_boolean_form_of_zero(value, stage, caplog):
    assert load({"zero_optimization": value}).zero_optimization.stage == stage
    assert caplog.messages == [
        f"zero_optimization given as a plain value is an old form; use zero_optimization: {{'stage': {stage}}} instead"
    ]


def test_auto_is_left_to_be_derived():
    raw = {
        "train_batch_size": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": 1e-8}},
        "scheduler": "auto",
        "expert_parallel": {"top_k": "auto", "score_func": "auto", "route_scale": "auto"},
        "zero_optimization": {"zenflow": {"select_strategy": "auto", "topk_ratio": "auto"}},
        "pipeline": {"stages": "auto"},
    }
    dropped = drop_autos(raw, Config)
    assert raw == {
        "optimizer": {"type": "Adam", "params": {"eps": 1e-8}},
        "expert_parallel": {"top_k": "auto", "score_func": "auto"},
        "zero_optimization": {"zenflow": {"select_strategy": "auto"}},
        "pipeline": {"stages": "auto"},
    }
    assert dropped == {
        *("train_batch_size", "optimizer.params.lr", "scheduler", "expert_parallel.route_scale"),
        "zero_optimization.zenflow.topk_ratio",
    }


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"optimizer": {"type": "auto"}}, "optimizer.type"),
        *(
            ({"scheduler": {"type": "X", "params": {key: "auto"}}}, f"scheduler.params.{key}")
            for key in ("cycle_min_lr", "cycle_max_lr")
        ),
    ],
)
def test_an_auto_that_nobody_can_answer_is_named(source, path):
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert str(caught.value) == f'{path}: "auto" cannot be derived from the configuration: give a value'
