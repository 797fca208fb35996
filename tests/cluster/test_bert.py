"""The script for BERT pre-training on two hosts, over ssh, as its page shows it; under the drop-in."""

import json
import sys
from pathlib import Path

import pytest

from cluster.hosts import PORT

FOLDER = Path(__file__).parents[2] / "examples" / "bert"


def test_bert_on_two_hosts(cluster, tmp_path):
    pytest.importorskip("transformers")
    data = cluster.run(
        *(sys.executable, FOLDER / "make_data.py", "--data_path_prefix", tmp_path / "shards"),
        *("--max_seq_length", 48, "--vocabulary", 600, "--modules", 60),
    )
    assert data.returncode == 0, data.stderr.decode()[-2000:]
    config = json.loads((FOLDER / "bert_tiny.json").read_text()) | {"checkpoint": {"dir": str(tmp_path / "saved")}}
    (tmp_path / "bert.json").write_text(json.dumps(config))
    ran = cluster.run(
        *(sys.executable, "-m", "mizzen.cli", "run", "--drop-in", "--launcher", "ssh"),
        *("--hostfile", cluster.folder / "hostfile", "--ssh_port", PORT, FOLDER / "deepspeed_train.py"),
        *("--deepspeed_config", "bert.json", "--data_path_prefix", "shards", "--max_seq_length", 48),
        *("--output_dir", ".", "--max_steps", 3),
        cwd=tmp_path,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout.decode()[-2000:] + ran.stderr.decode()[-4000:]
    events = [json.loads(line) for line in (tmp_path / "bert.jsonl").read_text().splitlines()]
    assert [event["samples"] for event in events if "loss" in event] == [16, 32, 48]
    assert (tmp_path / "saved" / "epoch0_step3").is_dir()
