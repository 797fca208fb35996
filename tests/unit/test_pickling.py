"""Errors and frozen values reach another process as they were: a worker pool pickles whatever its workers raise."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from torch import nn

import mizzen
from mizzen.config.load import load
from mizzen.environment import World
from mizzen.errors import ConfigError, FileError, MissingExtra, MizzenError
from mizzen.model.box import Box
from mizzen.model.piece import Piece
from mizzen.model.sketch import Sketch
from mizzen.monitor.report import StepReport
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.explain import explain

WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "old pickle": lambda value: pickle.loads(pickle.dumps(value, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def errors():
    """Every error class that any module of the library defines."""
    for module in pkgutil.walk_packages(mizzen.__path__, "mizzen."):
        is_program = module.name.endswith("__main__") or module.name.startswith("mizzen.drop_in")
        if not is_program:
            with suppress(ModuleNotFoundError):  # Triton's, which is only where a GPU is
                importlib.import_module(module.name)
    found, new = set(), [BaseException]
    while new:
        kind = new.pop()
        found.add(kind)
        new += [below for below in type.__subclasses__(kind) if below not in found]
    ours = (kind for kind in found if kind.__module__.startswith("mizzen"))
    # The drop-in joins classes under the names of ours when it is used, and has tests of its own for them.
    defined = (kind for kind in ours if vars(sys.modules[kind.__module__]).get(kind.__qualname__) is kind)
    return sorted(defined, key=lambda kind: kind.__name__)


def made(kind):
    """One of a class, each argument of which is told from the others."""
    if kind.__init__ in (Exception.__init__, OSError.__init__, *(base.__init__ for base in kind.__bases__)):
        return kind("what was asked, 3 of 4, the way out")
    names = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.VAR_KEYWORD]
    by_name = {each.name: f"the {each.name}" for each in names if each.kind is each.KEYWORD_ONLY}
    return kind(*[f"the {each.name}" for each in names if each.name not in by_name], **by_name)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_error_survives(way):
    kinds = errors()
    assert {ConfigError, MissingExtra, FileError, MizzenError} <= {*kinds}
    for kind in kinds:
        error = made(kind)
        error.add_note("and where it was")
        again = way(error)
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error)), kind


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_builtin_errors_know_survives(way):
    error = way(FileError(28, "No space left on device", "/scratch/a"))
    assert (error.errno, error.strerror, error.filename) == (28, "No space left on device", "/scratch/a")
    assert "/scratch/a" in str(error)

    class Named(MissingExtra):
        """A user's own, made from other arguments again."""

        def __init__(self, package):
            super().__init__(package, extra="x", purpose="a test")
            self.name = package

    if way in (copy.copy, copy.deepcopy):  # a class inside a function has no name that pickle could look up
        again = way(Named("lightgbm"))
        assert (again.name, again.package, again.extra) == ("lightgbm", "lightgbm", "x")


def fail():
    load({"zero_optimization": {"stage": 7}})


def test_a_pool_of_workers_raises_the_error_and_does_not_wait_for_ever():
    with get_context("fork").Pool(1) as pool, ThreadPoolExecutor(1) as waiting:
        result = waiting.submit(pool.apply, fail)
        with pytest.raises(ConfigError, match=r"zero_optimization\.stage") as caught:
            result.result(timeout=60)
    assert caught.value.path == "zero_optimization.stage"


def values():
    """What users send to other processes, by name."""
    config = load(
        {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        }
    )
    plan = build(config, 4, Sketch.of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), ORDER)
    choices = {type(step.choice).__name__: step.choice for step in plan.steps}
    resolved = plan.resolved
    return {
        "Config": config,
        "Resolved": resolved,
        "Layout": resolved.layout,
        "Batch": resolved.batch,
        "Sketch": plan.sketch,
        "Cost": plan.cost,
        "World": World(1, 2, 1, 2),
        **choices,
    }, plan


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_frozen_values_survive(way):
    found, plan = values()
    for name, value in found.items():
        assert way(value) == value, name
    again = way(found["Config"])
    assert again.is_given("optimizer")
    assert not again.is_given("gradient_clipping")
    assert explain(way(plan)) == explain(plan)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_piece_survives(way):
    piece = way(Piece("weight", (4, 2), (Box((0, 0), (2, 2)),), torch.arange(4.0).view(2, 2)))
    assert (piece.name, piece.shape, piece.boxes) == ("weight", (4, 2), (Box((0, 0), (2, 2)),))
    assert piece.data.tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_report_takes_its_numbers_along(way):
    numbers = {"loss": 1.5, "norm": 2.5}
    report = StepReport(3, True, lr=(0.1,), read_loss=lambda: numbers["loss"], read_norm=lambda: numbers["norm"])
    again = way(report)
    numbers.clear()
    assert (again.loss, again.grad_norm) == (1.5, 2.5)
    assert replace(again, read_loss=report.read_loss, read_norm=report.read_norm) == report
