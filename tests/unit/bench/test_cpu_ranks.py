"""The whole command on two ranks, with a model of a few thousand parameters."""

import json
import sys

import pytest
from bench import cpu_ranks, gpt

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--vocabulary", "32", "--length", "8", "--samples", "2"]


@pytest.mark.wide  # the parts of a comparison are in test_play.py
def test_systems_train_alike_and_are_compared(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    written = tmp_path / "run.json"
    systems = ["floor", "ddp", "mizzen-2"]
    assert cpu_ranks.main([*TINY, "--rounds", "2", "--systems", *systems, "--json", str(written)]) == 0
    first, second, third = capsys.readouterr().out.split("\n\n")[1:]
    rows = {line.split("|")[1].strip(): line.rstrip(" |\n") for line in first.splitlines()}
    assert rows["floor"].endswith(" -") and rows["ddp"].endswith("equal") and rows["mizzen-2"].endswith("equal")
    for compared in (second, third):
        assert [line.split("|")[1].strip() for line in compared.splitlines()[2:]] == ["floor", "ddp"]
    record = json.loads(written.read_text())
    assert list(record["systems"]) == systems and record["failures"] == {}
    ours, theirs = (record["systems"][name]["losses"] for name in ("mizzen-2", "ddp"))
    assert ours == pytest.approx(theirs, abs=5e-5) and len(ours) == 3
    assert {(row["of"], row["to"]) for row in record["ratios"]} == {("mizzen-2", "floor"), ("mizzen-2", "ddp")}


def test_the_usual_size_is_that_of_the_published_numbers():
    assert sum(parameter.numel() for parameter in gpt.Gpt(gpt.Size()).parameters()) == pytest.approx(17.4e6, rel=0.003)


def test_a_model_that_learns_nothing_is_no_work():
    """Loss falls on a batch that repeats, so a system that forgets to step would show."""
    step = gpt.prepare("floor", {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "samples": 2, "length": 8})
    assert float(step(0)) > float([step(0) for _ in range(30)][-1])
