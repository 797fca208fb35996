"""Every row of the table of import paths: a name can be imported from each of its modules, and is what it should be."""

import copy
import importlib
import pickle
import runpy
import subprocess
import sys
from abc import ABC
from importlib.util import find_spec
from inspect import isclass, isfunction, ismodule

import pytest
from torch import nn

from house.tree import ROOT
from mizzen.errors import NotBuilt, UsageError
from mizzen.launcher.drop_in import FOLDER

TABLE = runpy.run_path(str(FOLDER / "deepspeed" / "table.py"))
NAMED = [(path, name, row) for row in TABLE["ROWS"] for path in row.paths for name in row.names]


def found(path, name):
    return getattr(importlib.import_module(path), name)


BUILT, WAITING = ([each for each in NAMED if bool(each[2].waits_for) is waits] for waits in (False, True))


def names_of(rows):
    return [f"{path}.{name}" for path, name, _ in rows]


@pytest.mark.parametrize(("path", "name", "row"), BUILT, ids=names_of(BUILT))
def test_a_name_is_what_lives_at_its_home(path, name, row):
    home = importlib.import_module(row.home)
    if name == "*":
        module = importlib.import_module(path)
        own = {other for other_path, other, _ in NAMED if other_path == path}
        assert home.__all__
        for each in {*home.__all__} - own:
            assert getattr(module, each) is getattr(home, each)
        return
    value = found(path, name)
    ours = row.names[name]
    assert value is (home if ours == "." else getattr(home, ours))
    assert is_spelt_like_its_kind(name, value)


def is_spelt_like_its_kind(name, value):
    """Classes have words with capitals, constants have capitals only, and all else is called or is a module."""
    bare = name.strip("_")
    if bare.isupper() or not callable(value):
        return not isclass(value)
    return isclass(value) or callable(value) if bare[0].isupper() else callable(value) or ismodule(value)


@pytest.mark.parametrize(("path", "name", "row"), WAITING, ids=names_of(WAITING))
def test_a_name_that_waits_says_for_what(path, name, row):
    value = found(path, name)
    assert isclass(value) == name.lstrip("_")[0].isupper()
    with pytest.raises(NotBuilt, match="not built yet") as caught:
        value(1, two=2)
    assert row.waits_for in str(caught.value) and name in str(caught.value)
    assert found(row.paths[0], name) is value  # one object, whichever way it was imported


def test_a_class_that_waits_can_be_inherited_from_and_asked_about():
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    class Mine(PipelineModule):
        pass

    class Abstract(PipelineModule, ABC):
        pass

    class Both(PipelineModule, nn.Module):
        pass

    assert not isinstance(3, PipelineModule) and issubclass(Mine, PipelineModule) and issubclass(Abstract, ABC)
    assert issubclass(Both, nn.Module)
    with pytest.raises(NotBuilt, match="deepspeed.pipe.PipelineModule waits for .* pipeline parallelism"):
        Mine(layers=[])
    with pytest.raises(NotBuilt, match="register_with_transformers waits for .* sequence parallelism"):
        UlyssesSPAttentionHF.register_with_transformers(model_name_or_path="x")


def test_no_name_has_two_homes():
    seen = {}
    for path, name, row in NAMED:
        if name != "*":
            assert seen.setdefault((path, name), row) is row, f"{path}.{name} is listed twice"


def test_modules_are_reached_as_attributes_and_as_imports():
    import deepspeed

    assert "LRRangeTest" in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
    assert deepspeed.ops.__compatible_ops__[deepspeed.ops.aio.AsyncIOBuilder.NAME] is False
    import deepspeed.comm as dist

    assert dist is deepspeed.comm is deepspeed.dist
    importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert not ismodule(deepspeed.utils.z3_leaf_module)  # a function, and a module of that name
    assert find_spec("deepspeed.runtime.zero.stage3") is not None
    assert find_spec("deepspeed.runtime.nothing") is None
    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute 'nothing'"):
        deepspeed.nothing  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.runtime.nothing")
    assert {"initialize", "zero", "comm", "ops"} <= set(dir(deepspeed))


def test_a_star_gets_what_is_public():
    names = {}
    exec("from deepspeed.ops.op_builder import *\nfrom deepspeed.utils import *", names)
    assert names["FusedAdamBuilder"].NAME == "fused_adam"
    assert callable(names["safe_get_full_grad"])


@pytest.mark.parametrize("module", TABLE["RUNNABLE"])
def test_a_module_that_runs_has_code(module):
    assert importlib.import_module(module).main
    assert find_spec(module).loader.get_code(module)


CHECK = """
import sys, warnings
warnings.simplefilter("error")
import mizzen
before = set(sys.modules)
import deepspeed
new = {name.partition(".")[0] for name in set(sys.modules) - before} - {"deepspeed"}
assert "torch" not in sys.modules and "pydantic" not in sys.modules, new
from importlib import metadata, util
assert util.find_spec("deepspeed") and metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert metadata.version("deepspeed") == deepspeed.__version__ == "0.19.8+mizzen"
"""


def test_the_import_is_light_silent_and_found():
    ran = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{FOLDER}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


ASKED = """
import sys
import torch
from deepspeed import DeepSpeedEngine
assert not isinstance(torch.nn.Linear(1, 1), DeepSpeedEngine)
assert not [name for name in sys.modules if name.startswith("mizzen.engine")]
"""


def test_whether_a_model_is_an_engine_can_be_asked_without_loading_engines():
    """Accelerate asks it of every model that it unwraps, once this is installed."""
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{FOLDER}"}
    ran = subprocess.run([sys.executable, "-c", ASKED], env=variables, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_the_class_of_engines_is_not_called():
    from deepspeed import DeepSpeedEngine
    from mizzen.engine.engine import Engine

    class Mine(DeepSpeedEngine):
        pass

    assert issubclass(Engine, DeepSpeedEngine) and issubclass(Mine, DeepSpeedEngine)
    assert not issubclass(int, DeepSpeedEngine) and not issubclass(Engine, Mine)
    assert DeepSpeedEngine.save_checkpoint is Engine.save_checkpoint
    with pytest.raises(UsageError, match="initialize"):
        DeepSpeedEngine(model=None)


def test_clients_take_its_version_for_new_enough():
    version = pytest.importorskip("packaging.version")
    assert version.parse("0.19.8+mizzen") >= version.parse("0.19.8") > version.parse("0.18.2")


def test_every_name_survives_pickling_and_copying():
    """A script may send any of them to a worker, or keep them in what it saves."""
    seen, lost = set(), []
    for path, name, row in NAMED:
        names = importlib.import_module(row.home).__all__ if name == "*" else [name]
        for each in names:
            value = found(path, each)
            if ismodule(value) or id(value) in seen:
                continue
            seen.add(id(value))
            try:
                again = pickle.loads(pickle.dumps(value))
                lost += [f"{path}.{each}"] * ((isclass(value) or isfunction(value)) and again is not value)
                copy.deepcopy(value)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                lost.append(f"{path}.{each}: {error}")
    assert lost == []
    assert len(seen) > 500


def test_a_method_of_a_class_that_waits_survives_pickling():
    from deepspeed.pipe import PipelineModule

    class Own(PipelineModule):
        """Of a script."""

    assert pickle.loads(pickle.dumps(PipelineModule.from_layers)) is PipelineModule.from_layers
    assert Own.from_layers is PipelineModule.from_layers
    with pytest.raises(NotBuilt, match=r"deepspeed\.\S*PipelineModule\.from_layers waits") as caught:
        PipelineModule.from_layers()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_configuration_survives_pickling_and_copying():
    from deepspeed.runtime.config_utils import pp_int
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from deepspeed import DeepSpeedConfig

    config = DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    for again in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert (again.train_batch_size, again.settings, again.resolved) == (4, config.settings, config.resolved)
    section = DeepSpeedZeroConfig(stage=2)
    assert pickle.loads(pickle.dumps(section)) == copy.deepcopy(section) == section
    assert repr(pickle.loads(pickle.dumps(pp_int(5000, "many")))) == "many"
