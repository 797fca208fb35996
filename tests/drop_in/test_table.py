"""Every row of the table of import paths: a name can be imported from each of its modules, and is what it should be."""

import copy
import importlib
import json
import pickle
import subprocess
import sys
from abc import ABC
from importlib.util import find_spec
from inspect import isclass, isfunction, ismodule

import pytest
from torch import nn

from drop_in import listing
from house.tree import ROOT
from mizzen.errors import NotBuilt
from mizzen.launcher.job import DROP_IN

TABLE = listing.table()
NAMED = [(path, name, row) for row in TABLE.ROWS for path in row.paths for name in row.names]


def found(path, name):
    return getattr(importlib.import_module(path), name)


BUILT, WAITING = ([each for each in NAMED if bool(each[2].waits_for) is waits] for waits in (False, True))


def test_every_name_is_what_lives_at_its_home():
    """One test for all: what is imported for one name is there for the next."""
    wrong = [f"{path}.{name}" for path, name, row in BUILT if not is_at_home(path, name, row)]
    assert wrong == []


def is_at_home(path, name, row):
    home = importlib.import_module(row.home)
    if name == "*":
        module = importlib.import_module(path)
        own = {other for other_path, other, _ in NAMED if other_path == path}
        return home.__all__ and all(getattr(module, each) is getattr(home, each) for each in {*home.__all__} - own)
    value = found(path, name)
    ours = row.names[name]
    return value is (home if ours == "." else getattr(home, ours)) and is_spelt_like_its_kind(name, value)


def is_spelt_like_its_kind(name, value):
    """Classes have words with capitals, constants have capitals only, and all else is called or is a module."""
    bare = name.strip("_")
    if name in ("AUTOTP_MODE", "csvMonitor", "pp_int"):
        return isclass(value)
    if bare.isupper() or not callable(value):
        return not isclass(value)
    return isclass(value) or callable(value) if bare[0].isupper() else callable(value) or ismodule(value)


def test_every_name_that_waits_says_for_what():
    wrong = [f"{path}.{name}" for path, name, row in WAITING if not says_for_what(path, name, row)]
    assert wrong == []


def says_for_what(path, name, row):
    value = found(path, name)
    with pytest.raises(NotBuilt, match="not built yet") as caught:
        value(1, two=2)
    is_told = row.waits_for in str(caught.value) and name in str(caught.value)
    is_one = found(row.paths[0], name) is value  # whichever way it was imported
    return is_told and is_one and isclass(value) == name.lstrip("_")[0].isupper()


def test_a_class_that_waits_can_be_inherited_from_and_asked_about():
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    class Mine(MoE):
        pass

    class Abstract(MoE, ABC):
        pass

    class Both(MoE, nn.Module):
        pass

    assert not isinstance(3, MoE) and issubclass(Mine, MoE) and issubclass(Abstract, ABC)
    assert issubclass(Both, nn.Module)
    with pytest.raises(NotBuilt, match="deepspeed.moe.layer.MoE waits for .* mixture of experts"):
        Mine(hidden_size=1)
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
    assert deepspeed.ops.__compatible_ops__[deepspeed.ops.aio.AsyncIOBuilder.NAME] is True
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


@pytest.mark.parametrize("module", TABLE.RUNNABLE)
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
        env={"PYTHONPATH": f"{ROOT / 'src'}:{DROP_IN}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


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
    from deepspeed.moe.layer import MoE

    class Own(MoE):
        """Of a script."""

    assert pickle.loads(pickle.dumps(MoE.from_layers)) is MoE.from_layers
    assert Own.from_layers is MoE.from_layers
    with pytest.raises(NotBuilt, match=r"deepspeed\.\S*MoE\.from_layers waits") as caught:
        MoE.from_layers()
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


def test_constants_are_where_scripts_look_for_them():
    from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.runtime import constants, lr_schedules
    from deepspeed.runtime.config import ADAM_OPTIMIZER, TRAIN_BATCH_SIZE
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    assert (UNIVERSAL_CHECKPOINT_INFO, ADAM_OPTIMIZER) == ("universal_checkpoint_info", "adam")
    assert TRAIN_BATCH_SIZE == constants.TRAIN_BATCH_SIZE == "train_batch_size"
    assert (lr_schedules.WARMUP_LR, lr_schedules.WARMUP_NUM_STEPS) == ("WarmupLR", "warmup_num_steps")
    assert all(isinstance(name, str) for name in DEFAULT_LEAF_MODULE_CLASSES)
    assert "ROUTE_TRAIN" in dir(constants)


def test_every_file_of_constants_is_in_the_table():
    found = {}
    for path in (DROP_IN / "deepspeed" / "values").glob("*.json"):
        modules = json.loads(path.read_text())
        assert {module.split(".")[1] for module in modules} == {path.stem}
        found |= modules
    assert found.keys() == TABLE.CONSTANTS
    assert {other for others in TABLE.STARS.values() for other in others} <= TABLE.CONSTANTS
    long = [value for names in found.values() for value in names.values() if isinstance(value, str) and len(value) > 70]
    assert not long  # keys and names, no texts


def test_what_is_there_of_the_listing_only_grows():
    modules, names = listing.there()
    assert (modules, names) >= listing.LEAST, "a module or a name that scripts import has gone"
    assert modules >= listing.LEAST[0] and names >= listing.LEAST[1]


def test_what_is_missing_of_the_listing_is_known():
    """`python tests/drop_in/listing.py` writes the file anew."""
    assert listing.missing_text() == listing.MISSING.read_text(), listing.__doc__
