"""HF Trainer does with published files what the table beside them says."""

import pytest

from drop_in.published_files import BY_THE_CLIENT, EVALUATED, TABLE
from mizzen import errors


@pytest.fixture(scope="module")
def ranks(scripts, tmp_path_factory):
    return scripts.launch("drive_published.py", tmp_path_factory.mktemp("published"))[0]


@pytest.mark.parametrize("name", TABLE)
def test_trainer(ranks, name):
    expected = TABLE[name]["trainer"]
    for rank in ranks:
        first, _, message = rank[name].partition("\n")
        is_ours = first in vars(errors)
        if not expected:
            assert first == "trained", message
        elif expected == [BY_THE_CLIENT]:
            assert first != "trained" and not is_ours, rank[name]
        else:
            assert is_ours and all(word in message for word in expected), rank[name]


@pytest.mark.parametrize("name", EVALUATED)
def test_a_trainer_that_never_trains_evaluates_with_a_schedule_in_the_file(ranks, name):
    for rank in ranks:
        assert rank[f"{name}, evaluated"] == pytest.approx(rank["evaluated without a file"], rel=1e-3)
