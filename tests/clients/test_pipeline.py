"""Models of transformers, and adapters of peft, in two stages: losses and updates of one process."""


def test_models_of_transformers_and_adapters_train_in_stages_as_in_one_process(scripts, tmp_path):
    ranks, _ = scripts.launch("drive_pipeline.py", tmp_path)
    for found in ranks:
        for case, far in found.items():
            assert far["loss"] < 1e-5, case
            assert 0 < far["update"] < 2e-3, (case, far["where"])
