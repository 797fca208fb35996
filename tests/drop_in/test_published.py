"""Files as other projects publish them do what the table beside them says, and what docs/migrate.md says of them."""

import pytest

from drop_in.published_files import COLUMNS, FOLDER, TABLE, problems, refused, row
from drop_in.published_programs import initialized
from house.tree import ROOT
from mizzen.cli import main


@pytest.fixture
def run(capsys):
    def run_command(*words):
        code = main([*map(str, words), "--drop-in"])
        return code, "".join(capsys.readouterr())

    return run_command


@pytest.fixture(scope="module")
def engines(world, tmp_path_factory):
    return world(2).run(initialized, str(tmp_path_factory.mktemp("published")), timeout=120)


def test_every_file_is_in_the_table():
    assert {path.stem for path in FOLDER.glob("*.json")} - {"expected"} == TABLE.keys()
    assert all(entry.keys() == {"has", *COLUMNS} for entry in TABLE.values())


@pytest.mark.parametrize("name", TABLE)
def test_check(run, name):
    code, out = run("config", "check", FOLDER / f"{name}.json")
    assert (code, refused(problems(out))) == (2 if TABLE[name]["check"] else 0, TABLE[name]["check"])


@pytest.mark.parametrize("name", TABLE)
def test_plan(run, name):
    code, out = run("plan", FOLDER / f"{name}.json", "--world", 2)
    found = refused(out.replace("mizzen: error: ", "")) if code else []
    assert (code, found) == (2 if TABLE[name]["plan"] else 0, TABLE[name]["plan"])


@pytest.mark.parametrize("name", TABLE)
def test_initialize(engines, name):
    for rank in engines:
        first, _, message = rank[name].partition("\n")
        assert refused(message) == TABLE[name]["initialize"], rank[name]
        assert first == "trained" or message


def test_the_page_has_a_row_for_each():
    page = (ROOT / "docs" / "migrate.md").read_text(encoding="utf8")
    lines = page.splitlines()
    assert [line for line in lines if "](../tests/drop_in/published/" in line] == [row(name) for name in TABLE]
