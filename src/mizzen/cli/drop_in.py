"""Installing the drop-in as wheels are installed, with a record of every file, and removing it by that record."""

import base64
import csv
import hashlib
import io
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

from mizzen.errors import FileError, UsageError
from mizzen.launcher.variables import DROP_IN

NAME: Final = "deepspeed"
OURS: Final = "+mizzen"
"""How the versions of the drop-in end."""
WHEEL: Final = "Wheel-Version: 1.0\nGenerator: mizzen\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
SCRIPT: Final = "#!{python}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where packages and programs of an environment are."""

    packages: Path
    scripts: Path

    @classmethod
    def here(cls) -> "Place":
        """Of the Python that runs this."""
        return cls(Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("scripts")))


@dataclass(frozen=True, slots=True)
class Found:
    """A distribution of that name."""

    distribution: Distribution

    @property
    def is_ours(self) -> bool:
        """Whether it is the drop-in."""
        return self.distribution.version.endswith(OURS)

    def __str__(self) -> str:
        return f"{NAME} {self.distribution.version} ({'the drop-in' if self.is_ours else 'not the drop-in'})"


def find(place: Place) -> Found | None:
    """What is installed there under that name."""
    return next((Found(each) for each in distributions(name=NAME, path=[str(place.packages)])), None)


def install(place: Place, *, force: bool = False) -> list[str]:
    """Install it, in place of an older one; the names of its programs. The real package goes only by force."""
    found = find(place)
    if found is not None and not found.is_ours and not force:
        raise UsageError(
            f"{found} is installed in {place.packages}, and two packages cannot have one name. --force removes it; "
            "`mizzen run --drop-in` uses the drop-in for one job and leaves it alone"
        )
    with _told(place):
        if found is not None:
            _uninstall(found.distribution, place)
        if (place.packages / NAME).exists():
            raise UsageError(f"{place.packages / NAME} exists and belongs to no installed package: remove it first")
        return _copy(place)


def remove(place: Place) -> int:
    """Remove it with everything that came with it; the number of its files."""
    found = find(place)
    if found is None:
        raise UsageError(f"no package {NAME} is installed in {place.packages}: there is nothing to remove")
    if not found.is_ours:
        raise UsageError(f"{found} is installed in {place.packages}: pip uninstall {NAME} removes it")
    with _told(place):
        return _uninstall(found.distribution, place)


def _copy(place: Place) -> list[str]:
    sources = [*(DROP_IN / NAME).rglob("*.py"), *(DROP_IN / NAME).rglob("*.json"), *DROP_IN.glob("*.dist-info/*")]
    written = [_write(place.packages / source.relative_to(DROP_IN), source.read_bytes()) for source in sources]
    scripts = dict(_scripts(DROP_IN))
    for name, text in scripts.items():
        written.append(_write(place.scripts / name, text.encode()))
        written[-1].chmod(0o755)
    info = place.packages / next(DROP_IN.glob("*.dist-info")).name
    written += [_write(info / "WHEEL", WHEEL.encode()), _write(info / "INSTALLER", b"mizzen\n")]
    _write(info / "RECORD", _record(written, info / "RECORD", place).encode())
    return list(scripts)


def _scripts(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each program."""
    parser = ConfigParser(delimiters=("=",))
    parser.read(next(folder.glob("*.dist-info/entry_points.txt")), encoding="utf8")
    for name, target in parser["console_scripts"].items():
        module, _, function = target.partition(":")
        yield name, SCRIPT.format(python=sys.executable, module=module, function=function)


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _record(written: Iterable[Path], own: Path, place: Place) -> str:
    """Path, hash and size of each file, as installers of wheels write it."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for path in written:
        content = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.writerow((_relative(path, place), f"sha256={digest}", len(content)))
    rows.writerow((_relative(own, place), "", ""))
    return text.getvalue()


def _relative(path: Path, place: Place) -> str:
    return Path(os.path.relpath(path, place.packages)).as_posix()


def _uninstall(distribution: Distribution, place: Place) -> int:
    """Remove the files of a record, what Python has compiled from them, and folders that are then empty."""
    files = distribution.files
    if not files:
        raise UsageError(f"{NAME} {distribution.version} in {place.packages} has no record of its files: use pip")
    roots = [Path(os.path.realpath(root)) for root in (place.packages, place.scripts, sys.prefix)]
    paths = [Path(os.path.realpath(str(distribution.locate_file(file)))) for file in files]
    if strange := [path for path in paths if not any(path.is_relative_to(root) for root in roots)]:
        raise UsageError(f"the record of {NAME} names {strange[0]}, which is outside of this environment: use pip")
    removed = 0
    for path in paths:
        removed += path.exists()
        path.unlink(missing_ok=True)
        if path.suffix == ".py":
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
    for folder in sorted({parent for path in paths for parent in path.parents}, key=str, reverse=True):
        if folder not in roots and folder.is_relative_to(roots[0]):
            _remove_empty(folder)
    return removed


def _remove_empty(folder: Path) -> None:
    for path in (folder / "__pycache__", folder):
        with suppress(OSError):  # somebody else's files may be there
            path.rmdir()


@contextmanager
def _told(place: Place) -> Iterator[None]:
    """An error of the file system as one of ours."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{place.packages} cannot be changed: {error}") from error
