"""The job as one word."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.errors import LaunchError
from mizzen.launcher.hosts import Host
from mizzen.launcher.job import Job, Program, Supervision

ANYTHING = st.text(st.characters(exclude_characters="\0"))


def job(**changes):
    values = {
        "id": "a1",
        "program": Program("script", "train.py", ("--lr", "0.1")),
        "hosts": (Host("w0", (0, 1)), Host("w1", (0,))),
        "folder": "/job",
        "python": "/usr/bin/python3",
        "secret": "s" * 32,
    }
    return Job(**{**values, **changes})


@given(st.lists(ANYTHING), st.dictionaries(ANYTHING, ANYTHING))
def test_every_word_comes_back(arguments, environment):
    made = job(program=Program("module", "a b", tuple(arguments), False), environment=environment)
    word = made.encode()
    assert re.fullmatch(r"[A-Za-z0-9_-]+", word)
    assert Job.decode(word) == made


def test_all_fields_come_back():
    supervision = Supervision(3, 5.0, 2.0, None, "logs", "error", (1, 2), "/tmp/x")
    made = job(supervision=supervision, master_addr="w0", master_port=5, min_nodes=1, max_nodes=2, follows_stdin=True)
    assert Job.decode(made.encode()) == made
    assert made.is_elastic


def test_a_job_that_is_too_long_says_how_long():
    import random

    long = random.Random(0).randbytes(200_000).hex()
    with pytest.raises(LaunchError, match="letters when encoded.*put long arguments into a file"):
        job(program=Program("script", "x", (long,))).word()


@pytest.mark.parametrize("word", ["", "abc", "!!", "eJyrBQAAdQB0"])
def test_what_is_no_job(word):
    with pytest.raises(LaunchError, match="this is no job"):
        Job.decode(word)


def test_the_command_of_a_rank():
    assert Program("script", "t.py", ("a",)).words("py", 3) == ["py", "-u", "t.py", "--local_rank=3", "a"]
    assert Program("module", "m", (), False).words("py", 3) == ["py", "-u", "-m", "m"]
    assert Program("executable", "./x", ("b",)).words("py", 0) == ["./x", "--local_rank=0", "b"]
