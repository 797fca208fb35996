"""The bench of HF Trainer starts, steps and writes its numbers; how fast it is, is not tested."""

import json
import sys

from clients.launching import ROOT, run


def test_the_bench_of_trainer_runs_on_a_tiny_model(tmp_path):
    words = [
        "--hollow",
        "--systems",
        "mizzen-3",
        "--rounds",
        1,
        "--steps",
        2,
        "--warm",
        1,
        "--json",
        tmp_path / "made.json",
    ]
    run([sys.executable, "-m", "bench.hf_trainer", *words], tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["failures"] == {}
    assert len(made["systems"]["mizzen-3"]["losses"]) == 3
    assert "mizzen" in made["surroundings"]["drop-in"]
