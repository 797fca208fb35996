"""The schema against its documentation, against the keys that users have in their files, and against its readers."""

import ast
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from house.tree import ROOT, Module, made_up, modules
from mizzen.config.describe import catalogue, explain, fate_words, render_markdown
from mizzen.config.migrate import name_keys
from mizzen.config.schema import Config
from mizzen.config.section import SchemaKey, nest_in, schema_keys

KEYS = list(schema_keys(Config))
KNOWN = (Path(__file__).parent / "known_keys.txt").read_text().split()
"""Every key of the files that users bring along, as a path."""

ARITHMETIC = frozenset({"config/elasticity.py", "config/resolve.py"})
"""The files of config/ that use keys; the others only carry them."""


def test_every_key_has_a_sentence_and_a_fate():
    keys = list(catalogue())
    assert [key.path for key in keys if not key.sentence.endswith((".", "..."))] == []
    assert [key.path for key in keys if not fate_words(key.fate)] == []
    assert [key.path for key in keys if key.fate.kind in ("no_effect", "refused") and not key.fate.reason] == []


def test_every_old_key_moves_to_a_key_that_exists():
    for place in KEYS:
        if place.fate.kind == "moved":
            assert not place.fate.moved_to or explain(place.fate.moved_to).fate.kind == "read", place.path
            assert place.fate.moved_to or place.fate.reason, f"{place.path} vanishes without a reason"


def nested(path: str) -> Any:
    """A configuration that holds this one key."""
    first, _, rest = path.partition(".")
    inner = nested(rest) if rest else None
    return [inner] if first == "<index>" else {first: inner}


def test_every_known_key_is_accepted():
    assert len(KNOWN) > 450
    assert [path for path in KNOWN if name_keys(nested(path), Config)] == []
    assert name_keys(nested("zero_optimization.stge"), Config) != []


def test_the_page_is_not_stale():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == render_markdown(), "run: mizzen config docs > docs/config.md"


def test_differences_name_existing_keys():
    rows = (ROOT / "docs" / "differences.md").read_text().splitlines()
    keys = [row.split("|")[1].strip().strip("`") for row in rows if row.startswith("| `")]
    assert len(keys) > 5
    for key in keys:
        explain(key)


@dataclass(frozen=True)
class Words:
    """What a file mentions: attributes, names, and whole strings."""

    attributes: frozenset[str]
    names: frozenset[str]
    strings: frozenset[str]

    @classmethod
    def of(cls, tree: ast.Module) -> "Words":
        nodes = list(ast.walk(tree))
        return cls(
            frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
            frozenset(node.id for node in nodes if isinstance(node, ast.Name))
            | frozenset(alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
            | frozenset(node.arg for node in nodes if isinstance(node, ast.arg)),
            frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)),
        )

    def reads(self, place: SchemaKey) -> bool:
        """Whether the file has the key as an attribute, next to its section; or its path as a string."""
        section = place.path.rpartition(".")[0].rpartition(".")[2]
        is_near = place.owner is Config or section in self.attributes or place.owner.__name__ in self.names
        return (place.name in self.attributes and is_near) or place.path in self.strings


def unread(files: Iterable[Module], keys: Iterable[SchemaKey], unbuilt: Sequence[str]) -> list[str]:
    """Keys that are said to be read and that no file reads; those not built yet count as read."""
    seen = [Words.of(module.tree) for module in files if module.unit != "config" or module.name in ARITHMETIC]
    return [
        place.path
        for place in keys
        if place.fate.kind == "read" and nest_in(place.field.annotation) is None
        if not any(f"{place.path}.".startswith(f"{path}.") for path in unbuilt)
        if not any(words.reads(place) for words in seen)
    ]


def test_every_key_that_is_read_has_a_reader():
    if importlib.util.find_spec("mizzen.plan.unbuilt") is None:
        pytest.skip("the table of what is not built yet does not exist")
    unbuilt = importlib.import_module("mizzen.plan.unbuilt").UNBUILT
    assert unread(modules(), KEYS, [row.path for row in unbuilt]) == []


def test_what_counts_as_reading(tmp_path):
    files = made_up(
        tmp_path,
        {
            "config/schema.py": "x.gradient_clipping\n",
            "engine/build.py": "def build(config):\n    return config.seed, config.comet.project\n",
            "comm/log.py": "from mizzen.config.observe import CommsLoggerConfig\nsection.verbose\n",
            "cli/show.py": "config.at('wandb.project')\n",
        },
    )
    asked = {
        "gradient_clipping",
        "seed",
        "comet.project",
        "comet.workspace",
        "comms_logger.verbose",
        "wandb.project",
        "wandb.group",
        "aio.queue_depth",
        "zero_optimization.contiguous_gradients",
    }
    keys = [place for place in KEYS if place.path in asked]
    assert unread(files, keys, ["aio"]) == ["gradient_clipping", "wandb.group", "comet.workspace"]
