"""Models of transformers under tensor parallelism and pipelines at once: losses, norms and updates of one process."""

import json
import os

import pytest


@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("ranks", "cases"), [(4, 8), (8, 4)])
def test_models_of_transformers_train_cut_twice_as_in_one_process(scripts, tmp_path, ranks, cases):
    scripts.run("drive_three_dimensions.py", tmp_path, ranks=ranks, timeout=2400)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert len(found[0]) >= (8 if os.environ.get("FULL") else cases)
    for case in found[0]:
        seen = set()
        for far in (each[case] for each in found):
            assert far["loss"] < 1e-5, case
            assert far["norm"] < 1e-5, case
            for name, update in far["updates"].items():
                assert update < 2e-3, (case, name)
            seen |= far["updates"].keys()
        assert seen == set(found[0][case]["names"]), case
    if ranks == 4:
        check_files([json.loads((tmp_path / f"{rank}-files.json").read_text()) for rank in range(ranks)])


def check_files(found):
    """What one layout has written, one process and the next layout read to the bit, and go on with the same loss."""
    for kind, tied in (("llama", set()), ("gpt2", {"lm_head.weight"})):
        told = [each[kind] for each in found]
        for number, (what, _) in enumerate(told[0]["same"]):
            names = [pair for each in told for pair in each["same"][number][1].items()]
            assert all(is_same for _, is_same in names), (kind, what)
            assert {name for name, _ in names} | tied == {*told[0]["names"]}, (kind, what)
        assert len(told[0]["same"]) == (12 if os.environ.get("FULL") else 6)
        for each in told:
            ours, alone = zip(*each["losses"], strict=True)
            assert ours == pytest.approx(alone, rel=1e-5)


def test_trainer_is_told_that_it_cannot_drive_stages(scripts, tmp_path):
    scripts.run("drive_trainer_pipeline.py", tmp_path)
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert "pipeline_parallel_size 2 with HF Trainer, which calls forward, backward and step itself" in told
