"""Every wrong use gives one of our errors, with exactly the words kept in wrong_uses.txt."""

from pathlib import Path

import pytest

from mizzen import errors
from ranks.engine.wrong_uses import CASES, collect

KEPT = Path(__file__).with_name("wrong_uses.txt")
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MizzenError)}


@pytest.fixture(scope="module")
def found(world):
    return world(1).run(collect, timeout=120)[0]


def kept() -> dict[str, str]:
    entries = KEPT.read_text().strip().split("\n\n")
    return {entry.split("\n", 1)[0]: entry.split("\n", 1)[1] for entry in entries}


def test_there_are_sixty():
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_gives_the_error_that_is_kept(found, name):
    assert found[name] == kept()[name]


@pytest.mark.parametrize("name", [name for name in CASES if name != "unknown attribute"])
def test_the_error_is_one_of_ours(found, name):
    assert found[name].split(":")[0] in OURS
