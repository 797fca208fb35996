"""Everything that a newcomer would type: the examples, the demo, and the code of README.md and docs/training.md."""

import difflib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import mizzen
from pool import RankFailed, World

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


# Runs of a script in ranks that are forked, or by the command that its docstring shows


def script(name: str, *arguments: object) -> str:
    """Run an example as `python examples/...` would; returns what it printed."""
    sys.argv = [name, *map(str, arguments)]
    sys.path.insert(0, str(EXAMPLES))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def command(line: str, folder: Path) -> str:
    """Run a command line of a text; returns what it printed."""
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    search = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(record: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in record.read_text().splitlines()]


def small_config(folder: Path, **keys: object) -> str:
    path = folder / "config.json"
    keys |= {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "jsonl_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
    }
    path.write_text(json.dumps(keys))
    return str(path)


# The examples


def test_the_gpt_learns_and_writes(world, tmp_path):
    config = small_config(tmp_path, train_batch_size=16)
    (written,) = world(1, init=False).run(script, "gpt_bytes.py", "--steps", 12, "--width", 32, "--config", config)
    losses = losses_in(tmp_path / "run.jsonl")
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    assert "After 12 steps it writes:\n\ndef __init__(self" in written and len(written) > 200


def test_the_demo_trains_on_two_ranks_and_draws_the_loss(tmp_path):
    pytest.importorskip("matplotlib")
    printed = command(f"python {EXAMPLES / 'demo.py'} --steps 12 --width 32", tmp_path)
    losses = losses_in(tmp_path / "demo-output" / "gpt_bytes.jsonl")
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert f"Loss: from {losses[0]:.2f} to" in printed and "def __init__(self" in printed
    assert "<svg" in (tmp_path / "demo-output" / "loss.svg").read_text()


def printed_by_ddp(ranks: World, *arguments: object) -> list[str]:
    """What plain torch prints. Its own teardown of gloo hangs now and then, after all is done: then once more."""
    for _ in range(2):
        with suppress(RankFailed):
            return ranks.run(script, "ddp.py", *arguments, timeout=40)
    return ranks.run(script, "ddp.py", *arguments)


@pytest.mark.parametrize("ranks", [1, 2])
def test_mizzen_gives_the_losses_of_ddp(world, monkeypatch, ranks):
    if ranks > 1:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    steps = ("--steps", 30)
    ours = world(ranks, init=False).run(script, "ddp_to_mizzen.py", *steps)
    theirs = printed_by_ddp(world(ranks, init=False), *steps)
    assert "step 10 loss" in theirs[0] and theirs[1:] == [""] * (ranks - 1)
    found, expected = ([float(loss) for loss in re.findall(r"loss (\S+)", text)] for text in (ours[0], theirs[0]))
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]


def test_from_ddp_to_mizzen_is_a_small_step():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp.py", "ddp_to_mizzen.py"))
    difference = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    removed = [line for line in difference if line[0] == "-"]
    assert len(removed) == 4, "an import, the wrapper, backward and step"
    assert len(difference) - len(removed) == 5, "the same, and the configuration"


def test_the_pipeline_learns_on_two_stages(world):
    printed = world(2, init=False).run(script, "pipeline.py", "--steps", 12, "--width", 8)
    found = [re.search(r"rank (\d): loss (\S+) after 12 steps", text).groups() for text in printed]
    assert [rank for rank, _ in found] == ["0", "1"] and found[0][1] == found[1][1]
    assert float(found[0][1]) < 2.2  # ten classes: it begins at 2.3


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra clients")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_transformers_learns_and_writes(world, tmp_path, ranks):
    config = small_config(tmp_path, train_batch_size=4, zero_optimization={"stage": 2})
    arguments = ("--steps", 8, "--length", 32, "--config", config)
    written = world(ranks, init=False).run(script, "finetune_causal_lm.py", *arguments)
    losses = losses_in(tmp_path / "run.jsonl")
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert written[0].startswith("The ") and written[1:] == [""] * (ranks - 1)


def printed_numbers(text: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name} (-?[\d.]+)", text)]


@pytest.mark.parametrize("words", [(1, "--stage", 0), (2, "--stage", 3)], ids=str)
def test_the_classifier_learns(world, words):
    ranks, *options = words
    printed = world(ranks, init=False).run(script, "classifier.py", "--epochs", 2, "--samples", 1024, *options)
    first, last = printed_numbers(printed[0], "accuracy")
    assert last > 60 and last >= first - 5 and printed[1:] == [""] * (ranks - 1)


def test_two_engines_play_against_each_other(world):
    """The same game at every stage."""
    played = []
    for stage in (1, 3):
        printed, _ = world(2, init=False).run(script, "gan.py", "--steps", 50, "--stage", stage)
        played.append([*printed_numbers(printed, "critic"), *printed_numbers(printed, "painter")])
    assert len(played[0]) == 2 and played[0] == pytest.approx(played[1], abs=2e-3)
    assert 0.2 < played[0][0] < 2 and 0.2 < played[0][1] < 3


def test_a_model_that_the_configuration_cuts_gives_the_losses_of_one_rank(world):
    runs = [world(ranks, init=False).run(script, "tensor.py", *more)[0] for ranks, more in ((1, ()), (4, ("--tp", 2)))]
    expected, found = (printed_numbers(text, "loss") for text in runs)
    assert len(expected) > 2 and found == pytest.approx(expected, abs=2e-3)


def test_layers_that_are_cut_give_the_losses_of_one_rank(world):
    words = ("--steps", 5, "--width", 16)
    ((alone,), cut) = (
        world(ranks, init=False).run(script, "megatron_layers.py", *words, *more)
        for ranks, more in ((1, ()), (4, ("--tp", 2, "--sequence_parallel", "--stage", 3)))
    )
    expected, found = (printed_numbers(text, "loss") for text in (alone, cut[0]))
    assert len(expected) == 5 and expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, rel=1e-4)
    assert "tp=2: this rank has 2048 of 4096 elements" in cut[0] and cut[1:] == [""] * 3


def test_a_gpt_in_three_dimensions_gives_the_losses_of_one_rank(world):
    words = ("--steps", 5, "--width", 16)
    ((alone,), cut) = (
        world(ranks, init=False).run(script, "gpt_3d.py", *words, *more)
        for ranks, more in ((1, ()), (8, ("--tp", 2, "--pp", 2)))
    )
    expected, found = (printed_numbers(text, "loss") for text in (alone, cut[0]))
    assert len(expected) == 5 and expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, rel=1e-4)
    whole, parts = (printed_numbers(text, "holds")[0] for text in (alone, cut[0]))
    assert parts < whole / 2, "places and norms are whole on every rank of a stage"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra clients")
def test_a_vision_transformer_at_stage_3(world):
    printed, _ = world(2, init=False).run(script, "vit.py", "--steps", 60)
    assert printed_numbers(printed, "pictures:")[0] > 40, "ten kinds: guessing finds 10 of 100"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra clients")
def test_a_t5_learns_to_spell(world):
    printed, _ = world(2, init=False).run(script, "seq2seq.py", "--steps", 40)
    assert printed_numbers(printed, "steps:")[0] < 3.2 and "python -> " in printed


def test_the_sweep_measures_every_stage(tmp_path):
    pytest.importorskip("matplotlib")
    printed = command(f"python {EXAMPLES / 'sweep.py'} --ranks 2 --steps 4", tmp_path)
    memory = [float(size) for size in re.findall(r"stage \d: +([\d.]+) MiB", printed)]
    assert len(memory) == 4 and max(memory[1], memory[3]) < memory[0]
    assert (tmp_path / "runs/sweep/sweep.png").read_bytes().startswith(b"\x89PNG")


def without_transformers() -> str:
    sys.modules["transformers"] = None  # what an import of an absent package comes to
    with pytest.raises(ImportError) as raised:
        script("finetune_causal_lm.py")
    return str(raised.value)


def test_without_transformers_the_error_names_the_extra(world):
    (message,) = world(1, init=False).run(without_transformers)
    assert message == "this example needs 'transformers', which is not installed: pip install 'mizzen[clients]'"


def test_examples_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text()
    for name in SCRIPTS:
        assert f"`{name}`" in listed
        assert len((EXAMPLES / name).read_text().splitlines()) < 150


# The texts


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run_code(code: str, names: dict) -> list[str]:
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "text", "exec"), names)
    return printed.getvalue().splitlines()


class Sum(nn.Module):
    """Takes a batch, returns a loss: what README.md assumes of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, batch):
        return (self.layer(batch).squeeze(-1) - batch.sum(-1)).square().mean()


def readme(code: str) -> tuple[int, float, float]:
    torch.manual_seed(0)
    model = Sum()
    data = torch.randn(512, 8)
    before = model(data).item()
    names = {"model": model, "dataset": list(data)}
    run_code(code, names)
    return names["engine"].global_steps, before, model(data.to(names["engine"].device)).item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_code_of_the_readme_trains(world, tmp_path, monkeypatch, ranks):
    (code,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    small_config(tmp_path, train_batch_size=8, zero_optimization={"stage": 2})
    for steps, before, after in world(ranks, init=False).run(readme, code):
        assert steps == 512 // 8 and after < before / 2


def page(code: str) -> list[str]:
    return run_code(code, {"__name__": "__main__"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_on_training_prints_what_it_says(world, ranks):
    code = "\n".join(blocks(ROOT / "docs" / "training.md", "python"))
    promised = re.findall(r"^ *print\(.*?\)  # (.+)$", code, re.MULTILINE)
    assert len(promised) > 10
    for printed in world(ranks, init=False).run(page, code):
        assert printed == promised


def test_the_command_of_the_page_on_training_runs(tmp_path):
    (tmp_path / "train.py").write_text(blocks(ROOT / "docs" / "training.md", "python")[0])
    (line,) = blocks(ROOT / "docs" / "training.md", "bash")
    assert command(line, tmp_path).count("5.13") == 2  # the ranks' words may mingle


def at_stage(stage: int, low: bool) -> dict[str, object]:
    """What the table of docs/training.md speaks of, as one rank sees it."""
    torch.manual_seed(0)
    model = Sum()
    parameter = model.layer.weight
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": low},
        "optimizer": {"type": "AdamW"},
    }
    engine, optimizer, *_ = mizzen.initialize(model=model, config=config)
    batch = torch.full((2, 8), 1.0 + engine.global_rank, dtype=parameter.dtype)
    (own,) = torch.autograd.grad(model(batch), [parameter])
    engine.backward(engine(batch))
    whole = mizzen.zero.safe_get_full_grad(parameter)
    gradient = parameter.grad
    seen = {
        "grad is None": gradient is None,
        "grad is of own data": gradient is not None and torch.allclose(gradient, own.float(), rtol=1e-2),
        "grad is the mean": gradient is not None and torch.allclose(gradient, whole, rtol=1e-2),
        "grad dtype": gradient is not None and gradient.dtype,
    }
    engine.step()
    return seen | {
        "grad after": parameter.grad,
        "dtype": parameter.dtype,
        "shapes": [tuple(value.shape) for value in model.state_dict().values()],
        "shares memory": model.state_dict()["layer.weight"].data_ptr() == parameter.data_ptr(),
        "masters": {(master.dtype, master.dim()) for group in optimizer.param_groups for master in group["params"]},
        "held": sum(master.numel() for group in optimizer.param_groups for master in group["params"]),
        "states": sum(state["exp_avg"].numel() for state in optimizer.state_dict()["state"].values()),
    }


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_table_of_stages_is_true(world, stage, low):
    whole = world(1, init=False).run(at_stage, 0, low)[0]["held"]
    for seen in world(2, init=False).run(at_stage, stage, low):
        assert (seen["grad is the mean"], seen["grad is of own data"], seen["grad is None"]) == (
            (True, False, False) if stage == 0 else (False, True, False) if stage == 1 else (False, False, True)
        )
        assert seen["grad dtype"] == (torch.float32 if stage < 2 else False)
        assert seen["grad after"] is None
        assert seen["dtype"] == (torch.bfloat16 if low else torch.float32)
        assert seen["shapes"] == [(1, 8), (1,)] and seen["shares memory"]
        assert seen["masters"] == {(torch.float32, 1)}
        assert seen["held"] == seen["states"] == (whole if stage == 0 else whole // 2)
