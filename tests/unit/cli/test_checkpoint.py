"""`mizzen checkpoint` and its commands on folders that the tests make."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unit.checkpoint.test_files import save


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2, 3):
        save(
            tmp_path / "checkpoints",
            {"a": torch.full((4, 3), float(step)), "b": torch.ones(2)},
            tag=f"s{step}",
            step=step,
        )
    return tmp_path / "checkpoints"


def test_ls(mizzen, folder):
    ran = mizzen("checkpoint", "ls", folder)
    assert ran.code == 0 and [line.split()[0] for line in ran.out.splitlines()] == ["tag", "s1", "s2", "s3"]
    assert ran.out.splitlines()[-1].split()[1] == "*"
    rows = json.loads(mizzen("checkpoint", "ls", folder, "--json").out)
    assert [(row["tag"], row["step"], row["latest"]) for row in rows] == [
        ("s1", 1, False),
        ("s2", 2, False),
        ("s3", 3, True),
    ]


def test_show(mizzen, folder):
    ran = mizzen("checkpoint", "show", folder, "--tag", "s2")
    assert "s2" in ran.out and "model  a     [4, 3]  float32" in ran.out
    assert json.loads(mizzen("checkpoint", "show", folder, "--json").out)["facts"]["counters"] == {"global_steps": 3}


@pytest.mark.parametrize("key", ["versions", "counters"])
def test_show_of_forged_facts(mizzen, tmp_path, key):
    manifest = save(tmp_path, {"a": torch.zeros(1)})
    (tmp_path / "tag" / "manifest.json").write_bytes(replace(manifest, facts={key: [1]}).to_bytes())
    result = mizzen("checkpoint", "show", tmp_path)
    assert result.code == 1 and f"'{key}' is no dict" in result.err


def test_verify(mizzen, folder):
    assert mizzen("checkpoint", "verify", folder, "--all").out.count("whole") == 3
    path = next((folder / "s2").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ran = mizzen("checkpoint", "verify", folder, "--all")
    assert ran.code == 1 and ran.out.count("whole") == 2 and path.name in ran.out and "model" in ran.out
    assert mizzen("checkpoint", "verify", folder / "s3").code == 0


LATESTS = {
    "s9\n": "names 's9', which is not committed",
    "": "names no checkpoint",
    "../s1\n": "names no checkpoint",
}


@pytest.mark.parametrize("content", LATESTS, ids=repr)
@pytest.mark.parametrize("every", [True, False])
def test_verify_tells_of_latest(mizzen, folder, content, every):
    (folder / "latest").write_text(content)
    ran = mizzen("checkpoint", "verify", folder, *["--all"] * every)
    assert ran.code == 3 and LATESTS[content] in ran.out and ran.out.count("whole") == (3 if every else 1)
    assert (
        mizzen("checkpoint", "verify", folder / "s3").code
        == mizzen("checkpoint", "verify", folder, "--tag", "s1").code
        == 0
    )
    next((folder / "s3").glob("*.safetensors")).unlink()
    assert mizzen("checkpoint", "verify", folder, "--all").code == 1


def test_verify_is_content_with_a_latest_that_was_edited_or_is_missing(mizzen, folder):
    save(folder, {"a": torch.zeros(1)}, tag="of-the-user")
    (folder / "latest").write_text("s2\n")
    assert mizzen("checkpoint", "verify", folder, "--all").code == 0
    (folder / "latest").unlink()
    ran = mizzen("checkpoint", "verify", folder, "--all")
    assert ran.code == 0 and "latest" not in ran.out


def test_diff(mizzen, folder):
    ran = mizzen("checkpoint", "diff", folder, folder, "--tag", "s1")
    assert ran.code == 1 and "model 'a'" in ran.out and "model 'b'" not in ran.out
    assert mizzen("checkpoint", "diff", folder / "s1", folder / "s1").out == "no difference\n"


def test_export_and_import(mizzen, folder, tmp_path):
    ran = mizzen("checkpoint", "export", folder, "--to", tmp_path / "out", "--dtype", "fp32")
    assert ran.code == 0 and "model.safetensors" in ran.out
    assert mizzen("checkpoint", "export", folder, "--to", tmp_path / "one.bin").code == 0
    ran = mizzen("checkpoint", "import", folder, "--to", tmp_path / "other", "--as", "copy")
    assert ran.code == 0 and (tmp_path / "other" / "copy" / "manifest.json").exists()


def test_export_of_layers(mizzen, tmp_path):
    pipeline = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "pipeline"
    ran = mizzen("checkpoint", "export", pipeline, "--to", tmp_path, "--layers")
    assert ran.code == 0 and "global_step3/layer_03-model_states.pt" in ran.out
    assert "global_step3/zero/3.weight/exp_avg.pt" in ran.out
    ran = mizzen("checkpoint", "export", pipeline, "--to", tmp_path, "--layers", "--no-states")
    assert ran.code == 0 and "zero" not in ran.out and not (tmp_path / "global_step3" / "zero").exists()
    assert "give that, too" in mizzen("checkpoint", "export", pipeline, "--to", tmp_path, "--no-states").err


def test_prune(mizzen, folder):
    said = mizzen("checkpoint", "prune", folder, "--keep-last", 1, "--dry-run").out
    assert said.count("would delete") == 2 and len(list(folder.glob("s*"))) == 3
    assert mizzen("checkpoint", "prune", folder, "--keep-last", 1, "--keep-every", 2).code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "s2", "s3"]
    assert mizzen("checkpoint", "prune", folder, "--keep-every", 2).code == 2


@pytest.mark.parametrize(
    "words", [("ls",), ("show",), ("verify",), ("prune",), ("export", "--to", "x"), ("import", "--to", "x")]
)
def test_a_folder_without_checkpoints(mizzen, tmp_path, words):
    ran = mizzen("checkpoint", words[0], tmp_path / "nothing", *words[1:])
    assert ran.code == 1 and "nothing" in ran.err and "Traceback" not in ran.err


def test_a_tag_that_no_folder_can_have(mizzen, folder):
    ran = mizzen("checkpoint", "show", folder, "--tag", "x" * 300)
    assert ran.code == 1 and "File name too long" in ran.err and "Traceback" not in ran.err
