"""Small checkpoints that would take endless time or memory, and files in their folders that are none.

Run as a program with a folder, it opens and imports each bomb under a limit of time, and prints what happened.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from faults.checks import Result, World
from faults.saves import judge, save
from mizzen.checkpoint import save as protocol
from mizzen.errors import MizzenError

SECONDS = 30
"""How long one bomb may take on a busy machine."""
KILOBYTES = 300_000
"""By how much memory may grow over all of them."""
BOMBS = (
    *("laughs", "doubled", "doubled as a key", "doubled buffer names", "doubled stage", "copies", "hash bomb"),
    *("8000 arrays of the same bytes", "alike in a set", "alike in a frozenset", "alike tuples", "alike as keys"),
    *("400 tensors over one storage", "400 tensors of the client over one storage", "long storage keys", "long names"),
    *("a file of holes", "expanded", "zip bomb"),
)


class TooLong(BaseException):
    """The limit of time has passed."""


@contextmanager
def limited(seconds: int):
    """Raise when something takes too long."""

    def end(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def watch(place: Path) -> tuple[int, list[str], int]:
    """Import every bomb; how many there were, what went wrong, and by how many kilobytes memory grew."""
    from mizzen.checkpoint.convert import convert
    from mizzen.checkpoint.open import open_source
    from unit.checkpoint.foreign.malice import CASES

    wrong, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, name in enumerate(BOMBS):
        folder = place / str(number)
        folder.mkdir()
        CASES[name](folder)
        alone = folder / "model.pt"
        try:
            with limited(SECONDS):
                convert(open_source(alone if alone.exists() else folder), place / "imported", f"tag{number}")
            wrong.append(f"{name}: imported without a word")
        except MizzenError:
            pass
        except TooLong:
            wrong.append(f"{name}: not done after {SECONDS} s")
        except BaseException as error:  # noqa: BLE001  whatever it is, it is not ours
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return len(BOMBS), wrong, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def bombs(place: Path) -> Result:
    """Checkpoints of others that share, collide, or have holes: an error of ours, in time, within memory."""
    result = Result("bombs: values that share, collide, or have holes")
    done = subprocess.run(
        [sys.executable, __file__, str(place)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    if done.returncode:
        result.note(f"the process ended with {done.returncode}: {done.stderr[-2000:]}", "all")
        return result
    count, wrong, grown = json.loads(done.stdout.splitlines()[-1])
    result.tried = count
    result.failures += wrong
    if grown > KILOBYTES:
        result.failures.append(f"memory grew by {grown} kB")
    return result


def hollow(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


STRANGE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
    "file of a terabyte": hollow,
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "process of no number": lambda path: path.write_text(json.dumps({"process": "x:y", "run": []})),
}
PLACES = (
    *("step/0123456789abcdef.saving", "other/0123456789abcdef.saving", "latest", "other/manifest.json"),
    *("other/0123456789abcdef-00000.safetensors", "latest.0123456789abcdef.new", "other"),
)
"""Where such a file is put, below a folder of checkpoints."""


def strange_files(place: Path) -> Result:
    """A save and a look at a folder with a file in it that is no file."""
    result = Result("pipes, devices, holes and folders where files should be")
    for number, (kind, make) in enumerate(STRANGE.items()):
        for where in PLACES:
            root = place / str(number) / where.replace("/", "-")
            save(root, 1)
            path = root / where
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            trouble = ""
            try:
                make(path)
                with limited(SECONDS):
                    save(root, 2)
                    trouble = judge(root, {2})
            except TooLong:
                trouble = f"not done after {SECONDS} s"
            except Exception as error:  # noqa: BLE001  whatever it is: the save should have gone well
                trouble = f"{type(error).__name__}: {error}"
            result.note(trouble, f"{kind} as {where}")
    return result


def apart(root: str, how: str, validation: str) -> str:
    """On each rank: a save to a folder that the other rank calls otherwise. What it said, or nothing."""
    rank = torch.distributed.get_rank()
    own = {
        "clock": f"{root}/12:00:0{rank}",
        "link": f"{root}/{('here', 'link')[rank]}/checkpoints",
        "slash": f"{root}/checkpoints{'//' * rank}",
        "disks": f"{root}/disk{rank}",
        "mounts": f"{root}/checkpoints",
    }[how]
    if how in ("disks", "mounts"):
        protocol.place_of = lambda folder: "/checkpoints" if how == "disks" else f"/mount{rank}"
    try:
        save(Path(own), 1, rank=rank, size=2, validation=validation)
    except MizzenError as error:
        return str(error)
    return ""


FOLDERS = {
    ("clock", "Warn"): "12:00:00",
    ("clock", "Ignore"): "12:00:00",
    ("clock", "Fail"): None,
    ("link", "Fail"): "here/checkpoints",
    ("slash", "Fail"): "checkpoints",
    ("mounts", "Fail"): "checkpoints",
    ("disks", "Warn"): None,
}
"""How ranks call their folders, and the rule; then where the checkpoint is, or None where none may be."""


def folders(world: World, place: Path, times: int = 1) -> Result:
    """Ranks that are given different folders, or one folder by different names."""
    result = Result("ranks that name different folders")
    for number in range(times):
        for (how, validation), where in FOLDERS.items():
            root = place / f"{how}-{validation}-{number}"
            (root / "here").mkdir(parents=True)
            (root / "link").symlink_to(root / "here")
            said = world(2).run(apart, str(root), how, validation)
            manifests = [*root.rglob("manifest.json")]
            if where is None:
                trouble = "" if all(said) and not manifests else f"a half checkpoint: {said}"
            else:
                trouble = judge(root / where, {1}) or ("" if said == ["", ""] else f"refused: {said}")
                trouble = trouble or ("" if len({path.resolve() for path in manifests}) == 1 else "more than one")
            result.note(trouble, f"{how}, {validation}")
    return result


if __name__ == "__main__":
    print(json.dumps(watch(Path(sys.argv[1]))))
