"""The script for BERT pre-training: its data, and runs that are broken off and go on, on one rank and on two."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from launches import environment

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "bert"
SCRIPT = FOLDER / "deepspeed_train.py"


def run_script(name, *words):
    """Run a script of the folder as `python` would, in this process; returns what it printed."""
    torch.set_num_threads(1)
    sys.argv = [name, *map(str, words)]
    sys.path.insert(0, str(FOLDER))
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return printed.getvalue()


def modules():
    sys.path.insert(0, str(FOLDER))
    import data
    import make_data

    return data, make_data


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert") / "shards"
    _, make_data = modules()
    assert make_data.make(str(folder), length=48, vocabulary=600, most=60) == 4
    return folder


# The data


@pytest.fixture
def provider(shards):
    data, _ = modules()
    made = data.PretrainingDataProvider(str(shards), 48, seed=1)
    yield made
    made.release()


def read(provider, ranks, start=0, epoch=0):
    """The batches of all ranks, put together."""
    found = []
    each = [provider.batches(epoch, start, batch=16, micro=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    micros = list(zip(*each, strict=True))
    turns = 16 // (4 * ranks)
    for first in range(0, len(micros), turns):
        parts = [part for turn in micros[first : first + turns] for part in turn]
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return found


def test_any_number_of_ranks_reads_the_same_batches(provider):
    alone = read(provider, 1)
    assert len(alone) > 4
    for ranks in (2, 4):
        for found, expected in zip(read(provider, ranks), alone, strict=True):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_epoch_goes_on_where_it_was_left(provider):
    whole = read(provider, 1)
    for batches in (1, 3, len(whole) - 1):
        rest = read(provider, 1, start=16 * batches)
        assert len(rest) == len(whole) - batches
        assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rest, whole[batches:], strict=True))
    assert not torch.equal(read(provider, 1, epoch=1)[0]["input_ids"], whole[0]["input_ids"])


def test_what_is_masked(provider):
    batches = read(provider, 1)
    tokens, labels, kinds, mask = (
        torch.cat([batch[name] for batch in batches])
        for name in ("input_ids", "labels", "token_type_ids", "attention_mask")
    )
    is_guessed, is_word = labels != -100, (tokens >= 4) & (mask == 1)
    assert 0.1 < is_guessed.sum() / is_word.sum() < 0.2 and (labels[is_guessed] >= 5).all()
    hidden, kept = tokens[is_guessed] == 4, tokens[is_guessed] == labels[is_guessed]
    assert 0.7 < hidden.float().mean() < 0.9 and 0.04 < kept.float().mean() < 0.17
    assert (tokens[~is_guessed] != 4).all() and (tokens[mask == 0] == 0).all()
    assert (tokens[:, 0] == 2).all() and (kinds[:, 0] == 0).all() and (kinds.max(1).values == 1).all()
    others = torch.cat([batch["next_sentence_label"] for batch in batches]).float()
    assert 0.35 < others.mean() < 0.65


def test_a_folder_without_shards_is_named(tmp_path):
    data, _ = modules()
    with pytest.raises(FileNotFoundError, match=r"no shards in .*: make them with `python examples/bert/make_data.py`"):
        data.PretrainingDataProvider(str(tmp_path), 48, seed=1)


# The script


def configuration(folder, name="run", **keys):
    config = json.loads((FOLDER / "bert_tiny.json").read_text())
    config |= {"checkpoint": {"dir": str(folder / name)}, "progress": {"enabled": False}, "steps_per_print": 1000}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config | keys))
    return path


def words(folder, shards, name="run", **keys):
    """The command line of a run whose epochs have three steps."""
    config = configuration(folder, name, **keys)
    where = ["--data_path_prefix", shards, "--output_dir", folder, "--job_name", name, "--max_seq_length", 48]
    return ["--deepspeed_config", config, *where, "--max_steps_per_epoch", 3, "--print_steps", 1]


def events(folder, name="run"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def losses(folder, name="run"):
    return [event["loss"] for event in events(folder, name) if "loss" in event]


@pytest.mark.parametrize("ranks", [1, 2] if os.environ.get("FULL") else [2])
def test_a_run_that_goes_on_has_the_losses_of_an_unbroken_one(world, tmp_path, shards, ranks):
    run = world(ranks, init=False).run
    run(run_script, "deepspeed_train.py", *words(tmp_path, shards, "whole"), "--epochs", 2, "--max_steps", 5)
    broken = words(tmp_path, shards, "broken")
    run(run_script, "deepspeed_train.py", *broken, "--epochs", 2, "--max_steps", 4)
    run(run_script, "deepspeed_train.py", *broken, "--epochs", 2, "--max_steps", 5, "--resume")
    assert losses(tmp_path, "broken") == losses(tmp_path, "whole") and len(losses(tmp_path, "whole")) == 5
    assert [event["epoch"] for event in events(tmp_path, "whole") if "validation_loss" in event] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()) == [
        "epoch1_step3",
        "epoch1_step5",
    ]
    if ranks == 2:
        fewer = ("--load_training_checkpoint", tmp_path / "broken", "--load_checkpoint_id", "epoch1_step4")
        last = words(tmp_path, shards, "fewer")
        world(1, init=False).run(run_script, "deepspeed_train.py", *last, "--epochs", 2, "--max_steps", 5, *fewer)
        # Dropout draws other numbers on another number of ranks: near, and not equal.
        assert losses(tmp_path, "fewer") == pytest.approx(losses(tmp_path, "whole")[4:], rel=2e-2)
        weights = ("--model_name_or_path", tmp_path / "whole", "--data_path_prefix", shards)
        (said,) = world(1, init=False).run(run_script, "squad.py", *weights, "--max_seq_length", 48, "--steps", 2)
        assert "37 tensors loaded; loss after 2 steps" in said, "all of the encoder: 5 embeddings and 2 x 16"


def start(*words, cwd):
    variables = environment(OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{FOLDER}")
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_that_is_asked_to_stop_goes_on_under_the_drop_in(tmp_path, shards):
    """`import deepspeed`, two ranks, a request to stop in the middle of an epoch, and the rest of it."""
    launch = ("-m", "mizzen.cli", "run", "--drop-in", "--num_gpus", 2, SCRIPT)
    words_of = words(tmp_path, shards, "run")
    first = start(*launch, *words_of, "--epochs", 400, cwd=tmp_path)
    record = tmp_path / "run.jsonl"
    while first.poll() is None and not (record.exists() and len(record.read_text().splitlines()) > 1):
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=200)[0]
    assert first.returncode == 75, said
    before = losses(tmp_path)
    rest = start(*launch, *words_of, "--epochs", 400, "--resume", "--max_steps", len(before) + 2, cwd=tmp_path)
    said = rest.communicate(timeout=200)[0]
    assert rest.returncode == 0, said
    steps = [event["step"] for event in events(tmp_path) if "loss" in event]
    assert steps == list(range(1, len(before) + 3)), "no step is missing or done twice"


def test_every_configuration_is_right():
    from mizzen.config.load import load

    for path in sorted(FOLDER.glob("*.json")):
        load(str(path))
