"""The secret of nodes that are started one by one: a variable, or a file in the home folder."""

import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from mizzen.errors import UsageError
from mizzen.network import fresh_key

VARIABLE: Final = "MIZZEN_SECRET"
FILE: Final = ".mizzen_secret"
SHORTEST: Final = 16
"""Letters below which a secret can be guessed."""


def common_secret(env: Mapping[str, str], home: Path) -> str:
    """What MIZZEN_SECRET holds, else the file in the home folder, which is made where there is none."""
    if VARIABLE in env:
        return _long_enough(env[VARIABLE].strip(), VARIABLE)
    path = home / FILE
    try:
        if not path.exists():
            _make(path)
        found = path.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"{path} holds the secret of your jobs, and others can read or write it: chmod 600 it, or remove it "
                "and a new one is made"
            )
        return _long_enough(path.read_text().strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: the secret by which nodes that are started one by one know each other cannot be kept there "
            f"({error}): set {VARIABLE} to the same long random word on every node"
        ) from error


def _long_enough(secret: str, where: str) -> str:
    if len(secret) < SHORTEST:
        raise UsageError(
            f"{where} holds {len(secret)} letters, and a secret of a job has at least {SHORTEST}: use a random one, as "
            "`openssl rand -hex 32` prints"
        )
    return secret


def _make(path: Path) -> None:
    """Make the file whole or not at all: nodes that share a home may do this at the same moment."""
    descriptor, name = tempfile.mkstemp(prefix=f"{FILE}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{fresh_key()}\n")
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
