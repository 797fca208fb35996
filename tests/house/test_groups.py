"""Tests that share a fixture of their file stay on one worker, which makes it once."""

import pytest

from groups import stays_with


def test_tests_that_share_a_fixture_stay_together(request):
    for item in request.session.items:
        found = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009  pytest has no public way
        if any(each.scope in ("class", "module", "package") for fixtures in found for each in fixtures):
            file = item.nodeid.partition("::")[0]
            assert stays_with(item.nodeid) == stays_with(f"{file}::any other") != item.nodeid


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("tests/ranks/checkpoint/test_layouts.py::test_it[1 rank]", "tests/ranks/checkpoint/test_layouts.py"),
        ("tests/ranks/engine/test_vote.py::test_it", "tests/ranks/engine/test_vote.py::test_it"),
        ("tests/house/test_groups.py::test_it", "tests/house"),
        ("tests/unit/model/test_head.py::test_it", "transformers"),
    ],
)
def test_all_others_go_to_whoever_is_free(name, group):
    assert stays_with(name) == group
