"""Every kind of fault as one function: how often it was tried, and what went wrong."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from faults.powercut import Disk, restore
from faults.saves import TAG, cut_short, judge, save, tensors_of, tidy
from mizzen.checkpoint.read import Reader
from mizzen.errors import CheckpointError, MizzenError
from mizzen.files import watched
from pool import RankFailed

World = Callable[..., Any]


@dataclass
class Result:
    """One row of the table."""

    name: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, trouble: str, where: str) -> None:
        """One more try, and what was wrong with it."""
        self.tried += 1
        if trouble:
            self.failures.append(f"{where}: {trouble}")


@dataclass(frozen=True)
class Budget:
    """How much is tried: all of it, or so many of each kind, chosen by a seed."""

    most: int | None
    seed: int

    def some(self, all_of: Iterable[Any], share: int = 1) -> list[Any]:
        """Some of the possible tries."""
        found = list(all_of)
        if self.most is None or len(found) <= self.most * share:
            return found
        return sorted(random.Random(self.seed).sample(found, self.most * share))


def kill(world: World, place: Path, budget: Budget, *, beside: bool, again: bool) -> Result:
    """SIGKILL before every file operation of a save on two ranks."""
    result = Result(
        f"kill -9, {'second' if again else 'first'} save of a tag, {'beside training' if beside else 'waiting'}"
    )
    counts = world(2).run(cut_short, str(place / "count"), 1, 0, None, beside)
    points = [(victim, at) for victim, count in enumerate(counts) for at in range(count)]
    for victim, at in budget.some(points):
        root = place / f"{victim}-{at}"
        if again:
            world(2).run(cut_short, str(root), 1, 0, None, False)
        with suppress(RankFailed), redirect_stdout(StringIO()):
            world(2).run(cut_short, str(root), 2, victim, at, beside)
        trouble = judge(root, {1, 2} if again else {None, 2})
        if not trouble:
            world(2).run(cut_short, str(root), 3, 0, None, False)
            trouble = judge(root, {3}) or tidy(root)
        result.note(trouble, f"rank {victim} before operation {at}")
        shutil.rmtree(root)
    return result


def power_cut(place: Path, budget: Budget) -> Result:
    """Everything that was not flushed is lost, at every point of a first and of a second save."""
    result = Result("power cut: what was not flushed is lost")
    root = place / "disk"
    root.mkdir()
    for number in (1, 2):
        disk = Disk(root)
        with watched(disk):
            save(root, number)
        disk.note()
        if number == 1:
            first = disk
        else:  # what was durable before this save still is
            disk = replay(first, root, place / "again")
        allowed = {None, 1} if number == 1 else {1, 2}
        for at, state in budget.some(list(enumerate(disk.states)), 3):
            for which, files in zip(("flushed", "visible"), state, strict=True):
                target = restore(files, disk.root, place / f"cut-{number}-{at}-{which}")
                result.note(judge(target, allowed), f"save {number}, point {at}, {which}")
    return result


def replay(first: Disk, root: Path, place: Path) -> Disk:
    """A first and a second save on one watched disk; only the states of the second are kept."""
    place.mkdir()
    disk = Disk(place)
    with watched(disk):
        save(place, 1)
        disk.note()
        disk.states.clear()
        save(place, 2)
    disk.note()
    return disk


def load_all(folder: Path, number: int = 1) -> str | None:
    """What an attempt to read everything says; None when all is read, and right."""
    try:
        with Reader(folder) as reader:
            for name, tensor in tensors_of(number).items():
                if not bool((reader.whole("model", name) == tensor).all()):
                    return "WRONG NUMBERS, without a word"
            reader.whole("step", "weight.0")
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a foreign error is what is looked for
        return f"FOREIGN {type(error).__name__}: {error}"
    return None


def verdict_on_damage(said: str | None, file: str) -> str:
    """Empty when damage was found, and named."""
    if said is None:
        return "not detected"
    if said.startswith(("WRONG", "FOREIGN")):
        return said
    return "" if file in said else f"the file is not named: {said}"


def flips(place: Path, budget: Budget, count: int) -> Result:
    """One bit of any file turned over."""
    result, chance = Result("one flipped bit"), random.Random(budget.seed)
    save(place, 1)
    folder = place / TAG
    files = sorted(folder.iterdir())
    for _ in range(count):
        path = chance.choices(files, [each.stat().st_size for each in files])[0]
        data = bytearray(path.read_bytes())
        at, bit = chance.randrange(len(data)), chance.randrange(8)
        kept = data[at]
        data[at] ^= 1 << bit
        path.write_bytes(data)
        result.note(verdict_on_damage(load_all(folder), path.name), f"{path.name} byte {at} bit {bit}")
        data[at] = kept
        path.write_bytes(data)
    return result


def shortened(place: Path) -> Result:
    """Files cut off, empty, gone, exchanged, or of another run."""
    result = Result("cut off, empty, gone, exchanged, of another run")
    save(place / "a", 1)
    save(place / "b", 2)
    good = place / "a" / TAG
    data, manifest = next(good.glob("*.safetensors")).name, "manifest.json"
    other = next((place / "b" / TAG).glob("*.safetensors"))

    def damage(title: str, file: str, change: Callable[[Path], None]) -> None:
        folder = Path(shutil.copytree(good, place / "copy"))
        change(folder)
        result.note(verdict_on_damage(load_all(folder), file), title)
        shutil.rmtree(folder)

    for file in (data, manifest):
        size = (good / file).stat().st_size
        for length in (*(size * part // 16 for part in range(16)), size - 1):
            damage(f"{file} at {length}", file, lambda folder, f=file, n=length: os.truncate(folder / f, n))
        damage(f"{file} gone", file, lambda folder, f=file: (folder / f).unlink())
        damage(f"{file} longer", file, lambda folder, f=file: (folder / f).open("ab").write(b"x"))
    damage("data of another run", data, lambda folder: shutil.copy(other, folder / data))
    damage(
        "manifest of another run", other.name, lambda folder: shutil.copy(other.parent / manifest, folder / manifest)
    )
    damage("exchanged", manifest, exchange)
    return result


def exchange(folder: Path) -> None:
    """The two files of a folder under each other's names."""
    one, other = sorted(folder.iterdir())
    one.rename(folder / "kept")
    other.rename(one)
    (folder / "kept").rename(other)


def disk_errors(place: Path, budget: Budget) -> Result:
    """The system refuses an operation: every one of them, for every reason."""
    result = Result("disk full, read-only, input/output error")
    seen: list[str] = []
    save(place / "count", 1)
    with watched(lambda operation, path: seen.append(operation)):
        save(place / "count", 2)
    reasons = {errno.ENOSPC: "No space", errno.EROFS: "Read-only", errno.EIO: "Input/output"}
    for at, code in budget.some([(at, code) for at in range(len(seen)) for code in reasons], 4):
        root, count = place / f"{at}-{code}", 0
        save(root, 1)

        def fail(operation: str, path: Path, at: int = at, code: int = code) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                raise OSError(code, os.strerror(code))

        said = ""
        with watched(fail):
            try:
                save(root, 2)
            except MizzenError as error:
                said = str(error)
            except Exception as error:  # noqa: BLE001  a foreign error is what is looked for
                result.note(f"FOREIGN {type(error).__name__}: {error}", f"operation {at}")
                continue
        trouble = judge(root, {1, 2} if said else {2})
        if not trouble and said and seen[at] == "write" and code == errno.ENOSPC and "free" not in said:
            trouble = f"no room is named: {said}"
        result.note(trouble, f"{seen[at]} (operation {at}), {os.strerror(code)}")
        shutil.rmtree(root)
    return result


def short_writes(place: Path) -> Result:
    """A limit on the size of files: the system takes a part of a write, and then none."""
    result = Result("short writes, by a limit on the size of files")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1, 100, 3000, 20_000, 60_000):
        root = place / str(limit)
        save(root, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        said = ""
        try:
            save(root, 2)
        except MizzenError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        result.note(judge(root, {1}) or ("" if said else "no error"), f"{limit} bytes")
    return result


def malice(place: Path) -> Result:
    """Folders made to do harm, loaded in a process that is watched."""
    result = Result("malicious folders")
    save(place / "good", 1)
    (place / "bad").mkdir()
    program = Path(__file__).with_name("malice.py")
    done = subprocess.run(
        [sys.executable, str(program), str(place / "good" / TAG), str(place / "bad")],
        capture_output=True,
        text=True,
        check=False,
        cwd=place,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    if done.returncode:
        result.note(f"the process ended with {done.returncode}: {done.stderr[-2000:]}", "all")
        return result
    count, wrong, grown = json.loads(done.stdout.splitlines()[-1])
    result.tried = count
    result.failures += wrong
    if grown > 200_000:
        result.failures.append(f"memory grew by {grown} kB")
    return result


def timed(do: Callable[[], Result]) -> Result:
    """A check, with the time that it took."""
    started = time.perf_counter()
    result = do()
    result.seconds = time.perf_counter() - started
    return result
