"""What docs/precision.md shows is what happens."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from mizzen.config.load import load
from mizzen.config.schema import Config
from mizzen.config.section import schema_keys
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.plan.cost import replicated

PAGE = (Path(__file__).parents[3] / "docs" / "precision.md").read_text()


def program() -> list[tuple[str, str]]:
    """What each `print` prints, with what the page says that it prints."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = re.findall(r"print\(.*\)  # (.*)", block)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(block, "docs/precision.md", "exec"), {})
    return list(zip(output.getvalue().splitlines(), said, strict=True))


def test_the_program_prints_what_the_page_says(world):
    for size in (1, 2):
        for lines in world(size).run(program):
            assert len(lines) == 2
            assert all(printed == said for printed, said in lines)


LOW = {"enabled": True, "bf16_master_weights_and_grads": True}
SHARDED = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("keys", "column", "words"),
    [
        ({}, 1, "16"),
        ({"bf16": {"enabled": True}}, 2, "18"),
        ({"fp16": {"enabled": True}}, 3, "18"),
        ({"torch_autocast": {"enabled": True}}, 4, "16"),
        ({"bf16": LOW, **SHARDED}, 5, "12, or 8 with `bf16_optimizer_states`"),
        ({"bf16": {**LOW, "bf16_optimizer_states": True}, **SHARDED}, 5, "12, or 8 with `bf16_optimizer_states`"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **SHARDED}, 5, "12, or 8 with"),
    ],
    ids=str,
)
def test_the_bytes_of_an_element(keys, column, words):
    row = next(line for line in PAGE.splitlines() if line.startswith("| bytes per trained element"))
    cell = row.split("|")[column + 1].strip()
    assert cell.startswith(words)
    cost = replicated(load({"optimizer": {"type": "AdamW"}, **keys}), Sketch((ParameterSketch("w", (1,)),)))
    assert cost.total in [int(number) for number in re.findall(r"\b\d+\b", cell)]


def test_every_key_on_the_page_exists():
    known = {place.path for place in schema_keys(Config)}
    named = set(re.findall(r"`((?:bf16|fp16|torch_autocast|data_types)\.\w+)`", PAGE))
    assert len(named) >= 10
    assert named <= known
