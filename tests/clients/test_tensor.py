"""Models of transformers under tensor parallelism: losses, norms and updates of one process."""

import json
import os
import sys

import pytest

from clients.launching import HERE, run


@pytest.mark.timeout(7300)
def test_models_of_transformers_train_cut_as_in_one_process(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    run([*torchrun, HERE / "drive_tensor.py", tmp_path], tmp_path, timeout=7200 if os.environ.get("FULL") else 1200)
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) >= 19
        for case, far in found.items():
            assert far["loss"] < 1e-5, case
            assert far["norm"] < (3e-5 if case.startswith("lora") else 1e-5), case
            assert far["update"] < 2e-3, (case, far["where"])
        for case, said in json.loads((tmp_path / f"{rank}-spoken.json").read_text()).items():
            assert set(said) == {"cache", "no cache", "trains on"}
            for how, (ours, theirs) in said.items():
                assert ours == theirs, (case, how)
