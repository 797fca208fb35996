"""`mizzen config`: the words that a user reads."""

import json
import sys
from pathlib import Path

import pytest

from mizzen.config.layout import Layout

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs" / "zero2_bf16.json"


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write_file


def test_check_says_ok_with_a_summary(mizzen):
    ran = mizzen("config", "check", EXAMPLE, "--world", 8)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"{EXAMPLE}: ok, 15 values given",
        f"  layout  {Layout(dp_shard=8)}",
        "  batch   256 = micro 8 * accumulation 4 * dp 8",
    ]


def test_check_without_a_world_does_not_judge_the_batch(mizzen, write):
    path = write({"gradient_accumulation_steps": 4})
    assert mizzen("config", "check", path).code == 0
    ran = mizzen("config", "check", path, "--world", 1)
    assert ran.code == 2
    assert "gradient_accumulation_steps = 4 alone gives no batch size" in ran.out


def test_check_without_a_world_finds_a_batch_that_fits_no_number_of_ranks(mizzen, write):
    sizes = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    ran = mizzen("config", "check", write(sizes))
    assert ran.code == 2
    assert "train_batch_size: 10 is not a multiple of" in ran.out
    assert "4 * 2 = 8, on any number of ranks: the nearest that fit are 8 and 16" in ran.out


FOR_A_CLIENT = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "fp16": {"enabled": "auto", "initial_scale_power": 12},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
}


def test_check_of_a_file_that_a_client_completes(mizzen, write):
    ran = mizzen("config", "check", write(FOR_A_CLIENT), "--world", 8)
    assert ran.code == 0
    assert ran.out.splitlines()[1:] == [
        f"  layout  {Layout(dp_shard=8)}",
        "  batch   filled in by the client; --batch N says how many samples a rank takes at once",
        '  fp16.initial_scale_power: no effect: fp16.enabled is "auto", which is false unless a client says otherwise',
        '  filled in by the client, where the file says "auto": train_batch_size, train_micro_batch_size_per_gpu, '
        "optimizer.params.lr, scheduler.params.total_num_steps, fp16.enabled",
    ]
    ran = mizzen("config", "check", write(FOR_A_CLIENT), "--world", 8, "--batch", 4)
    assert "  batch   64 = micro 4 * accumulation 2 * dp 8" in ran.out.splitlines()


def test_resolve_of_a_file_that_a_client_completes(mizzen, write):
    ran = mizzen("config", "resolve", write(FOR_A_CLIENT), "--world", 8, "--batch", 4)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in ran.out.splitlines()}
    assert rows["train_micro_batch_size_per_gpu"] == "4 given as --batch"
    assert rows["train_batch_size"].startswith("64 derived from")
    left = mizzen("config", "resolve", write(FOR_A_CLIENT), "--world", 8, "--all").out
    assert "until the client fills it in" in left


def test_an_auto_that_no_client_fills_in_stays_a_problem(mizzen, write):
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 1e-3}}
    ran = mizzen("config", "check", write({"scheduler": cycle}))
    assert ran.code == 2
    assert 'scheduler.params.cycle_min_lr: "auto" cannot be derived' in ran.out


def test_check_says_what_is_not_built_yet(mizzen, write):
    keys = {"zero_optimization": {"stage": 2, "cpu_offload": True}, "sequence_parallel_size": 2}
    ran = mizzen("config", "check", write(keys))
    assert ran.code == 2
    assert ran.out.splitlines()[1:] == [
        "  sequence_parallel_size: sequence parallelism is not built yet; leave the key out",
        "  zero_optimization.cpu_offload: old key; use zero_optimization.offload_optimizer",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("_comment", "comments are written as in HJSON, with #"),
        ("_read_the_docs", "comments are written as in HJSON, with #"),
        ("comms_config", "what is read is comms_logger"),
        ("monitor_config", "what is read is tensorboard, wandb, csv_monitor and comet"),
    ],
)
def test_keys_that_deepspeed_passes_over_are_problems_but_for_the_drop_in(mizzen, write, key, words):
    path = write({"train_batch_size": 8, key: {"enabled": True}})
    ran = mizzen("config", "check", path)
    assert ran.code == 2
    assert f"{key}: unknown key, which DeepSpeed passes over in silence: {words}" in ran.out
    ran = mizzen("config", "check", path, "--drop-in")
    assert ran.code == 0
    assert ran.out.splitlines()[1:] == [f"  {key}: not read, there and here"]


@pytest.mark.parametrize("key", ["fp8", "sequence_parallel", "gradient_cliping"])
def test_a_key_that_asks_for_something_is_a_problem_for_the_drop_in_too(mizzen, write, key):
    ran = mizzen("config", "check", write({"train_batch_size": 8, key: {"enabled": True}}), "--drop-in")
    assert ran.code == 2
    assert f"{key}: unknown key" in ran.out


def test_check_lists_every_problem(mizzen, write):
    ran = mizzen("config", "check", write({"fp61": {}, "gradient_clipping": -1, "zero_optimization": {"stage": 7}}))
    assert ran.code == 2
    first, *problems = ran.out.splitlines()
    assert first.endswith(": 3 problems")
    assert problems == [
        "  fp61: unknown key; did you mean 'fp16'?",
        "  gradient_clipping: -1 is below the least allowed value, 0",
        "  zero_optimization.stage: 7 is not one of [0, 1, 2, 3]",
    ]


def test_check_knows_the_names_of_optimizers_and_schedules(mizzen, write):
    sections = {"optimizer": {"type": "AdanW"}, "scheduler": {"type": "WarmUpLinear"}}
    ran = mizzen("config", "check", write(sections))
    assert ran.code == 2
    assert ran.out.splitlines()[1:] == [
        "  optimizer.type: no optimizer is called \"AdanW\"; did you mean 'AdamW'?",
        "  scheduler.type: no schedule is called \"WarmUpLinear\"; did you mean 'WarmupLR'?",
    ]
    for optimizer, schedule in (("fusedadam", "onecycle"), ("DeepSpeedCPUAdam", "StepLR"), ("adamw4bit", "linearlr")):
        sections = {"optimizer": {"type": optimizer}, "scheduler": {"type": schedule}}
        assert mizzen("config", "check", write(sections)).code == 0
    ran = mizzen("config", "check", write({"optimizer": {"type": "OneBitAdam"}, "scheduler": {"type": "LambdaLR"}}))
    assert "OneBitAdam is not built yet" in ran.out and "LambdaLR cannot come from JSON" in ran.out


def test_check_tells_what_changes_nothing_once(mizzen, write):
    ran = mizzen("config", "check", write({"zero_optimization": {"cpu_offload": False, "reduce_scatter": False}}))
    assert ran.code == 0
    assert sorted(ran.out.splitlines()[1:]) == [
        "  zero_optimization.cpu_offload: old key; use zero_optimization.offload_optimizer",
        "  zero_optimization.reduce_scatter: no effect: each stage uses the collective that moves the fewest bytes",
    ]
    assert ran.err == ""


def test_check_of_a_file_that_is_no_json(mizzen, write):
    ran = mizzen("config", "check", write('{"a": [}'))
    assert ran.code == 2
    assert "neither JSON nor HJSON" in ran.out
    assert "line 1" in ran.out


def test_check_of_an_empty_file(mizzen, write):
    ran = mizzen("config", "check", write("\n"))
    assert ran.code == 2
    assert ran.out.endswith("config.json is empty\n")


def test_a_key_that_no_terminal_can_show_is_escaped(mizzen, write):
    ran = mizzen("config", "check", write('{"stage\\ud800": 1}'))
    assert ran.code == 2
    assert "stage\\ud800: unknown key" in ran.out


def test_resolve_prints_given_and_derived_values(mizzen):
    ran = mizzen("config", "resolve", EXAMPLE, "--world", 8)
    assert ran.code == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in ran.out.splitlines()}
    assert rows["zero_optimization.reduce_bucket_size"] == "5e+08 given"
    assert rows["data_parallel_size"] == "8 derived from 8 ranks"
    assert "seed" not in rows


def test_resolve_all_prints_the_defaults_too(mizzen):
    ran = mizzen("config", "resolve", EXAMPLE, "--world", 8, "--all")
    assert any(line.split() == ["seed", "null", "default"] for line in ran.out.splitlines())


def test_resolve_json_is_json(mizzen):
    found = json.loads(mizzen("config", "resolve", EXAMPLE, "--world", 8, "--json").out)
    assert found["zero_optimization.reduce_bucket_size"] == {"value": 500_000_000, "origin": "given"}
    assert found["data_parallel_size"] == {"value": 8, "origin": "derived from 8 ranks"}


def test_resolve_draws_a_table_where_a_person_looks(mizzen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plain = mizzen("config", "resolve", EXAMPLE, "--world", 8).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = mizzen("config", "resolve", EXAMPLE, "--world", 8).out
    assert "origin" in table
    assert "origin" not in plain
    assert "5e+08" in table


def test_resolve_refuses_what_does_not_fit(mizzen):
    ran = mizzen("config", "resolve", EXAMPLE, "--world", 7)
    assert (ran.code, ran.out) == (2, "")
    assert "the nearest that fit are 224 and 280" in ran.err


def test_explain_says_what_a_key_means(mizzen):
    ran = mizzen("config", "explain", "zero_optimization.stage")
    assert ran.code == 0
    assert ran.out.startswith("zero_optimization.stage\n  0 replicates all")


def test_explain_of_an_unknown_key_offers_the_nearest(mizzen):
    ran = mizzen("config", "explain", "zero_optimization.stag")
    assert ran.code == 2
    assert "zero_optimization.stage" in ran.err


def test_schema_is_a_json_schema_of_every_key(mizzen):
    schema = json.loads(mizzen("config", "schema").out)
    assert schema["type"] == "object"
    assert "stage" in schema["properties"]["zero_optimization"]["properties"]


def test_docs_is_a_page(mizzen):
    ran = mizzen("config", "docs")
    assert ran.code == 0
    assert ran.out.startswith("# Configuration")
    assert "`zero_optimization`" in ran.out
