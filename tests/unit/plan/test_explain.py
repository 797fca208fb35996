"""What `mizzen plan` prints, to the letter."""

from mizzen.config.load import load
from mizzen.config.resolve import with_batch
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.explain import explain

SKETCH = Sketch(
    (
        ParameterSketch("embed.weight", (32000, 512), is_embedding=True),
        ParameterSketch("up.weight", (512, 2048)),
        ParameterSketch("frozen.weight", (512, 512), requires_grad=False),
    )
)
CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1048576},
    "optimizer": {"type": "AdamW"},
}


def test_a_model_on_many_ranks():
    assert explain(build(load(CONFIG), 8, SKETCH, ORDER)) == (
        "world   8 ranks: pp=1 dp=8 sp=1 tp=1 ep=1\n"
        "batch   64 samples per step = 4 micro x 2 accumulation x 8 dp\n"
        "model   17.69M parameters, 17.43M trainable\n"
        "memory  141.8 MiB (parameters 33.8 MiB, gradients 83.1 MiB, masters 8.3 MiB, states 16.6 MiB) "
        "per rank, without activations\n"
        "changes\n"
        "  1. shard: ZeRO stage 2 over dp=8 in 2 buckets, sums in float32\n"
        "     memory -157.9 MiB (parameters 0 B, gradients 16.6 MiB, masters -58.2 MiB, states -116.4 MiB)"
    )


def test_what_a_client_will_fill_in_is_said():
    config = {**CONFIG, "zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    assert explain(build(with_batch(load(config), None), 8, Sketch(()), ORDER)) == (
        "world   8 ranks: pp=1 dp=8 sp=1 tp=1 ep=1\n"
        "batch   filled in by the client; --batch N says how many samples a rank takes at once\n"
        'open    "auto" means the default until a client fills it in: bf16.enabled, zero_optimization.stage\n'
        "changes\n"
        "  1. shard: ZeRO stage 0 over dp=8, sums in float32"
    )


def test_sums_that_would_be_narrower_than_their_parameters_are_noted():
    config = {**CONFIG, "data_types": {"grad_accum_dtype": "fp16"}}
    text = explain(build(load(config), 8, SKETCH, ORDER))
    said = "fp16 is too narrow for parameters in bfloat16: their sums are in float32"
    assert f"\nnote    data_types.grad_accum_dtype: {said}\n" in text
    assert "note" not in explain(build(load({**config, "data_types": {"grad_accum_dtype": "bf16"}}), 8, SKETCH, ORDER))
    plan = build(load({"train_batch_size": 8, "data_types": {"grad_accum_dtype": "bf16"}}), 8, SKETCH, ORDER)
    assert [note.split(": ")[1] for note in plan.notes] == ["bf16 is too narrow for parameters in float32"]


def test_without_a_model_there_is_no_memory_to_print():
    config = load({**CONFIG, "deterministic": True, "communication_data_type": "bf16"})
    assert explain(build(config, 8, Sketch(()), ORDER)) == (
        "world   8 ranks: pp=1 dp=8 sp=1 tp=1 ep=1\n"
        "batch   64 samples per step = 4 micro x 2 accumulation x 8 dp\n"
        "changes\n"
        "  1. shard: ZeRO stage 2 over dp=8, sums in bfloat16"
    )


def test_one_rank():
    assert explain(build(load(CONFIG), 1, SKETCH, ORDER)).splitlines()[4:] == [
        "changes",
        "  1. shard: ZeRO stage 2 on one data-parallel rank: nothing to shard",
    ]


def test_nothing_to_do():
    frozen = Sketch((ParameterSketch("w", (4, 4), requires_grad=False),))
    lines = explain(build(load(CONFIG), 2, frozen, ORDER)).splitlines()
    assert lines[2:] == [
        "model   16 parameters, 0 trainable",
        "memory  32 B (parameters 32 B, gradients 0 B, masters 0 B, states 0 B) per rank, without activations",
        "changes none: the model runs as it is",
    ]
