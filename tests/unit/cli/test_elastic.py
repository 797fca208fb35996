"""`mizzen elastic`: the known numbers, printed."""

import json
from pathlib import Path

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


def test_without_a_world_it_prints_batch_and_gpus(mizzen):
    ran = mizzen("elastic", "-c", CONFIGS / "elastic.json")
    assert ran.code == 0
    assert ran.out.splitlines()[0].split() == ["batch", "1680"]
    assert "micro_batch" not in ran.out


def test_a_world_of_0_is_any(mizzen):
    for words in (("-w", 0), ("--world-size=0",)):
        ran = mizzen("elastic", "-c", CONFIGS / "elastic.json", *words)
        assert ran.code == 0 and "micro_batch" not in ran.out
    assert "'-1' is not a whole number of at least 0" in mizzen("elastic", "-c", "x", "-w=-1").err


def test_with_a_world_it_prints_the_split_too(mizzen):
    found = json.loads(mizzen("elastic", "-c", CONFIGS / "elastic.json", "-w", 60, "--json").out)
    assert (found["batch"], found["micro_batch"], found["accumulation"]) == (1680, 4, 7)
    assert found["valid_gpus"][:4] == [1, 2, 3, 4]


def test_a_world_that_does_not_fit_is_refused_with_the_nearest(mizzen):
    ran = mizzen("elastic", "--config", CONFIGS / "elastic.json", "--world-size", 61)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("the nearest that can: 56 and 60\n")


def test_a_file_without_elasticity_is_refused(mizzen):
    ran = mizzen("elastic", "-c", CONFIGS / "zero2_bf16.json")
    assert ran.code == 2
    assert "elasticity.enabled: elasticity is off in this file" in ran.err
