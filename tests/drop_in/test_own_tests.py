"""How a client's own tests are counted; no client is needed for that."""

import pytest

from clients import own_tests

TESTS = """
import unittest
import pytest

def test_right(): pass

def test_loss():
    accelerator = "cuda"  # on the way
    train_micro_batch_size_per_gpu = 3.5
    assert train_micro_batch_size_per_gpu == 2.5, "the loss of accelerator.backward"

def test_device(): raise RuntimeError("Found no NVIDIA driver: CUDA is not available")

@unittest.skip("test requires multiple accelerators")
def test_many(): pass
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    return str(tmp_path)


def lines(capsys):
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_a_wrong_loss_does_not_need_a_gpu(checkout, capsys):
    assert own_tests.main([checkout, "test_it.py"]) == 1
    assert lines(capsys)[-4:] == ["1 failed: needs a GPU", "1 failed: other", "1 passed", "1 skipped: needs a GPU"]


def test_a_run_without_a_failure(checkout, capsys):
    assert own_tests.main([checkout, "test_it.py", "-k", "right"]) == 0
    assert lines(capsys)[-1] == "1 passed"


@pytest.mark.parametrize("tests", [["test_it.py", "-k", "nowhere"], ["no_such_file.py"], ["--no-such-option"]])
def test_a_run_of_nothing_is_no_success(checkout, capsys, tests):
    assert own_tests.main([checkout, *tests]) == 1
    assert lines(capsys)[-1] == "nothing ran: no test matches"
