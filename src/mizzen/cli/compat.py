"""`mizzen compat`: let pip install the drop-in into this environment, or remove it. No network is used."""

import argparse
import base64
import hashlib
import importlib
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from mizzen.cli.parser import Parser, add_help, examples, write
from mizzen.errors import FileError, UsageError
from mizzen.launcher.job import DROP_IN

NAME: Final = "deepspeed"
OURS: Final = "+mizzen"
"""How the versions of the drop-in end."""
WHEEL: Final = b"Wheel-Version: 1.0\nGenerator: mizzen\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
PACKAGES: Final = Path(sysconfig.get_path("purelib"))
"""Where packages of the Python that runs this are."""


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    parser.description = (
        "The drop-in is a small package called deepspeed, which programs that look for that name find: they then run\n"
        "on mizzen. `mizzen run --drop-in` does the same for one job and installs nothing."
    )
    parser.epilog = examples("mizzen compat install", "mizzen compat status", "mizzen compat remove")
    add_help(parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        one: Parser = commands.add_parser(name, help=summary, description=summary)
        one.set_defaults(run=run)
        return one

    add("install", "install it into this environment, with pip", run_install).add_argument(
        "--force", action="store_true", help="remove a DeepSpeed that is installed there"
    )
    add("remove", "remove it from this environment, with pip", run_remove)
    add("status", "say which package of that name this environment has", run_status)


def run_install(arguments: argparse.Namespace) -> int:
    """Install it in place of an older one, and say where. The real package goes only by force."""
    found = _installed()
    if found is not None and not _is_ours(found) and not arguments.force:
        raise UsageError(
            f"{_words(found)} is installed in {PACKAGES}, and two packages cannot have one name. --force removes it; "
            "`mizzen run --drop-in` uses the drop-in for one job and leaves it alone"
        )
    if found is None and (PACKAGES / NAME).exists():
        raise UsageError(f"{PACKAGES / NAME} exists and belongs to no installed package: remove it first")
    with TemporaryDirectory() as folder:
        wheel = str(_write_wheel(Path(folder)))
        _pip("install", "--no-index", "--no-deps", "--no-user", "--force-reinstall", wheel)
    found = _installed()
    if found is None:
        raise FileError(f"pip has installed the drop-in, but not in {PACKAGES}: see pip show {NAME}")
    write(f"installed {_words(found)} in {PACKAGES}")
    write(f"with {', '.join(sorted(each.name for each in found.entry_points))} in {sysconfig.get_path('scripts')}")
    return 0


def run_remove(_: argparse.Namespace) -> int:
    """Remove it with everything that came with it."""
    found = _installed()
    if found is None:
        raise UsageError(f"no package {NAME} is installed in {PACKAGES}: there is nothing to remove")
    if not _is_ours(found):
        raise UsageError(f"{_words(found)} is installed in {PACKAGES}: pip uninstall {NAME} removes it")
    words = _words(found)
    _pip("uninstall", "--yes", NAME)
    write(f"removed {words} from {PACKAGES}")
    return 0


def run_status(_: argparse.Namespace) -> int:
    """Say what is there."""
    found = _installed()
    write(f"{_words(found) if found else f'no package {NAME}'} in {PACKAGES}")
    return 0


def _installed() -> Distribution | None:
    importlib.invalidate_caches()  # pip is another process
    return next(iter(distributions(name=NAME, path=[str(PACKAGES)])), None)


def _is_ours(found: Distribution) -> bool:
    return found.version.endswith(OURS)


def _words(found: Distribution) -> str:
    return f"{NAME} {found.version} ({'the drop-in' if _is_ours(found) else 'not the drop-in'})"


def _write_wheel(folder: Path) -> Path:
    """A wheel of the package that lies beside this one as data, with the record of its files that wheels have."""
    info = next(DROP_IN.glob("*.dist-info"))
    sources = [*(DROP_IN / NAME).rglob("*.py"), *(DROP_IN / NAME).rglob("*.json"), *info.iterdir()]
    contents = {source.relative_to(DROP_IN).as_posix(): source.read_bytes() for source in sources}
    contents[f"{info.name}/WHEEL"] = WHEEL
    record = [f"{info.name}/RECORD,,\n"]
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record.append(f"{name},sha256={digest},{len(content)}\n")
    path = folder / f"{info.name.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in (contents | {f"{info.name}/RECORD": "".join(record).encode()}).items():
            wheel.writestr(name, content)
    return path


def _pip(*words: str) -> None:
    """Let the pip of this environment do something, whatever the user's own settings of pip say."""
    if find_spec("pip") is None:
        raise UsageError(
            f"{sys.executable} has no pip, which installs and removes the drop-in: add it with `python -m ensurepip`, "
            "or `uv pip install pip` where uv has made the environment; `mizzen run --drop-in` does without"
        )
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-input", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = (ran.stderr or ran.stdout).strip() or f"it ended with {ran.returncode}"
        raise FileError(f"pip {words[0]} of the drop-in in {PACKAGES} failed: {said}")
