"""Models of transformers under tensor parallelism: losses, norms and updates of one process."""

import json
import os

import pytest

EVERY = pytest.mark.skipif(not os.environ.get("FULL"), reason="with FULL=1")


MODELS = [
    "llama",
    "one key",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "gpt2",
    "neox",
    "bert",
    "t5",
    "vit",
    "lora",
]


def trained(scripts, folder, ranks, *models, timeout):
    """What each rank found of each case: how far it is from one process."""
    scripts.run("drive_tensor.py", folder, *models, ranks=ranks, timeout=timeout)
    for rank in range(ranks):
        found = json.loads((folder / f"{rank}.json").read_text())
        for case, far in found.items():
            assert far["loss"] < 1e-5, case
            assert far["norm"] < (3e-5 if case.startswith("lora") else 1e-5), case
            assert far["update"] < 2e-3, (case, far["where"])
        yield rank, found


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("ranks", "least"), [(4, 19), pytest.param(8, 9, marks=EVERY)])
def test_models_of_transformers_train_cut_as_in_one_process(scripts, tmp_path, ranks, least):
    for rank, found in trained(scripts, tmp_path, ranks, timeout=1200):
        assert len(found) >= least
        for case, said in json.loads((tmp_path / f"{rank}-spoken.json").read_text()).items():
            assert set(said) == {"cache", "no cache", "trains on"}
            for how, (ours, theirs) in said.items():
                assert ours == theirs, (case, how)


@EVERY
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("model", MODELS)
def test_each_model_trains_cut_as_in_one_process_with_every_option(scripts, tmp_path, model):
    """Two and four ranks share each matrix, at every stage, with each option of `OPTIONS`."""
    for _, found in trained(scripts, tmp_path, 4, model, timeout=1800):
        assert len(found) == 2 * 4 * 5


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainer_and_accelerate_train_a_model_that_the_configuration_cuts(scripts, tmp_path, ranks):
    """On two ranks, which share each matrix, and on two such pairs, which have other data."""
    found, _ = scripts.launch("drive_autotp.py", tmp_path, ranks)
    for rank in found:
        assert len(rank) == 6
        for name, seen in rank.items():
            assert seen["alike"], name
            assert seen["shared"] == 0, name
            assert seen["sizes"] == [2 * ranks, ranks // 2, 2], name
            # Trainer rounds what it logs to four digits.
            close = {"abs": 1e-3} if name.startswith("trainer") else {"rel": 1e-5}
            assert seen["losses"] == pytest.approx(seen["expected"], **close), name
            assert seen["names"] and seen["far"] < 2e-3, name
            assert seen.get("again") == seen.get("once"), name
