"""Models of transformers under tensor parallelism and pipelines at once: losses, norms and updates of one process."""

import json
import os
import sys

import pytest

from clients.launching import HERE, TORCHRUN, run


@pytest.mark.timeout(2500)
@pytest.mark.parametrize(("ranks", "cases"), [(4, 8), (8, 4)])
def test_models_of_transformers_train_cut_twice_as_in_one_process(tmp_path, ranks, cases):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    run([*torchrun, HERE / "drive_three_dimensions.py", tmp_path], tmp_path, timeout=2400)
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


def test_trainer_is_told_that_it_cannot_drive_stages(tmp_path):
    run([*TORCHRUN, HERE / "drive_trainer_pipeline.py", tmp_path], tmp_path)
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert "pipeline_parallel_size 2 with HF Trainer, which calls forward, backward and step itself" in told
