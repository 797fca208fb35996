"""The distribution is pure Python: one wheel for every platform, nothing compiled when it is installed."""

import tomllib

from house.tree import ROOT, SOURCE

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_nothing_is_compiled():
    assert not (ROOT / "setup.py").exists() and not (ROOT / "setup.cfg").exists()
    assert "ext-modules" not in PROJECT["tool"]["setuptools"]
    compiled = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".so", ".pyd", ".o"}
    assert [path for path in SOURCE.rglob("*") if path.suffix in compiled] == []


def test_types_and_licence_are_shipped():
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["mizzen"]
    assert (SOURCE / "py.typed").is_file()
    assert [(ROOT / name).is_file() for name in PROJECT["project"]["license-files"]] == [True]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_constraints_pin_exactly_and_for_every_platform():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(line.count("==") == 1 and "+" not in line for line in lines)
    assert len({line.split("==")[0].lower() for line in lines}) == len(lines)
