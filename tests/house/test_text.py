"""The words of the repository: no address of a package index, no path of one machine, a README that can be read."""

import ast
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from house.tree import ROOT, modules

HOSTS = [
    *(("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("anaconda", "org"), ("anaconda", "com")),
    *(("ghcr", "io"), ("docker", "io"), ("quay", "io"), ("nvcr", "io"), ("ngc.nvidia", "com"), ("npmjs", "org")),
]
FORBIDDEN = [*(".".join(host) for host in HOSTS), "/" + "work/"]
"""Put together from pieces, so that this file does not contain them."""
SKIPPED = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines())]


def is_skipped(path: Path) -> bool:
    """Whether .gitignore keeps a path out, for trees that are not a repository."""
    return any(fnmatch(part, pattern) for part in path.relative_to(ROOT).parts for pattern in SKIPPED)


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file that is, or could be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not is_skipped(path)]
    for path in paths:
        if path.is_file():
            content = path.read_bytes()
            if b"\0" not in content:
                yield path.relative_to(ROOT), content.decode(errors="replace")


def test_no_forbidden_words():
    found = [f"{path}: {word}" for path, text in texts() for word in FORBIDDEN if word in text]
    assert found == []


def test_lines_end_alike_and_files_end_with_one():
    for path, text in texts():
        if path.name in ("latest", "latest_universal") and "fixtures" in path.parts:
            continue  # as another program writes them
        assert "\r" not in text, f"{path} has carriage returns"
        assert not text or text.endswith("\n"), f"{path} does not end with a newline"


def test_the_readme_is_short():
    assert 0 < len((ROOT / "README.md").read_text().splitlines()) < 150


def test_every_module_says_what_is_here():
    assert [module.name for module in modules() if not ast.get_docstring(module.tree)] == []


def test_no_file_is_a_drawer_for_everything():
    parts = {part.removesuffix(".py") for module in modules() for part in module.name.split("/")}
    assert parts & {"utils", "util", "helpers", "common", "misc"} == set()
