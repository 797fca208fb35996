"""The tests themselves: which of them are in the short choice, and that none of them holds a clock to a figure."""

import ast
from itertools import product

import pytest

from breadth import choice, choose, chosen, covering
from house.tree import ROOT
from mutate import MUTANTS, place_of

CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "thread_time"}


def clocked(text: str) -> list[int]:
    """Lines with an assert that something takes less time than so much: `assert clock() - began < 10`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)):
            continue
        is_upper = any(isinstance(each, ast.Lt | ast.LtE) for each in node.test.ops)
        if is_upper and isinstance(node.test.left, ast.BinOp) and _reads_a_clock(node.test.left):
            found.append(node.lineno)
    return found


def _reads_a_clock(tree: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr in CLOCKS for each in calls)


def test_clocks_are_seen():
    assert clocked("x = 1\nassert time.monotonic() - began < 10\nassert time.time() - began >= 1\nassert a < b") == [2]


def test_no_test_holds_a_clock_to_a_figure():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    found = {name: clocked(text) for name, text in texts.items() if any(f".{clock}(" in text for clock in CLOCKS)}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_covering_has_whatever_values_meet(strength):
    rows = list(product(range(4), range(3), range(2), range(2)))
    chosen = covering(rows, strength)
    assert len(chosen) < len(rows) and len(chosen) == {1: 4, 2: 12}.get(strength, len(chosen))
    for places in product(range(4), repeat=strength):
        assert {tuple(row[p] for p in places) for row in chosen} == {tuple(row[p] for p in places) for row in rows}


class Item:
    """A collected test with what `choose` looks at."""

    def __init__(self, ring, name, row=(), **marks):
        self.path = ROOT / "tests" / ring / "test_it.py"
        self.nodeid = f"tests/{ring}/test_it.py::{name}{list(row) if row else ''}"
        self.marks = marks
        self.axes = [pytest.mark.parametrize(axis, []).mark for axis in "ab"] if row else []
        self.callspec = type("Spec", (), {"params": dict(zip("ab", row, strict=False))})

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def iter_markers(self, name):
        return iter(self.axes)


def made(ring, name, first=(0, 1), **marks):
    return [Item(ring, name, row, **marks) for row in product(first, (10, 11, 12))]


@pytest.mark.parametrize(
    ("items", "count"),
    [
        (made("ranks", "test_cross"), 3),
        (made("ranks", "test_cross", crossed=True), 6),
        (made("unit", "test_cross"), 6),
        (made("unit", "test_cross", wide=True), 0),
        ([Item("ranks", "test_one")], 1),
    ],
)
def test_short_and_rest_are_all(monkeypatch, items, count):
    monkeypatch.setattr("breadth.FULL", True)
    chosen = {}
    for name in ("short", "rest", "all"):
        monkeypatch.setattr("breadth.BREADTH", name)
        chosen[name] = choose(items)[0]
    assert len(chosen["short"]) == count
    assert set(chosen["short"]).isdisjoint(chosen["rest"])
    assert {*chosen["short"], *chosen["rest"]} == set(chosen["all"]) == set(items)
    if 0 < count < len(items):
        assert {each.callspec.params["b"] for each in chosen["short"]} == {10, 11, 12}


@pytest.mark.parametrize(
    ("ring", "marks", "counts"),
    [
        ("parity", {}, (4, 4)),
        ("ranks", {}, (4, 0)),
        ("ranks", {"wide": True}, (0, 4)),
        ("ranks", {"crossed": True}, (12, 0)),
    ],
)
def test_of_a_cross_of_parity_the_rest_has_every_value_once_more(monkeypatch, ring, marks, counts):
    monkeypatch.setattr("breadth.FULL", False)
    items = made(ring, "test_cross", range(4), **marks)
    found = []
    for name, count in zip(("short", "rest"), counts, strict=True):
        monkeypatch.setattr("breadth.BREADTH", name)
        taken, others = choose(items)
        assert len(taken) == count and [*sorted(taken + others, key=items.index)] == items
        for axis, values in (("a", range(4)), ("b", (10, 11, 12))):
            assert not taken or {each.callspec.params[axis] for each in taken} == {*values}
        found += taken
    assert len(found) == len({*found}) == sum(counts)


def test_a_list_in_parts_is_run_in_both(monkeypatch):
    item = Item("ranks", "test_list", in_parts=True)
    found = []
    for name in ("short", "rest"):
        monkeypatch.setattr("breadth.BREADTH", name)
        assert choose([item]) == ([item], [])
        found += chosen(range(5), [0, 3])
    assert found == [0, 3, 1, 2, 4]


def test_lists_in_parts_are_marked():
    """A file that takes a part of a list has a test that both runs take; otherwise the rest of it would never run."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_tests.py"]
    using = [path for path in files if " chosen(" in path.read_text()]
    assert using and all("@pytest.mark.in_parts" in path.read_text() for path in using)


def test_a_choice_of_values():
    values = choice([(1, 2), (3, 4)], [(3, 4)])
    assert values[1] == (3, 4) and values[0].values == (1, 2) and values[0].marks[0].name == "wide"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_line_that_a_mutant_breaks_is_there_once(mutant):
    """Otherwise `make test-mutants` would stop at the first line that somebody has written in other words."""
    assert place_of(mutant).suffix == ".py"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_notice_a_mutant_are_there(mutant):
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists() and (not function or f"\ndef {function}(" in (ROOT / path).read_text()), test
