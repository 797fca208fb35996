"""What a run says by default: little, on rank 0 alone; and what it writes when asked."""

import json

import torch

import mizzen
from parity.programs import Case, build, micro_batches


def hundred_steps() -> int:
    config = Case(2, 4, samples=8).config
    del config["progress"]  # the default
    engine, *_ = mizzen.initialize(model=torch.nn.Linear(4, 4), config=config)
    for _ in range(100):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    engine.destroy()
    return engine.global_steps


def test_a_hundred_steps_on_four_ranks_are_fifteen_lines_at_most(world):
    outcomes = world(4).run(hundred_steps, expect_failure=True, timeout=120)
    assert [outcome.value for outcome in outcomes] == [100] * 4
    first, *others = [outcome.output.strip().splitlines() for outcome in outcomes]
    assert 1 <= len(first) <= 15, first
    assert others == [[], [], []]
    assert "loss" in first[-1]


def write_everything(folder: str) -> None:
    extra = {
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "steps_per_print": 2,
        "dump_state": True,
        "jsonl_monitor": {"enabled": True, "output_path": folder, "job_name": "lines"},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "tables"},
    }
    engine, *_ = mizzen.initialize(model=build(Case()), config=Case(1, 2).config | extra)
    for step in range(4):
        report = engine.train_batch(iter(micro_batches(Case(1, 2), step, engine.global_rank)))
    assert set(report.phases) == {"forward", "backward", "step"}
    assert all(seconds > 0 for seconds in report.phases.values())
    assert set(engine.get_wall_clock_timers()) == {"forward", "backward", "step"}
    engine.destroy()


def test_what_is_asked_for_is_written(world, tmp_path):
    first, second = world(2).run(write_everything, str(tmp_path), expect_failure=True)
    assert first.error_type is None, first.traceback
    assert second.output == ""
    (lines,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["applied"] and row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["samples"] == 8
    assert {path.stem for path in tmp_path.rglob("*.csv")} >= {"Train_Samples_lr", "Train_Samples_train_loss"}
    assert "forward" in first.output
    assert "zero_optimization.stage" in first.output


def lazy() -> tuple[bool, str]:
    engine, *_ = mizzen.initialize(model=build(Case()), config=Case(0, 1, 2).config)
    first, second = micro_batches(Case(0, 1, 2), 0, 0)
    engine.backward(engine(first))
    early = engine.step()
    engine.backward(engine(second))
    late = engine.step()
    assert not early.applied and not early.is_boundary and early.loss is None
    assert late.applied and late.lr == (0.01,) and late.samples == 8 and late.tokens == 8 * 12
    assert isinstance(late.loss, float) and not isinstance(late.loss, torch.Tensor)
    assert engine.was_step_applied() and engine.get_global_grad_norm() == late.grad_norm
    return True, str(late)


def test_a_report_says_what_happened(world):
    done, text = world(1).run(lazy)[0]
    assert done
    assert text.startswith("StepReport(step=1, loss=")
