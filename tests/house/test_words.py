"""The words of the library: one class name for one module, docstrings that stand alone, no word that was retired."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from house.tree import ROOT, Module, made_up, modules

DROP_IN = ROOT / "compat" / "deepspeed"
OF_DEEPSPEED = frozenset(
    {
        *("Init", "LossScaler", "Timer"),
        *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    }
)
"""Names that scripts import from DeepSpeed, and that the drop-in has to give as classes of its own."""
OF_USERS = frozenset({"config/observe.py team"})
"""Keys of the JSON, which stay as users have them."""
RETIRED = frozenset((ROOT / "docs" / "words.md").read_text().split("```text")[1].split("```")[0].split())


def words(name: str) -> list[str]:
    """The words of a name, in lower case: `ShardedInit` and `sharded_init` have the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)]


def retired_in(name: str) -> list[str]:
    """The retired words that a name contains, as words and not as letters: `harm` has no `arm`."""
    spelled = f"_{'_'.join(words(name))}_"
    return sorted(word for word in RETIRED if f"_{word}_" in spelled)


def names(module: Module) -> Iterator[str]:
    """What is named in a file: its path, classes, functions, attributes, and the variables of module and classes."""
    yield from module.name.removesuffix(".py").split("/")
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for scope in (module.tree, *module.classes()):
        for node in scope.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def same_class_names(files: Iterable[Module]) -> list[str]:
    """Class names that are in several modules."""
    found = defaultdict(set)
    for module in files:
        for owner in module.classes():
            found[owner.name].add(module.name)
    return [f"{name}: {', '.join(sorted(places))}" for name, places in sorted(found.items()) if len(places) > 1]


def texts_that_lean(files: Iterable[Module]) -> list[str]:
    """Docstrings, of values too, that begin with "The same": one has to read the neighbour to know what."""
    return [
        f"{module.name}:{node.lineno}"
        for module in files
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and node.value.value.lstrip().startswith("The same")
    ]


def retired_names(files: Iterable[Module]) -> list[str]:
    """Names with a retired word."""
    found = {f"{module.name} {name}" for module in files for name in names(module) if retired_in(name)}
    return sorted(found - OF_USERS)


def drop_in() -> tuple[Module, ...]:
    """The files of the drop-in, named by their folder."""
    return tuple(Module(f"compat/{module.name}", module.text, module.tree) for module in modules(DROP_IN))


def test_one_class_name_is_in_one_module():
    found = same_class_names((*modules(), *drop_in()))
    assert [each for each in found if each.split(":")[0] not in OF_DEEPSPEED] == []
    assert same_class_names(modules()) == []


def test_docstrings_stand_alone():
    assert texts_that_lean((*modules(), *drop_in(), *modules(ROOT / "bench"), *modules(ROOT / "examples"))) == []


def test_retired_words_stay_away():
    assert retired_names((*modules(), *drop_in())) == []


def test_the_list_of_words_is_short_and_has_every_word_once():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", Path(ROOT / "docs" / "words.md").read_text(), re.MULTILINE)
    listed = [word for word in rows if word != "word"]
    assert 50 <= len(listed) <= 75 and len(set(listed)) == len(listed)


def test_what_is_found(tmp_path):
    made = made_up(
        tmp_path,
        {
            "a.py": 'class Place:\n    crew = 1\n    """The same as before."""\n',
            "b.py": 'class Place:\n    def at_home(self):\n        """No harm."""\n        self.keeper = 1\n',
            "pump.py": "class HideAway: ...\nclass Hidden: ...\nSEAT: int = 1\n",
        },
    )
    assert same_class_names(made) == ["Place: a.py, b.py"]
    assert texts_that_lean(made) == ["a.py:3"]
    assert retired_names(made) == [
        *("a.py crew", "b.py at_home", "b.py keeper", "pump.py HideAway", "pump.py SEAT", "pump.py pump")
    ]
