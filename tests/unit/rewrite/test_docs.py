"""The pages on recomputation, compilation and fused operations: configurations load, code runs, names exist."""

import json
import re
from pathlib import Path

import pytest

from mizzen import checkpointing
from mizzen.config.execution import ActivationCheckpointingConfig, FusedConfig
from mizzen.config.load import load
from mizzen.rewrite.recompute import Keeping

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in ("recompute", "compile", "fused")}


@pytest.mark.parametrize("name", PAGES)
def test_configurations_load(name):
    blocks = re.findall(r"```json\n(.*?)```", PAGES[name], re.DOTALL)
    assert blocks
    for block in blocks:
        load(json.loads(block))


def test_the_code_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["recompute"], re.DOTALL)
    names = {}
    exec(compile(block, "docs/recompute.md", "exec"), names)
    assert names["hidden"].grad is not None
    assert names["checkpointing"].Checkpointing.current().keeping == Keeping()


def test_the_loss_of_a_model_of_ones_own():
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["fused"], re.DOTALL)
    names = {}
    exec(compile(block, "docs/fused.md", "exec"), names)
    assert names["hidden"].grad.any() and names["weight"].grad.any()


def test_every_call_and_every_key_has_its_words():
    missing = [name for name in checkpointing.__all__ if f"`{name}" not in PAGES["recompute"]]
    assert missing == []
    keys = ActivationCheckpointingConfig.model_fields
    assert [key for key in keys if key not in PAGES["recompute"] and key != "partition_activations"] == []
    assert [key for key in FusedConfig.model_fields if f"`{key}`" not in PAGES["fused"]] == []
