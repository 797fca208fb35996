"""The same faults done to torch.distributed.checkpoint, so that the table shows both."""

import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from faults.checks import Budget, Result
from faults.malice import Bomb
from faults.saves import tensors_of


def save(folder: Path, number: int) -> None:
    """One file for each tensor, as many ranks would write."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save(tensors_of(number), storage_writer=writer, no_dist=True)


def load(folder: Path) -> dict[str, torch.Tensor] | str:
    """What is loaded, or the name of the error."""
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
    try:
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    except BaseException as error:  # noqa: BLE001  whatever it is
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


def is_save(found: dict[str, torch.Tensor], number: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in tensors_of(number).items())


def in_child(do: Callable[[], None]) -> None:
    """Run something in a process that may die of it."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def kill(place: Path, budget: Budget) -> Result:
    """SIGKILL after every flush of a second save of the same folder."""
    result = Result("kill -9, second save of a folder")
    for at in range(1, 10):
        folder = place / str(at)
        save(folder, 1)

        def cut(folder: Path = folder, at: int = at) -> None:
            flush, count = os.fsync, 0

            def counted(descriptor: int) -> None:
                nonlocal count
                flush(descriptor)
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = counted
            save(folder, 2)

        in_child(cut)
        found = load(folder)
        trouble = ""
        if isinstance(found, str):
            trouble = f"neither is left: {found}"
        elif not (is_save(found, 1) or is_save(found, 2)):
            trouble = "a mixture of both, without a word"
        result.note(trouble, f"after flush {at}")
    return result


def flips(place: Path, budget: Budget) -> Result:
    """One bit of the data turned over."""
    result, chance = Result("one flipped bit"), random.Random(budget.seed)
    folder = place / "flips"
    save(folder, 1)
    files = sorted(folder.glob("*.distcp"))
    for _ in range(200):
        path = chance.choice(files)
        data = bytearray(path.read_bytes())
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        found = load(folder)
        wrong = not isinstance(found, str) and not is_save(found, 1)
        result.note("wrong numbers, without a word" if wrong else "", f"{path.name} byte {at}")
        save(folder, 1)
    return result


def shortened(place: Path, budget: Budget) -> Result:
    """Data cut off."""
    result = Result("cut off, gone")
    save(place / "good", 1)
    name = sorted(path.name for path in (place / "good").glob("*.distcp"))[0]
    size = (place / "good" / name).stat().st_size
    for part in range(17):
        folder = Path(shutil.copytree(place / "good", place / f"{part}"))
        if part == 16:
            (folder / name).unlink()
        else:
            os.truncate(folder / name, size * part // 16)
        found = load(folder)
        result.note("" if isinstance(found, str) or is_save(found, 1) else "wrong numbers, without a word", str(part))
    return result


def disk_error(place: Path, budget: Budget) -> Result:
    """A limit on the size of files while a folder is saved again."""
    result = Result("disk full while a folder is saved again")
    for limit in (1, 100, 3000):
        folder = place / str(limit)
        save(folder, 1)

        def limited(folder: Path = folder, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            save(folder, 2)

        in_child(limited)
        found = load(folder)
        fine = not isinstance(found, str) and (is_save(found, 1) or is_save(found, 2))
        result.note("" if fine else "the checkpoint before is gone", f"{limit} bytes")
    return result


def malice(place: Path, budget: Budget) -> Result:
    """Metadata that runs a command."""
    result = Result("malicious folders")
    folder = place / "bad"
    save(folder, 1)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    here = Path.cwd()
    os.chdir(place)
    try:
        load(folder)
    finally:
        os.chdir(here)
    result.note("a command was run" if (place / "CANARY").exists() else "", ".metadata")
    return result
