"""Unmodified models of transformers in stages train as one process does; their names stay those of the whole model."""

from importlib.util import find_spec

import pytest

from breadth import choice
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build as build_plan

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

CASES = [
    ("gpt2", 2, 2, 0, "1f1b"),
    ("llama", 4, 2, 3, "interleaved"),
    ("bert", 2, 2, 1, "zero_bubble"),
    ("gpt2", 2, 2, 0, "zbv"),
    ("llama", 2, 2, 0, "1f1b"),
    ("gpt2", 4, 4, 1, "1f1b"),
]
"""Model, ranks, stages, ZeRO stage, schedule."""
TIED = {
    "lm_head.weight": "transformer.wte.weight",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
}


@pytest.mark.parametrize(("kind", "size", "stages", "stage", "schedule"), choice(CASES, CASES[:1]))
def test_a_model_cut_between_its_blocks_trains_as_one_process_does(world, kind, size, stages, stage, schedule):
    from parity import pipelined_models

    check(pipelined_models.reference(kind), world(size).run(pipelined_models.train, kind, stages, stage, schedule))


@pytest.mark.parametrize(("size", "stage"), choice([(2, 0), (4, 3)], [(2, 0)]))
def test_adapters_in_a_frozen_model_train_as_in_one_process(world, size, stage):
    from parity import pipelined_models

    runs = world(size).run(pipelined_models.train_adapted, 2, stage, "1f1b")
    check(pipelined_models.reference("adapted"), runs)


def test_fused_operations_of_a_cut_model_train_as_one_process_does(world):
    from parity import pipelined_models

    check(pipelined_models.reference("llama"), world(2).run(pipelined_models.train_fused, 2, 0, "1f1b"))


@pytest.mark.parametrize(
    ("kind", "is_on_meta"), choice([("llama", False), ("gpt2", True), ("bert", False)], [("gpt2", True)])
)
def test_a_model_cut_by_what_its_blocks_take_trains_as_one_process_does(world, tmp_path, kind, is_on_meta):
    from parity import pipelined_models

    if is_on_meta:
        pipelined_models.build(kind).save_pretrained(tmp_path)
    runs = world(2).run(pipelined_models.train_measured, kind, str(tmp_path) if is_on_meta else "")
    check(pipelined_models.reference(kind), runs)


def check(expected, runs):
    losses, start, updates = expected
    seen = set()
    for found, values in runs:
        assert found == pytest.approx(losses, rel=1e-5)
        for given, value in values.items():
            name = given if given in updates else TIED[given]  # a stage may know a weight by its other name alone
            assert (value - start[name] - updates[name]).norm() <= 2e-3 * updates[name].norm() + 1e-8, name
            seen.add(name)
    assert seen == set(updates)


FROM_FILES = [
    ("llama", 2, 2, 0, "1f1b"),
    ("llama", 4, 2, 3, "1f1b"),
    ("bert", 2, 2, 1, "1f1b"),
    ("gpt2", 2, 2, 0, "zbv"),
]


@pytest.mark.parametrize(("kind", "size", "stages", "stage", "schedule"), choice(FROM_FILES, FROM_FILES[1:2]))
def test_a_model_without_memory_is_read_from_files_and_whole_on_no_rank(
    world, tmp_path, kind, size, stages, stage, schedule
):
    from parity import pipelined_models

    model = pipelined_models.build(kind)
    model.save_pretrained(tmp_path, max_shard_size=9000)  # several files, and an index
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    runs = world(size).run(pipelined_models.train_from_files, kind, stages, stage, schedule, str(tmp_path))
    check(pipelined_models.reference(kind), [run[:2] for run in runs])
    read = [run[2] for run in runs]
    shares = size // stages if stage == 3 else 1
    for name in sizes:
        holders = [each[name] for each in read if name in each]
        is_tied = name in TIED.values() and kind != "llama"
        # By as many ranks as a stage has, or as two of them have where it is tied; at ZeRO stage 3 once in all.
        assert len(holders) == (size if is_tied and schedule == "1f1b" else size // stages), name
        if shares > 1:
            assert sum(holders) == sizes[name] and max(holders) < sizes[name], name
    assert max(sum(each.values()) for each in read) < 0.75 * sum(sizes.values())


def test_an_encoder_decoder_model_is_refused_by_name():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4))
    with pytest.raises(PlanError, match="T5ForConditionalGeneration has several lists of blocks .*encoder-decoder"):
        build_plan(load({"train_batch_size": 2, "pipeline_parallel_size": 2}), 2, Sketch.of(model), ORDER)
