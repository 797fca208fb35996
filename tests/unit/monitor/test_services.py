"""W&B and Comet, which need a network, with modules in their place; and what is said when they are not installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from mizzen.config.observe import CometConfig, TensorboardConfig, WandbConfig
from mizzen.errors import MissingExtra
from mizzen.monitor.output import require
from mizzen.monitor.sinks import CometSink, TensorboardSink, WandbSink


class Calls:
    """An object that writes down every call made to it."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.made.append((name, args, kwargs))


@pytest.fixture
def wandb(monkeypatch):
    run = Calls()
    module = SimpleNamespace(run=None, started=[], its_run=run)
    module.init = lambda **arguments: module.started.append(arguments) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def comet(monkeypatch):
    experiment = Calls()
    module = SimpleNamespace(started=[], experiment=experiment)
    module.start = lambda **arguments: module.started.append(arguments) or experiment
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return module


def test_wandb_starts_a_run_logs_once_per_position_and_finishes_it(wandb):
    sink = WandbSink(WandbConfig(enabled=True, project="p", group="g", team="t"))
    sink.write([("a", 1.0, 8), ("b", 2.0, 8)])
    sink.write([("a", 3.0, 16), ("c", 4.0, 8)])
    sink.flush()
    sink.close()
    assert wandb.started == [{"project": "p", "group": "g", "entity": "t"}]
    assert wandb.its_run.made == [
        ("log", ({"a": 1.0, "b": 2.0},), {"step": 8}),
        ("log", ({"a": 3.0},), {"step": 16}),
        ("log", ({"c": 4.0},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_wandb_takes_the_run_of_the_program_and_leaves_it_open(wandb):
    wandb.run = Calls()
    sink = WandbSink(WandbConfig(enabled=True))
    sink.write([("a", 1.0, 8)])
    sink.close()
    assert wandb.started == [] and [name for name, *_ in wandb.run.made] == ["log"]


def test_comet_gets_its_section_and_a_point_every_so_many_samples(comet):
    section = CometConfig(
        enabled=True,
        samples_log_interval=16,
        project="p",
        workspace="w",
        api_key="k",
        experiment_name="n",
        experiment_key="e",
        online=False,
        mode="create",
    )
    sink = CometSink(section)
    for samples in (8, 16, 24, 32, 40, 8):  # the last one after going back to a checkpoint
        sink.write([("a", float(samples), samples)])
    sink.write([("b", 1.0, 8)])
    sink.flush()
    sink.close()
    assert comet.started == [
        {
            "api_key": "k",
            "workspace": "w",
            "project_name": "p",
            "experiment_key": "e",
            "mode": "create",
            "online": False,
        }
    ]
    assert comet.experiment.made == [
        ("set_name", ("n",), {}),
        ("log_metric", ("a", 8.0), {"step": 8}),
        ("log_metric", ("a", 24.0), {"step": 24}),
        ("log_metric", ("a", 40.0), {"step": 40}),
        ("log_metric", ("a", 8.0), {"step": 8}),
        ("log_metric", ("b", 1.0), {"step": 8}),
        ("flush", (), {}),
        ("end", (), {}),
    ]


def test_comet_names_the_experiment_itself_unless_told(comet):
    CometSink(CometConfig(enabled=True))
    assert comet.experiment.made == []


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboard", "tensorboard", lambda: TensorboardSink(TensorboardConfig())),
        ("wandb", "wandb", lambda: WandbSink(WandbConfig())),
        ("comet_ml", "comet", lambda: CometSink(CometConfig())),
    ],
)
def test_an_absent_package_is_an_error_that_names_the_extra(monkeypatch, package, extra, make):
    hide(monkeypatch, package)
    message = rf"{extra}\.enabled needs '{package}', which is not installed: pip install 'mizzen\[{extra}\]'"
    with pytest.raises(MissingExtra, match=message):
        make()


def hide(monkeypatch, package):
    """As if a package were not installed."""

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])


def test_a_package_that_lacks_something_of_its_own_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import something_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="something_it_needs") as caught:
        require("half_installed", extra="x", purpose="x")
    assert not isinstance(caught.value, MissingExtra)


def test_a_package_that_is_there_is_returned(monkeypatch):
    module = ModuleType("present_package")
    monkeypatch.setitem(sys.modules, "present_package", module)
    assert require("present_package", extra="x", purpose="x") is module
