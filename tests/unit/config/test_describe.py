"""The words of the schema: one key, the page, and the JSON schema for editors."""

import json

import pytest

from mizzen.config.describe import Explanation, catalogue, explain, json_schema, render_markdown
from mizzen.config.section import Fate
from mizzen.errors import ConfigError


def test_one_key():
    assert explain("zero_optimization.stage") == Explanation(
        path="zero_optimization.stage",
        type="one of 0, 1, 2, 3",
        default="0",
        fate=Fate(),
        sentence="0 replicates all, 1 shards optimizer states, 2 also gradients, 3 also parameters.",
        allowed=("0", "1", "2", "3"),
    )
    assert str(explain("zero_optimization.prefetch_bucket_size")) == (
        "zero_optimization.stage3_prefetch_bucket_size\n"
        "  Elements gathered ahead of their use in forward; 0 gathers each when needed. Backward is one block ahead.\n"
        "  type:    size >= 0\n"
        "  default: 50000000\n"
        "  fate:    read\n"
        "  also:    prefetch_bucket_size"
    )


@pytest.mark.parametrize(
    ("path", "type_", "default", "fate"),
    [
        ("bfloat16.enabled", "true or false", "false", "read"),
        ("train_batch_size", "whole number >= 1 or null", "null", "read"),
        ("optimizer.type", "string", "", "read"),
        ("optimizer.params", "object of your own keys", "{}", "read"),
        ("optimizer", "section or null", "null", "read"),
        ("tensor_parallel.tp.tp_size", "whole number >= 1", "1", "read"),
        ("tensor_parallel.partition_config.layer_specs", "list (section)", "[]", "read"),
        ("tensor_parallel.partition_config.layer_specs.3.patterns", "list (regular expression)", "", "read"),
        ("compression_training.row_pruning.different_groups", "sections by name", "{}", "read"),
        ("compression_training.row_pruning.different_groups.mine.params.dense_ratio", "number 0..1", "", "read"),
        ("expert_parallel.top_k", 'whole number >= 1 or "auto"', '"auto"', "read"),
        ("communication_data_type", 'one of "fp32", "fp16", "bf16" or null', "null", "read"),
        ("compile.passes", 'list (one of "z1", "z3", "autosp", "autotp") or null', "null", "no_effect"),
        ("zero_optimization.offload_param.pin_memory", "true or false", "true", "read"),
        ("zero_optimization.reduce_scatter", "true or false", "true", "no_effect"),
        ("sparse_attention.block", "whole number >= 1", "16", "no_effect"),
        ("nebula.enabled", "true or false", "false", "refused"),
        ("zero_optimization.cpu_offload", "true or false or null", "", "moved"),
    ],
)
def test_types_defaults_and_fates_in_words(path, type_, default, fate):
    found = explain(path)
    assert (found.type, found.default, found.fate.kind) == (type_, default, fate)


def test_a_section_lists_its_keys_and_an_old_key_its_new_one():
    assert explain("scheduler").keys == ("type", "params")
    assert "  keys:    type, params" in str(explain("scheduler"))
    assert "  fate:    old key; use aio.intra_op_parallelism" in str(explain("aio.thread_count"))
    assert "old key without effect: pin_memory is" in str(explain("zero_optimization.cpu_offload_use_pin_memory"))
    assert "  fate:    no effect: " in str(explain("zero_optimization.reduce_scatter"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("stage", "stage: unknown key; did you mean zero_optimization.stage?"),
        ("gradient_cliping", "gradient_cliping: unknown key; did you mean gradient_clipping"),
        ("zero_optimization.stge", "zero_optimization.stge: unknown key; did you mean zero_optimization.stage"),
        ("zero_optimization.stage.x", "zero_optimization.stage.x: unknown key; did you mean zero_optimization.stage"),
        ("optimizer.params.lr", "optimizer.params.lr: the keys of optimizer.params are your own"),
        ("qqqq", "qqqq: unknown key"),
        ("", ""),
    ],
)
def test_unknown_paths(path, message):
    with pytest.raises(ConfigError) as caught:
        explain(path)
    assert str(caught.value).startswith(message)


def test_the_page():
    page = render_markdown()
    assert page.startswith("# Configuration\n") and page.endswith("|\n")
    assert "\n## `zero_optimization.offload_param`\n\n| key | type | default | fate | meaning |\n" in page
    assert "| `bf16` or `bfloat16` | section |  | read | Brain floating point. |" in page
    assert "| `zero_optimization.cpu_offload` | `zero_optimization.offload_optimizer` |" in page
    assert "## `compression_training.row_pruning.different_groups.<name>.params`\n" in page
    assert "`cpu_offload` |" not in page.partition("## Old keys")[0]
    for key in catalogue():
        assert f"`{key.path.rpartition('.')[2]}" in page or key.fate.kind == "moved"


def test_the_json_schema_is_json_and_closed():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False and schema["type"] == "object"
    zero = schema["properties"]["zero_optimization"]["properties"]
    assert zero["stage"]["anyOf"] == [{"enum": [0, 1, 2, 3], "type": "integer"}, {"const": "auto"}]
    assert zero["stage"]["description"].startswith("0 replicates all")
    assert zero["prefetch_bucket_size"] == zero["stage3_prefetch_bucket_size"]
    assert zero["reduce_bucket_size"]["anyOf"][0] == {"minimum": 1, "type": "integer"}
    assert zero["offload_param"]["anyOf"][1] == {"type": "null"}
    assert zero["cpu_offload"]["deprecated"] is True
    assert "(no effect: " in zero["reduce_scatter"]["description"]
    assert schema["properties"]["amp"]["additionalProperties"] is True
    groups = schema["properties"]["compression_training"]["properties"]["row_pruning"]["properties"]["different_groups"]
    assert groups["additionalProperties"]["properties"]["params"]["required"] == ["dense_ratio"]
    assert schema["properties"]["optimizer"]["anyOf"][0]["required"] == ["type"]


def test_the_json_schema_accepts_and_refuses_what_load_does():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(json_schema())
    assert check.is_valid(
        {"zero_optimization": {"stage": "auto", "offload_param": None}, "bfloat16": {"enabled": True}}
    )
    assert not check.is_valid({"zero_optimization": {"stage": 7}})
    assert not check.is_valid({"zero_optimisation": {}})
