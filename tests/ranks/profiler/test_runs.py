"""What a configuration asks to be measured, in runs of ranks: profiles, measures, events and traces."""

import csv
import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import mizzen
from breadth import choice

WIDTH, FEED, VOCABULARY, SAMPLES, LENGTH, BLOCKS = 8, 16, 32, 2, 12, 2
TOKENS = SAMPLES * LENGTH
BLOCK = 2 * TOKENS * 2 * WIDTH * FEED
FORWARD = BLOCKS * BLOCK + 2 * TOKENS * WIDTH * VOCABULARY
PARAMETERS = VOCABULARY * WIDTH + BLOCKS * (2 * WIDTH * FEED + WIDTH + FEED) + (WIDTH + 1) * VOCABULARY


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, FEED), nn.Linear(FEED, WIDTH)

    def forward(self, x):
        return self.back(self.wide(x).relu()) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def start(**extra):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "progress": {"enabled": False},
    }
    return mizzen.initialize(model=Model(), config=config | extra)[0]


def train(engine, steps):
    batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    return [engine.train_batch(iter([batch, batch])) for _ in range(steps)]


def profiled(folder, stage, extra):
    file = Path(folder) / "profile.txt"
    os.chdir(folder)
    engine = start(
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        flops_profiler={"enabled": True, "profile_step": 2, "output_file": file.name},
        profile={"peak_tflops": 0.5},
        **extra,
    )
    os.chdir("/")  # a script may: the file is where it was asked for
    before = train(engine, 2)
    assert not file.exists()
    train(engine, 1)
    tree = engine.flops_profile
    after = train(engine, 2)
    losses = [report.loss for report in (*before, *after)]
    engine.destroy()
    return (
        (tree.parameters, tree.forward, tree.backward, tree.recomputed),
        [sorted({"tflops", "mfu"} & report.measures.keys()) for report in (*before, *after)],
        after[-1].measures,
        after[-1].seconds,
        losses,
    )


CASES = {
    "stage 0": (0, {}, 0),
    "stage 3": (3, {}, 0),
    "computed again": (3, {"activation_checkpointing": {"mode": "full"}}, BLOCKS * BLOCK // 2),
    "compiled": (1, {"compile": {"enabled": True, "backend": "aot_eager"}}, 0),
}
"""Stage, what else, and what is computed again: of each block all but its last layer, whose result nobody needs."""


@pytest.mark.parametrize("case", choice(CASES, ["stage 0", "stage 3", "computed again"]))
def test_one_step_is_counted_and_later_ones_say_how_much_of_the_device_they_use(world, tmp_path, case):
    stage, extra, again = CASES[case]
    for counted, known, measures, seconds, _ in world(2).run(profiled, str(tmp_path), stage, extra):
        forward = 2 * FORWARD  # two micro-batches
        assert counted == (PARAMETERS, forward, 2 * forward + 2 * again, 2 * again)
        assert known == [[], [], ["mfu", "tflops"], ["mfu", "tflops"]]
        assert measures["tflops"] == pytest.approx(3 * forward / seconds / 1e12)
        assert measures["mfu"] == pytest.approx(measures["tflops"] / 0.5)
        assert measures["tokens_per_sec"] == pytest.approx(2 * 2 * TOKENS / seconds)
    text = (tmp_path / "profile.txt").read_text()
    assert "Profile Summary at step 2:" in text and "world size:" in text and "samples/second:" in text
    assert f"({BLOCKS - 1}): Block(" in text


def losses(profiler):
    engine = start(flops_profiler={"enabled": profiler, "output_file": "/dev/null"})
    return [report.loss for report in train(engine, 4)]


def test_counting_changes_no_number(world):
    assert world(2).run(losses, True) == world(2).run(losses, False)


def open_loop():
    engine = start(flops_profiler={"enabled": True, "output_file": "/dev/null"}, gradient_accumulation_steps=1)
    batch = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    for _ in range(2):
        engine(batch).backward()  # the user's own: nobody sees it
        engine.step()
    tree = engine.flops_profile
    return tree.forward, tree.backward, tree.model_flops


def test_a_backward_of_the_user_is_taken_for_twice_the_forward(world):
    assert world(1).run(open_loop) == [(FORWARD, 0, 3 * FORWARD)]


def measured(folder):
    engine = start(
        wall_clock_breakdown=True,
        zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0},
        jsonl_monitor={"enabled": True, "output_path": folder, "job_name": "lines"},
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "tables"},
    )
    reports = train(engine, 3)
    engine.destroy()
    return [dict(report.measures) for report in reports], [report.loss for report in reports]


def test_measures_reach_every_sink_under_known_names(world, tmp_path):
    (first, lost), (second, _) = world(2).run(measured, str(tmp_path))
    names = {"memory_allocated", "memory_reserved", "memory_peak", "samples_per_sec", "tokens_per_sec"}
    names |= {f"elapsed_time_ms_{phase}" for phase in ("forward", "backward", "step")}
    names |= {"comm_ms_dp_shard", "comm_exposed_ms_dp_shard"}
    assert set(first[-1]) == set(second[-1]) == names
    for measures in (*first, *second):
        assert 0 < measures["comm_exposed_ms_dp_shard"] <= measures["comm_ms_dp_shard"]
        assert measures["elapsed_time_ms_backward"] > 0 and measures["memory_allocated"] > 0
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [row["measures"] for row in rows] == first
    tables = {path.stem: list(csv.reader(path.open())) for path in (tmp_path / "tables").glob("*.csv")}
    assert set(tables) == {f"Train_Samples_{name}" for name in (*names, "train_loss", "lr", "grad_norm")}
    assert [float(value) for _, value in tables["Train_Samples_train_loss"][1:]] == lost
    kept = [float(value) for _, value in tables["Train_Samples_comm_ms_dp_shard"][1:]]
    assert kept == [measures["comm_ms_dp_shard"] for measures in first]


def silent():
    engine = start(timers={"throughput": {"enabled": False}})
    return [dict(report.measures) for report in train(engine, 2)]


def test_nothing_is_measured_that_nobody_asked_for(world):
    assert world(1).run(silent) == [[{}, {}]]


def traced(folder):
    engine = start(
        profile={
            "trace": {"enabled": True, "start_step": 1, "steps": 2, "ranks": [1], "output_path": folder},
            "memory_snapshot": {"enabled": True, "output_path": folder},
        }
    )
    train(engine, 2)
    before = sorted(path.name for path in Path(folder).iterdir())
    train(engine, 2)
    engine.destroy()
    return before


def test_a_trace_is_written_by_the_ranks_that_are_asked(world, tmp_path):
    outcomes = world(2).run(traced, str(tmp_path), expect_failure=True)
    assert [outcome.value for outcome in outcomes] == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.json.gz"]
    with gzip.open(tmp_path / "rank1.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "aten::embedding" for event in events) == 2 * 2  # steps, micro-batches
    assert "needs a CUDA device" in outcomes[0].output


def cut_short(folder):
    engine = start(profile={"trace": {"enabled": True, "start_step": 0, "steps": 9, "output_path": folder}})
    train(engine, 1)
    engine.destroy()


def test_a_run_that_ends_early_writes_what_it_has(world, tmp_path):
    world(1).run(cut_short, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json.gz"]
