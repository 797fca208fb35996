"""How a client's own tests are found, run and counted; no client is needed for that."""

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

def test_device(): raise RuntimeError("GivenKey no NVIDIA driver: CUDA is not available")

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


FINDS = """
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import client

def test_what_comes_from_where():
    assert "mizzen" in Path(find_spec("deepspeed").origin).parts and "mizzen" in version("deepspeed")
    assert Path(client.__file__) == Path.cwd() / "src" / "client" / "__init__.py"
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
"""
"""The drop-in; the client of the checkout; the commands of the environment."""
ACCELERATE = {
    "tests/deepspeed/beside.py": "stages = (2, 3)",
    "tests/deepspeed/test_deepspeed.py": "from client.test_utils import answer\nfrom beside import stages\n" + FINDS,
    "tests/deepspeed/test_missing.py": "from no_such_package import parameterized\n",
}
"""Tests in plain folders, one of which wants a package that is not there."""
TRANSFORMERS = {
    "conftest.py": "import sys\nfrom pathlib import Path\nsys.path.insert(1, str(Path(__file__).parent / 'src'))",
    "tests/__init__.py": "",
    "tests/trainer/__init__.py": "",
    "tests/trainer/helpers.py": "answer = 42",
    "tests/trainer/distributed/__init__.py": "",
    "tests/trainer/distributed/common.py": "class Common: pass",
    "tests/trainer/distributed/test_trainer_distributed_deepspeed.py": (
        "from .common import Common\nfrom tests.trainer.helpers import answer\n" + FINDS
    ),
}
"""Tests in packages, with imports from one another."""


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A client of the environment and another deepspeed there; the checkout is named from a folder above it."""
    write(tmp_path / "environment", {"client/__init__.py": "", "deepspeed/__init__.py": ""})
    write(tmp_path / "sources" / "client", {"src/client/__init__.py": "", "src/client/test_utils.py": "answer = 42"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "environment"))
    monkeypatch.chdir(tmp_path)
    return "sources/client"


def test_a_checkout_with_tests_in_packages(named, tmp_path, capfd):
    write(tmp_path / named, TRANSFORMERS)
    assert own_tests.main([named]) == 0
    assert lines(capfd)[-1] == "1 passed"


def test_a_checkout_with_tests_in_plain_folders_and_a_package_that_is_missing(named, tmp_path, capfd):
    write(tmp_path / named, ACCELERATE)
    assert own_tests.main([named]) == 1
    assert lines(capfd)[-2:] == ["1 not collected: needs a package that is not installed", "1 passed"]


def test_a_part_of_the_drop_in_that_is_missing_is_no_missing_package():
    assert own_tests.reason_of("ModuleNotFoundError: No module named 'deepspeed.nowhere'") == "other"


def test_tests_are_listed_without_a_run(tmp_path, capfd):
    write(tmp_path, {"tests/deepspeed/test_deepspeed.py": "def test_it(): raise RuntimeError"})
    assert own_tests.main([str(tmp_path), "tests/deepspeed", "--collect-only"]) == 0
    assert "1 test collected" in capfd.readouterr().out


@pytest.mark.parametrize("place", ["tests/clients", "nowhere"])
def test_a_checkout_that_cannot_be_used(place, capsys):
    assert own_tests.main([str(own_tests.REPOSITORY / place), "test_it.py"]) == 2
    assert place in capsys.readouterr().out
