"""DeepSpeed's own folders (tests/fixtures/deepspeed/make.py), read bit by bit as DeepSpeed says they are."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mizzen.checkpoint import foreign
from mizzen.errors import CheckpointError

HERE = Path(__file__).parents[3] / "fixtures" / "deepspeed"
CASES = (
    "zero0",
    "half0",
    "zero1",
    "zero2",
    "zero3",
    "bf16",
    "elastic",
    "pipeline",
    "moe",
    "moe4",
    "universal2",
    "universal3",
)
TOLD = {"universal2": "zero2", "universal3": "zero3"}
TRAINED = {"adapted.lora_A", "adapted.lora_B", "embed.weight", "head.bias", "norm.bias", "norm.weight"}


def told(case):
    """What DeepSpeed said of a checkpoint: `kind/name` -> tensor."""
    return load_file(HERE / f"{TOLD.get(case, case)}.safetensors")


@pytest.fixture
def copy(tmp_path):
    """A case that a test may spoil."""

    def make(case):
        return Path(shutil.copytree(HERE / case, tmp_path / case))

    return make


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_deepspeed_says(case):
    source = foreign.open(HERE / case)
    found = {f"{entry.kind}/{entry.name}": entry for entry in source.names()}
    for key, value in told(case).items():
        if case == "zero0" and key.startswith("master/"):
            key = key.replace("master", "model")  # without ZeRO, in fp32, the model is its own master
        entry = found[key]
        tensor = source.read(entry)
        assert (entry.shape, entry.dtype) == (tuple(value.shape), value.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(tensor, value), key


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_is_found(case):
    expected = set(told(case))
    names = {key.partition("/")[2] for key in expected if not key.startswith("model/")}
    if case != "universal3":  # the converter leaves stage 3 without steps
        expected |= {f"step/{name}" for name in names}
    if case == "zero0":
        expected -= {f"master/{name}" for name in names}
    if case in ("zero3", "universal3"):  # trained parameters are kept as masters only
        expected |= {f"model/{name}" for name in (*TRAINED, "head.weight")}
    assert {f"{entry.kind}/{entry.name}" for entry in foreign.open(HERE / case).names()} == expected


def test_steps_that_were_skipped_are_not_counted_as_taken(tmp_path):
    shutil.copytree(HERE / "zero0", tmp_path / "copy")
    (path,) = (tmp_path / "copy").rglob("mp_rank_00_model_states.pt")
    torch.save(torch.load(path, weights_only=True) | {"skipped_steps": 1}, path)
    facts = foreign.open(tmp_path / "copy").facts()
    assert (facts["global_steps"], facts["skipped_steps"]) == (2, 1)  # theirs counts them: 3 were due


@pytest.mark.parametrize("case", CASES)
def test_facts_are_plain(case):
    facts = foreign.open(HERE / case).facts()
    assert facts["global_steps"] == 3
    assert facts["skipped_steps"] == 0
    assert facts["global_samples"] == {"pipeline": 6, "moe4": 24}.get(case, 12)
    assert facts["version"] == "0.19.8"
    data = {"pipeline": 1, "moe4": 4}.get(case, 2)
    assert facts["ranks"] == {"data": data, "model": 2 if case == "pipeline" else 1}
    client = facts["client_state"]
    assert (client["epoch"], client["note"], client["pair"]) == (4, "kept", (1, 2.5))
    assert torch.equal(client["table"][3], torch.arange(3))
    assert facts["left_out"] == []
    if case == "elastic":  # states alone are kept
        assert facts["optimizer"]["param_groups"] is None
    else:
        assert facts["optimizer"]["param_groups"][0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("case", ["zero0", "half0"])
def test_shared_bytes_tell_shared_names(case):
    facts = foreign.open(HERE / case).facts()
    assert facts["aliases"] == {"head.weight": "embed.weight"}
    assert facts["frozen"] == []


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "bf16", "elastic", "universal2", "universal3"])
def test_facts_tell_what_each_name_is(case):
    facts = foreign.open(HERE / case).facts()
    assert facts["buffers"] == ["scale", "seen"]
    assert facts["frozen"] == ["adapted.base.bias", "adapted.base.weight"]
    assert facts["aliases"] == {"head.weight": "embed.weight"}
    assert facts["zero_stage"] == ({"bf16": 1, "elastic": 2}.get(case) or int(case[-1]))
    assert case.startswith("universal") == ("universal" in facts["format"])


def test_a_loss_scaler_can_only_be_looked_at():
    scaler = foreign.open(HERE / "zero2").facts()["optimizer"]["loss_scaler"]
    name = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
    assert scaler == {"class": name, "state": {"cur_scale": 1.0, "dynamic": False}}


def test_steps_are_those_of_the_optimizer():
    for case in ("zero0", "zero1", "zero3", "moe", "universal2"):
        source = foreign.open(HERE / case)
        assert {source.read(entry).item() for entry in source.names() if entry.kind == "step"} == {3.0}


def test_a_tag_can_be_named_or_be_the_path_itself():
    whole = foreign.open(HERE / "zero2")
    assert foreign.open(HERE / "zero2", "step3").names() == whole.names()
    assert foreign.open(HERE / "zero2" / "step3").names() == whole.names()


def test_what_was_found_is_said(caplog):
    with caplog.at_level(logging.INFO, "mizzen"):
        foreign.open(HERE / "zero2")
    assert "DeepSpeed checkpoint of ZeRO stage 2: " in caplog.text
    assert "11 model" in caplog.text
    assert "6 exp_avg" in caplog.text


@pytest.mark.parametrize(
    ("tag", "words"),
    [("step4", "has no folder for the tag 'step4'; it has latest, step3"), ("../zero1", "refused to open '../zero1'")],
)
def test_a_wrong_tag(tag, words):
    with pytest.raises(CheckpointError, match=words):
        foreign.open(HERE / "zero2", tag)


def test_latest_that_leads_nowhere_or_outside(copy):
    folder = copy("zero2")
    for text, words in (
        ("step9", "'latest' says 'step9'"),
        ("../zero1", "refused to open"),
        ("/etc", "refused to open"),
    ):
        (folder / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=words):
            foreign.open(folder)


@pytest.mark.parametrize("case", ["zero1", "zero3", "bf16"])
def test_a_missing_rank_is_named(copy, case):
    folder = copy(case)
    (gone,) = (folder / "step3").glob("*zero_pp_rank_0*_optim_states.pt")
    gone.unlink()
    with pytest.raises(CheckpointError, match="up to rank 1, but none of rank 0"):
        foreign.open(folder)


@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_a_missing_last_rank_is_noticed_by_what_the_others_say(copy, case):
    folder = copy(case)
    (gone,) = (folder / "step3").glob("*zero_pp_rank_1*_optim_states.pt")
    gone.unlink()
    with pytest.raises(CheckpointError, match=r"was saved by \[2(, 2)?\] ranks and there are optimizer files of 1"):
        foreign.open(folder)


def test_a_left_over_rank_is_noticed(copy):
    folder = copy("zero1") / "step3"
    shutil.copy(
        folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    )
    with pytest.raises(CheckpointError, match="optimizer files of 3: some are missing, or are left over"):
        foreign.open(folder)


def test_shards_of_another_save_do_not_fit(copy):
    folder = copy("zero1") / "step3"
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shutil.copy(HERE / "moe" / "step3" / name, folder / name)
    with pytest.raises(CheckpointError, match="whose shape is not in the model file|elements of it"):
        foreign.open(folder)


def test_tensor_slices_are_refused(copy):
    folder = copy("zero1") / "step3"
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(
        CheckpointError, match=r"2 model ranks without layer files: tensor-parallel slices; .*ds_to_univ"
    ):
        foreign.open(folder)


def test_a_rank_number_from_a_file_name_costs_nothing(copy):
    folder = copy("zero1") / "step3"
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / f"mp_rank_{10**15}_model_states.pt")
    with pytest.raises(CheckpointError, match="none of rank 1"):
        foreign.open(folder)


@pytest.mark.parametrize("case", ["zero0", "zero2", "zero3", "moe", "universal2"])
def test_a_flipped_bit_is_found_before_a_tensor_is_used(copy, case):
    """In the storages and in the pickles; torch's checksums cover both."""
    clean = told(case)
    folder = copy(case)
    generator = torch.Generator().manual_seed(3)
    files = sorted(path for path in folder.rglob("*.pt"))
    for path in files[:6]:
        original = path.read_bytes()
        for _ in range(4):
            at = int(torch.randint(0, len(original), (), generator=generator))
            spoilt = bytearray(original)
            spoilt[at] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
            path.write_bytes(bytes(spoilt))
            try:
                source = foreign.open(folder)
                for entry in source.names():
                    value = clean.get(f"{entry.kind}/{entry.name}")
                    assert value is None or torch.equal(source.read(entry), value), (path, at)
                source.facts()
            except CheckpointError as error:
                assert path.name in str(error) or str(folder) in str(error)
        path.write_bytes(original)


@pytest.mark.parametrize("case", ["zero2", "zero3", "pipeline"])
def test_truncation_at_every_sixteenth(copy, case):
    folder = copy(case)
    for path in sorted(folder.rglob("*.pt"))[:3]:
        original = path.read_bytes()
        for sixteenth in range(16):
            path.write_bytes(original[: len(original) * sixteenth // 16])
            with pytest.raises(CheckpointError, match=path.name):
                foreign.open(folder)
        path.write_bytes(original)


def test_a_link_out_of_the_folder_is_not_followed(copy, tmp_path):
    folder = copy("zero2")
    name = "mp_rank_00_model_states.pt"
    outside = tmp_path / "outside.pt"
    (folder / "step3" / name).rename(outside)
    (folder / "step3" / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="a link to .*outside.pt, which is outside of"):
        foreign.open(folder)


def test_a_link_inside_the_folder_is_followed(copy):
    folder = copy("zero2")
    name = "mp_rank_00_model_states.pt"
    (folder / "step3" / name).rename(folder / "moved.pt")
    (folder / "step3" / name).symlink_to(folder / "moved.pt")
    assert len(foreign.open(folder).names()) == len(foreign.open(HERE / "zero2").names())


def test_experts_in_an_uncertain_order_are_refused(copy):
    folder = copy("moe")
    (path,) = folder.glob("step3/mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=True)
    state["ds_config"]["use_data_before_expert_parallelism"] = True
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="use_data_before_expert_parallelism are not read"):
        foreign.open(folder)


def test_an_unknown_folder_says_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    words = r"Looked for manifest.json \(ours\), mp_rank_XX.*\.metadata.*model.safetensors.*it has notes.txt"
    with pytest.raises(CheckpointError, match=words):
        foreign.open(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        foreign.open(tmp_path / "nothing")
