"""The same faults done to other systems, so that the table shows them beside ours."""

import io
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from faults.checks import Budget, Result
from faults.malice import Bomb
from faults.saves import tensors_of

Found = dict[str, torch.Tensor] | str


class Peer(Protocol):
    """Another system: saves the tensors of `tensors_of(number)`, and loads what a folder holds."""

    title: str
    data: str
    """The files that hold numbers, as a pattern."""
    pickled: str
    """A file that is unpickled in a load."""

    def prepare(self) -> None: ...

    def save(self, folder: Path, number: int) -> None: ...

    def load(self, folder: Path) -> dict[str, torch.Tensor]: ...


def apart(peer: Peer, do: Callable[[], object]) -> tuple[int, Callable[[], object]]:
    """Do something in a process that may die of it, without a word: the process, once it has begun, and its answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            peer.prepare()
            os.write(writing, b"!")
            answer = io.BytesIO()
            torch.save(do(), answer)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer.getvalue())
        finally:
            os._exit(0)
    os.close(writing)
    if os.read(reading, 1) != b"!":
        raise RuntimeError(f"{peer.title} could not be prepared")

    def wait() -> object:
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        return torch.load(io.BytesIO(answer)) if answer else None

    return pid, wait


def save(peer: Peer, folder: Path, number: int) -> None:
    _, wait = apart(peer, lambda: peer.save(folder, number))
    wait()


def loaded(peer: Peer, folders: Iterable[Path]) -> list[Found]:
    """What is loaded of each folder, or the name of the error, all in one process."""

    def load(folder: Path) -> Found:
        try:
            return peer.load(folder)
        except BaseException as error:  # noqa: BLE001  whatever it is
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    _, wait = apart(peer, lambda: [load(folder) for folder in folders])
    return wait() or []


def is_save(found: dict[str, torch.Tensor], number: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in tensors_of(number).items())


def kill(peer: Peer, place: Path, budget: Budget) -> Result:
    """SIGKILL at moments spread over a second save of the same folder."""
    result, count = Result("kill -9, second save of a folder"), 16
    good, timed = place / "good", place / "timed"
    save(peer, good, 1)
    shutil.copytree(good, timed)
    _, wait = apart(peer, lambda: peer.save(timed, 2))
    began = time.monotonic()
    wait()
    whole = time.monotonic() - began
    moments = budget.some(range(count))
    folders = [Path(shutil.copytree(good, place / str(at))) for at in moments]
    for at, folder in zip(moments, folders, strict=True):
        pid, wait = apart(peer, lambda folder=folder: peer.save(folder, 2))
        time.sleep(whole * at / count)
        os.kill(pid, signal.SIGKILL)
        wait()
    for at, found in zip(moments, loaded(peer, folders), strict=True):
        trouble = ""
        if isinstance(found, str):
            trouble = f"neither is left: {found}"
        elif not (is_save(found, 1) or is_save(found, 2)):
            trouble = "a mixture of both, without a word"
        result.note(trouble, f"at {at} of {count}")
    return result


def flips(peer: Peer, place: Path, budget: Budget) -> Result:
    """One bit of the data turned over."""
    result, chance = Result("one flipped bit"), random.Random(budget.seed)
    save(peer, place / "good", 1)
    count = 200 if budget.most is None else budget.most
    files = sorted((place / "good").glob(peer.data))
    bits = [(path, chance.randrange(8 * path.stat().st_size)) for path in chance.choices(files, k=count)]

    def flipped() -> Iterator[Path]:
        for path, bit in bits:
            good = path.read_bytes()
            data = bytearray(good)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            yield place / "good"
            path.write_bytes(good)

    for (path, bit), found in zip(bits, loaded(peer, flipped()), strict=True):
        wrong = not isinstance(found, str) and not is_save(found, 1)
        result.note("wrong numbers, without a word" if wrong else "", f"{path.name} byte {bit // 8}")
    return result


def shortened(peer: Peer, place: Path, budget: Budget) -> Result:
    """Data cut off."""
    result, good = Result("cut off, gone"), place / "good"
    save(peer, good, 1)
    name = min(good.glob(peer.data)).relative_to(good)
    size = (good / name).stat().st_size
    parts = budget.some(range(17))
    folders = [Path(shutil.copytree(good, place / str(part))) for part in parts]
    for part, folder in zip(parts, folders, strict=True):
        if part == 16:
            (folder / name).unlink()
        else:
            os.truncate(folder / name, size * part // 16)
    for part, found in zip(parts, loaded(peer, folders), strict=True):
        fine = isinstance(found, str) or is_save(found, 1)
        result.note("" if fine else "wrong numbers, without a word", f"{part} of 16")
    return result


def disk_error(peer: Peer, place: Path, _: Budget) -> Result:
    """A limit on the size of files while a folder is saved again."""
    result, good = Result("disk full while a folder is saved again"), place / "good"
    save(peer, good, 1)
    limits = (1, 100, 3000)
    folders = [Path(shutil.copytree(good, place / str(limit))) for limit in limits]
    for limit, folder in zip(limits, folders, strict=True):

        def limited(folder: Path = folder, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            peer.save(folder, 2)

        _, wait = apart(peer, limited)
        wait()
    for limit, found in zip(limits, loaded(peer, folders), strict=True):
        fine = not isinstance(found, str) and (is_save(found, 1) or is_save(found, 2))
        result.note("" if fine else "the checkpoint before is gone", f"{limit} bytes")
    return result


def malice(peer: Peer, place: Path, _: Budget) -> Result:
    """A file that runs a command."""
    result, good = Result("malicious folders"), place / "good"
    save(peer, good, 1)
    names = [path.relative_to(good) for path in good.glob(peer.pickled)]
    folders = [Path(shutil.copytree(good, place / str(number))) for number in range(len(names))]
    for name, folder in zip(names, folders, strict=True):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        with inside(folder):
            loaded(peer, [folder])
        result.note("a command was run" if (folder / "CANARY").exists() else "", name.name)
    return result


@contextmanager
def inside(place: Path) -> Iterator[None]:
    """Work in a folder."""
    here = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(here)


FAULTS = (kill, flips, shortened, disk_error, malice)
