"""What an import costs: no torch before it is needed, little of our own, and no file of the user's touched."""

import json
import os
import subprocess
import sys

import pytest

from house.tree import ROOT, SOURCE

HEAVY = {"torch", "transformers", "triton", "numpy", "tensorboard", "wandb", "comet_ml", "matplotlib", "mpi4py"}
PLAIN = ["errors", "ambient", "environment", "log", "files", "config", "progress", "launcher", "monitor", "cli"]
"""What must be usable where torch is slow to load or absent."""

LOOK = """
import json, os, sys
home, opened = os.path.expanduser("~"), []
def hook(event, arguments):
    if event in ("open", "os.mkdir", "os.scandir", "os.listdir") and str(arguments[0]).startswith(home):
        opened.append(str(arguments[0]))
sys.addaudithook(hook)
__import__(sys.argv[1])
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


def python(*arguments, home):
    """A fresh interpreter whose home is empty; -P and -s, so that it finds only what is installed and our source."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
    environment |= {"HOME": str(home), "PYTHONPATH": str(SOURCE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-s", *arguments], env=environment, capture_output=True, text=True, check=True
    )


def exists(name):
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()


@pytest.mark.parametrize("name", ["mizzen", *(f"mizzen.{name}" for name in PLAIN if exists(name))])
def test_an_import_loads_nothing_heavy_and_touches_no_file_of_the_user(tmp_path, name):
    seen = json.loads(python("-c", LOOK, name, home=tmp_path).stdout)
    assert HEAVY & {module.split(".")[0] for module in seen["modules"]} == set()
    assert seen["opened"] == [] and list(tmp_path.iterdir()) == []


def test_the_facade_alone_loads_none_of_the_library(tmp_path):
    seen = json.loads(python("-c", LOOK, "mizzen", home=tmp_path).stdout)
    assert [module for module in seen["modules"] if module.startswith("mizzen")] == ["mizzen"]


CALLS = """
import sys
for name in sys.argv[2:]:
    __import__(name)
count = 0
def look(frame, event, argument):
    global count
    count += event == "call"
sys.setprofile(look)
__import__(sys.argv[1])
sys.setprofile(None)
print(count)
"""


@pytest.mark.parametrize(
    ("name", "over", "most"),
    [("mizzen", (), 10_000), ("mizzen.config", ("pydantic",), 150_000)],
    ids=lambda value: str(value),
)
def test_an_import_computes_little(tmp_path, name, over, most):
    """In calls of Python functions, which no clock changes: what this finds is work done at import."""
    assert int(python("-c", CALLS, name, *over, home=tmp_path).stdout) < most


def test_nothing_in_the_folder_of_the_library_is_made_by_an_import(tmp_path):
    before = sorted(path for path in SOURCE.rglob("*") if "__pycache__" not in path.parts)
    python("-c", "import mizzen, mizzen.config", home=tmp_path)
    assert sorted(path for path in SOURCE.rglob("*") if "__pycache__" not in path.parts) == before
    assert not (ROOT / "build.ninja").exists()


FIRST_USE = """
import sys, traceback
chain = []
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._dynamo" and not chain:
            chain.extend(frame.filename for frame in traceback.extract_stack()[:-1])
sys.meta_path.insert(0, Look())
import mizzen, torch
from torch import nn
def use(stage, **more):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "steps_per_print": 100, **more}
    engine, *_ = mizzen.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, engine(torch.ones(2, 4)).sum()
for stage in range(4):
    use(stage)[0].destroy()
assert "torch._dynamo" not in sys.modules, chain
for stage in range(4):
    engine, loss = use(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine.backward(loss)
    assert engine.step().applied
files = [name for name in chain if "importlib" not in name]
ours = max(number for number, name in enumerate(files) if "mizzen" in name)
print(*files[ours + 1:], sep="\\n")
"""


def test_the_compiler_is_loaded_by_torch_alone_and_only_for_an_optimizer(tmp_path):
    """Every `torch.optim.Optimizer` loads `torch._dynamo` when it is made, and when it steps; nothing else does."""
    chain = python("-c", FIRST_USE, home=tmp_path).stdout.splitlines()
    assert chain and all("torch" in name for name in chain), chain
    assert any(name.endswith("torch/optim/optimizer.py") for name in chain), chain
