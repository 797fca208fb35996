"""Imports go down only. ROWS is the architecture: a folder or file may import the rows above it, nothing else.

Function-level imports count, and so does a module name given to `import_module`.
"""

import ast
from collections.abc import Iterable, Iterator

from house.tree import Module, made_up, modules

ROWS = [
    {"errors", "ambient", "wording"},
    {"environment"},
    {"log"},
    {"config", "progress", "files", "backport", "network"},
    {"accelerator", "hang"},
    {"monitor"},
    {"launcher", "model", "kernels"},
    {"comm"},
    {"optim", "precision", "data", "profiler", "diagnose", "watch"},
    {"plan", "offload", "checkpoint"},
    {"parallel", "rewrite"},
    {"order"},
    {"engine", "inference"},
    {"hybrid", "simulate"},
    {"autotuning"},
    {"api", "zero", "tensor", "pipe", "moe", "sequence", "checkpointing"},
    {"cli"},
]
ROW = {unit: number for number, row in enumerate(ROWS) for unit in row}


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports; a relative import is a name that starts with a dot."""
    for node in module.nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(name)):
                yield node.lineno, name
            case ast.ImportFrom(level=level, module=name):
                yield node.lineno, "." * level + (name or "")
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).split(".")[-1] in ("import_module", "__import__"):
                    yield node.lineno, name


def violations(files: Iterable[Module]) -> list[str]:
    """What points the wrong way, as `comm/bad.py:2 comm imports engine`."""
    found = []
    for module in files:
        if module.name == "__init__.py":  # the facade: the public names, from anywhere
            continue
        if module.unit not in ROW:
            found.append(f"{module.name}:1 {module.unit} is in no row")
            continue
        for line, name in imports(module):
            if trouble := wrong(module, name):
                found.append(f"{module.name}:{line} {module.unit} {trouble}")
    return found


def wrong(module: Module, name: str) -> str | None:
    """What is wrong with an import, if anything."""
    package, *path = name.split(".")
    if not package:
        return "imports relatively"
    if package != "mizzen":
        return None
    if not path:
        return "imports the facade"
    here, there = module.unit, path[0]
    if there not in ROW:
        return f"imports {there}, which is in no row"
    if here == there == "parallel":
        # Strategies do not know each other: they meet in order.py.
        mine, *inside = module.name.split("/")[1:]
        return f"imports {'.'.join(path[:2])} from {mine}" if inside and path[1:2] != [mine] else None
    return f"imports {there}" if here != there and ROW[there] >= ROW[here] else None


def test_imports_go_down_only():
    assert violations(modules()) == []


def test_the_rows_name_each_folder_once():
    assert sum(map(len, ROWS)) == len(ROW)


def test_what_is_refused(tmp_path):
    bad = made_up(
        tmp_path,
        {
            "comm/bad.py": '"""Bad."""\nfrom mizzen.engine.engine import Engine\n',
            "comm/late.py": "def f():\n    import mizzen.api\n",
            "log.py": "import mizzen\n",
            "model/face.py": "from mizzen import Engine\n",
            "model/near.py": "from . import box\nfrom .. import comm\nfrom .box import Box\n",
            "model/beside.py": "from mizzen.kernels import norm\n",
            "plan/hidden.py": "import importlib\nimportlib.import_module('mizzen.engine')\n",
            "parallel/zero/shard.py": "from mizzen.parallel.tensor.split import TensorSplit\n",
            "parallel/tensor/split.py": "from mizzen.parallel.tensor.layers import Layer\n",
            "utils.py": "import os\n",
            "files.py": "from mizzen.helpers import thing\n",
        },
    )
    assert violations(bad) == [
        "comm/bad.py:2 comm imports engine",
        "comm/late.py:2 comm imports api",
        "files.py:1 files imports helpers, which is in no row",
        "log.py:1 log imports the facade",
        "model/beside.py:1 model imports kernels",
        "model/face.py:1 model imports the facade",
        "model/near.py:1 model imports relatively",
        "model/near.py:2 model imports relatively",
        "model/near.py:3 model imports relatively",
        "parallel/zero/shard.py:1 parallel imports parallel.tensor from zero",
        "plan/hidden.py:2 plan imports engine",
        "utils.py:1 utils is in no row",
    ]


def test_what_is_allowed(tmp_path):
    good = made_up(
        tmp_path,
        {
            "__init__.py": "from mizzen.api import initialize\n",
            "engine/engine.py": "import torch\nfrom mizzen.comm.mesh import Mesh\nfrom mizzen.engine import clip\n",
            "parallel/zero/shard.py": "from mizzen.parallel.zero.slots import Slot\nfrom mizzen.plan import parts\n",
            "cli/main.py": "import mizzen.api\nfrom mizzenmast import sail\n",
        },
    )
    assert violations(good) == []
