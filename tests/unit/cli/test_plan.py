"""`mizzen plan`: what would be done, or why not, and a model from the user's own module."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mizzen.config.layout import Layout
from mizzen.errors import PlanError

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
MODULE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))

def huge():
    return nn.Linear(10**6, 10**6)

def broken():
    raise RuntimeError("no weights here")

def wrong():
    return 7

def needy():
    import no_such_package.layers

def __getattr__(name):
    # As packages do that load what is behind a name only when it is asked for.
    if name == "lazy":
        return lambda: nn.Linear(1000, 1000)
    if name == "lazy_and_needy":
        try:
            import no_such_package
        except ImportError as error:
            raise ModuleNotFoundError("could not import lazy_and_needy") from error
    raise AttributeError(name)

number = 7
"""


@pytest.fixture
def plan(mizzen, tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(MODULE)
    (tmp_path / "needy_model.py").write_text("import no_such_package\n")
    (tmp_path / "broken_model.py").write_text("def build(:\n")
    (tmp_path / "plain.json").write_text('{"train_batch_size": 16}')
    monkeypatch.chdir(tmp_path)

    def run(config, world, *more):
        return mizzen("plan", config, "--world", world, *more)

    return run


def test_layout_and_batch_are_printed(plan):
    ran = plan("plain.json", 8)
    assert ran.code == 0
    assert "8 ranks" in ran.out
    assert "16 samples" in ran.out


def test_the_cut_of_every_module_is_printed(plan, tmp_path):
    (tmp_path / "cut.json").write_text('{"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}')
    ran = plan("cut.json", 2, "--model", "their_model:build")
    assert ran.code == 0
    assert "     0  column, 500 of 1000 outputs\n     1  row, 500 of 1000 inputs\n" in ran.out


def test_a_batch_that_a_client_fills_in_is_no_error_and_may_be_said(plan, tmp_path):
    (tmp_path / "trainer.json").write_text('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    assert "batch   filled in by the client; --batch N says how many" in plan("trainer.json", 8).out
    assert "batch   32 samples per step = 4 micro x 1 accumulation x 8 dp" in plan("trainer.json", 8, "--batch", 4).out
    (tmp_path / "said.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    ran = plan("said.json", 8, "--batch", 4)
    assert (ran.code, ran.out) == (2, "")
    assert "--batch 4: the file itself has train_micro_batch_size_per_gpu = 2" in ran.err


def test_a_batch_that_a_client_fills_in_does_not_hide_a_refusal(plan, tmp_path):
    (tmp_path / "trainer.json").write_text(
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3, "zenflow": {}}}'
    )
    ran = plan("trainer.json", 8)
    assert ran.code == 2
    assert ran.out.splitlines()[1].startswith("batch   filled in by the client")
    assert ran.out.splitlines()[2] == "refused"


def test_keys_that_deepspeed_passes_over_are_errors_but_for_the_drop_in(plan, tmp_path):
    (tmp_path / "noted.json").write_text('{"train_batch_size": 8, "_comment": "for eight GPUs"}')
    assert "_comment: unknown key, which DeepSpeed passes over in silence" in plan("noted.json", 8).err
    assert plan("noted.json", 8, "--drop-in").code == 0


def test_a_name_that_no_optimizer_has_is_one_line(plan, tmp_path):
    (tmp_path / "slip.json").write_text('{"train_batch_size": 16, "optimizer": {"type": "AdanW"}}')
    ran = plan("slip.json", 8)
    assert ran.code == 2
    assert "optimizer.type: no optimizer is called \"AdanW\"; did you mean 'AdamW'?" in ran.out + ran.err


def test_what_is_not_built_is_refused_with_layout_and_batch(plan, monkeypatch):
    monkeypatch.setattr("mizzen.cli.plan.build", _refuse)
    ran = plan(CONFIGS / "3d.json", 512)
    assert ran.code == 2
    assert ran.out.splitlines() == [
        f"layout  {Layout(pp=4, dp_shard=16, tp=8)}",
        "batch   1024 = micro 2 * accumulation 32 * dp 16",
        "refused",
        "  - pipeline: not today",
        "  - tensor: not today",
    ]


def _refuse(*_):
    raise PlanError("pipeline: not today\ntensor: not today")


def test_a_world_that_does_not_fit_is_one_line(plan):
    ran = plan("plain.json", 7)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("mizzen: error: train_batch_size: 16 is not a multiple of dp = 7")


def test_a_model_is_built_on_the_meta_device_and_priced(plan):
    ran = plan("plain.json", 8, "--model", "their_model:build")
    assert ran.code == 0
    assert re.search(r"1\.01\d* ?M parameters", ran.out)


def test_a_name_that_a_module_makes_when_asked_is_found(plan):
    assert re.search(r"1(\.0\d*)? ?M parameters", plan("plain.json", 8, "--model", "their_model:lazy").out)


def test_a_model_of_four_terabytes_takes_no_memory(plan):
    assert re.search(r"1 ?T parameters", plan("plain.json", 8, "--model", "their_model:huge").out)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("their_model", "--model their_model: write it as module:function"),
        ("their_model:absent", "their_model has no function 'absent'"),
        ("their_model:number", "their_model has no function 'number'"),
        ("no_such_module:build", "there is no module 'no_such_module', neither in this folder nor among the installed"),
        ("their_model.inner:build", "there is no module 'their_model.inner'"),
        ("needy_model:build", "needy_model needs the package 'no_such_package', which is not installed"),
        ("broken_model:build", "SyntaxError: invalid syntax"),
        ("their_model:needy", "their_model needs the package 'no_such_package', which is not installed"),
        ("their_model:lazy_and_needy", "their_model needs the package 'no_such_package', which is not installed"),
        ("their_model:broken", "RuntimeError: no weights here"),
        ("their_model:wrong", "returned a int, not a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(plan, address, message):
    ran = plan("plain.json", 8, "--model", address)
    assert ran.code == 2
    assert ran.err.startswith("mizzen: error: --model ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


PIPELINE = '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline_parallel_size": 4%s}'


def test_a_schedule_is_drawn(plan, tmp_path):
    (tmp_path / "pipeline.json").write_text(PIPELINE % "")
    ran = plan("pipeline.json", 4, "--schedule", "line.svg")
    assert ran.out.splitlines()[0] == "schedule 1f1b: bubble 25.0 % with assumed times, drawn to line.svg"
    picture = (tmp_path / "line.svg").read_text()
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert "1f1b: bubble 25.0 %" in picture and "with assumed times" in picture
    assert picture.count("<title>") == 4 * 8 * 2 + 3  # the last backward of three stages is in halves
    assert "0B7: chunk 0, backward of micro-batch 7, 30 to 32" in picture


@pytest.mark.parametrize(
    "section",
    [
        '"pipeline": {"split_last_backward": false}',
        '"pipeline": {"activation_checkpoint_interval": 1}',
        '"activation_checkpointing": {"mode": "full"}',
        '"compile": {"enabled": true}',
        '"zero_optimization": {"stage": 3}',
    ],
)
def test_backwards_that_are_not_halved_are_drawn_whole(plan, tmp_path, section):
    (tmp_path / "pipeline.json").write_text(PIPELINE % f", {section}")
    ran = plan("pipeline.json", 4, "--schedule", "line.svg")
    assert ran.out.splitlines()[0] == "schedule 1f1b: bubble 27.3 % with assumed times, drawn to line.svg"


def test_a_schedule_is_drawn_with_measured_times(plan, tmp_path):
    (tmp_path / "pipeline.json").write_text(PIPELINE % ', "pipeline": {"schedule": "zbv"}')
    (tmp_path / "measured.json").write_text('{"forward": [1, 1, 1, 1, 1, 1, 1, 1], "backward": 2, "unit": "ms"}')
    ran = plan("pipeline.json", 4, "--schedule", "line.svg", "--times", "measured.json")
    assert "schedule zbv: bubble 5.9 % with times of measured.json" in ran.out
    picture = (tmp_path / "line.svg").read_text()
    assert "51 ms long" in picture and "gradients of weights" in picture and "assumed" not in picture


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ("not json", "--times measured.json: this is not JSON"),
        ('{"forward": 1}', "it has forward and backward"),
        ('{"forward": 1, "backward": 2, "sideways": 3}', "may have backward_input, transfer, unit"),
        ('{"forward": "1", "backward": 2}', "times are numbers"),
        ('{"forward": 1, "backward": 2, "transfer": [1]}', "transfer is one number"),
        ('{"forward": [1, 2], "backward": 2}', "forward has 2 times for 4 chunks"),
    ],
)
def test_times_that_cannot_be_used(plan, tmp_path, times, words):
    (tmp_path / "pipeline.json").write_text(PIPELINE % "")
    (tmp_path / "measured.json").write_text(times)
    ran = plan("pipeline.json", 4, "--schedule", "line.svg", "--times", "measured.json")
    assert ran.code == 2 and words in ran.err and not (tmp_path / "line.svg").exists()


def test_a_schedule_without_a_pipeline_is_refused(plan):
    assert "there is one stage, which has no schedule" in plan("plain.json", 8, "--schedule", "line.svg").err
    assert "these are for --schedule FILE.svg" in plan("plain.json", 8, "--times", "measured.json").err


def test_a_custom_schedule_that_would_stop_is_refused_by_the_plan(plan, tmp_path):
    config = '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "pipeline_parallel_size": 2, %s}'
    rows = '"pipeline": {"schedule": ["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"]}'
    (tmp_path / "mine.json").write_text(config % rows)
    ran = plan("mine.json", 2, "--schedule", "line.svg")
    assert ran.code == 2 and "would stop half-way" in ran.err
