"""Where a rank is: step, unit, phase and last collective, in a small record that another process can read at any time.

Writing costs about two microseconds and never waits; what to conclude from a record is the reader's business (the
supervisor of `launcher/`, the watch of `comm/`). Nothing here imports torch.
"""

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mizzen.ambient import AMBIENT
from mizzen.environment import Switches, World, environ
from mizzen.log import warn_once

# [Note: two slots]
# A rank may be killed in the middle of a write, and the stores of one processor may reach another out of order. So
# records go to two slots in turn, each with its own checksum, and a reader takes the newest slot whose checksum holds:
# a torn slot is never taken for a record, and the one before it is still there. But a reader is no faster than a
# writer. While it copies the file, a rank that writes without a pause may come to both slots, and neither copy holds;
# such a reader looks again. A dead rank leaves at most one slot torn, so that looking again is never in vain.
_FIELDS: Final = struct.Struct("<QqqqQ?dd64s32s48s64s47s")
_CHECKSUM: Final = struct.Struct("<I")
_SLOT: Final = 320
_MAGIC: Final = b"mizzen-1"
_STOP: Final = len(_MAGIC)
"""Offset of the one byte that is written by the reader: a request to save and stop."""
_SIZE: Final = 3 * _SLOT
_LOOKS: Final = 100
"""How often a reader looks for a whole slot. After so many there is none yet: the rank has only just made its file."""
STACKS: Final = signal.SIGRTMIN + 7 if "SIGRTMIN" in vars(signal) else signal.SIGUSR2
"""The signal at which a rank of a launched job writes down the stacks of its threads, whatever it is doing."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where one rank was when it last wrote."""

    writes: int
    """How many records came before this one: unchanged means that the rank has not moved."""
    pid: int
    rank: int
    step: int
    """Finished optimizer steps; -1 before the engine has said anything."""
    number: int
    """Which collective of its group the last one is, counted from 1."""
    waiting: bool
    """Whether the rank is waiting in it now, and has been for more than a moment."""
    entered: float
    """When it came there, as `time.monotonic()`, which is one clock for all processes of a host."""
    hang_timeout: float
    """Seconds that it may wait there before the job counts as hung, as its configuration says; 0 never counts."""
    unit: str
    phase: str
    collective: str
    group: str
    role: str = ""
    """Which part of the model it has, such as `stage 1 of 2, tensor rank 0`; empty where all have the same."""


class Progress:
    """The record of this process. One thread or several may write; the last word counts."""

    def __init__(self, path: Path | None = None, *, rank: int = 0) -> None:
        self._memory = _fresh_file(path) if path is not None else mmap.mmap(-1, _SIZE)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._rank = rank
        self._writes = 0
        self._step = -1
        self._unit = self._phase = self._collective = self._group = self._role = b""
        self._number, self._waits, self._entered, self._hang_timeout = 0, 0, 0.0, 0.0
        self._memory[: len(_MAGIC)] = _MAGIC
        self.at()

    def at(self, *, step: int | None = None, unit: str | None = None, phase: str | None = None) -> None:
        """Note where the rank is now; what is not given stays as it was."""
        with self._lock:
            self._move(step, unit, phase)
            self._write()

    def _move(self, step: int | None, unit: str | None, phase: str | None) -> None:
        if step is not None:
            self._step = step
        if unit is not None:
            self._unit = unit.encode()
        if phase is not None:
            self._phase = phase.encode()

    def set_hang_timeout(self, seconds: float) -> None:
        """Note how long a rank may wait; the supervisor acts on it."""
        with self._lock:
            self._hang_timeout = seconds
            self._write()

    def set_role(self, role: str) -> None:
        """Note who this rank is among those that have different parts of a model."""
        with self._lock:
            self._role = role.encode()
            self._write()

    def enter(
        self,
        number: int,
        collective: str,
        group: str,
        *,
        step: int | None = None,
        unit: str | None = None,
        phase: str | None = None,
    ) -> None:
        """Note that the rank comes to a collective, and where it is."""
        with self._lock:
            self._move(step, unit, phase)
            self._number, self._entered = number, time.monotonic()
            self._collective, self._group = collective.encode(), group.encode()
            self._write()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the rank has to wait in it for more than a moment, until it comes out."""
        self._wait(1)
        try:
            yield
        finally:
            self._wait(-1)

    def _wait(self, more: int) -> None:
        with self._lock:
            self._waits += more  # of several threads, one may come out while another still waits
            self._write()

    @property
    def record(self) -> Record:
        """What a reader would see now."""
        found = _newest(self._memory[:])
        if found is None:
            raise AssertionError("a progress record that was just written cannot be read")
        return found

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the supervisor wants this rank to save and stop."""
        return self._memory[_STOP] != 0

    def ask_self_to_stop(self) -> None:
        """Note a request that has reached the rank itself."""
        self._memory[_STOP] = 1

    @staticmethod
    def read(path: Path) -> Record | None:
        """The newest whole record of another process; None when there is none yet."""
        try:
            looks = (_newest(path.read_bytes()) for _ in range(_LOOKS))
            return next(filter(None, looks), None)
        except FileNotFoundError:
            return None

    @staticmethod
    def ask_to_stop(path: Path) -> None:
        """Ask the rank that writes this record to save and stop; it looks when it can."""
        with path.open("r+b") as file:
            file.seek(_STOP)
            file.write(b"\x01")

    @staticmethod
    def was_asked_to_stop(path: Path) -> bool:
        """Whether the rank that wrote this record was asked, or has taken up what another rank was asked."""
        try:
            return path.read_bytes()[_STOP : _STOP + 1] == b"\x01"
        except FileNotFoundError:
            return False

    def _write(self) -> None:
        fields = _FIELDS.pack(
            self._writes,
            self._pid,
            self._rank,
            self._step,
            self._number,
            self._waits > 0,
            self._entered,
            self._hang_timeout,
            self._unit,
            self._phase,
            self._collective,
            self._group,
            self._role,
        )
        start = _SLOT * (1 + self._writes % 2)
        self._memory[start : start + len(fields) + _CHECKSUM.size] = fields + _CHECKSUM.pack(zlib.crc32(fields))
        self._writes += 1


def record_path(folder: Path, local_rank: int) -> Path:
    """Where the rank with this number on its host keeps its record."""
    return folder / f"rank-{local_rank}"


def stacks_path(folder: Path, local_rank: int) -> Path:
    """Where that rank writes its stacks when it is asked for them."""
    return folder / f"stacks-{local_rank}"


def announce_run(folder: Path) -> None:
    """Tell the launcher where this run keeps its records, so that it can note there how an attempt ended."""
    if (attempt := Switches.read(environ()).progress) is not None:
        (Path(attempt) / "run").write_text(str(folder.absolute()))


def announced_run(attempt: Path) -> Path | None:
    """Where the ranks of this attempt keep their records; None when none of them has said."""
    try:
        return Path((attempt / "run").read_text())
    except FileNotFoundError:
        return None


def get_progress() -> Progress:
    """The record of this process: in the launcher's folder when it gave one, otherwise in private memory."""
    if AMBIENT.progress is None:
        with AMBIENT.opening:
            AMBIENT.progress = AMBIENT.progress or _open()
    progress: Progress = AMBIENT.progress
    return progress


def _open() -> Progress:
    world = World.detect(environ())
    folder = Switches.read(environ()).progress
    if folder is not None:
        path = record_path(Path(folder), world.local_rank)
        try:
            # Before the record: a supervisor that finds one may ask for stacks.
            _write_stacks_to(stacks_path(Path(folder), world.local_rank))
            return Progress(path, rank=world.rank)
        except OSError as error:
            warn_once(
                f"MIZZEN_PROGRESS: {path} cannot be written ({error}): the launcher will not see this rank's progress"
            )
    return Progress(rank=world.rank)


def _write_stacks_to(path: Path) -> None:
    """Answer `STACKS` from now on; the handler is the interpreter's own and needs no lock of it."""
    path.unlink(missing_ok=True)
    faulthandler.register(STACKS, file=path.open("w"), all_threads=True)


def _fresh_file(path: Path) -> mmap.mmap:
    """A new file, mapped. The file of an earlier attempt is unlinked, not written over: it may still be mapped."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, bytes(_SIZE))  # a file with holes would end the rank where memory is full
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def _newest(data: bytes) -> Record | None:
    if data[: len(_MAGIC)] != _MAGIC:
        return None
    return max(filter(None, (_slot(data, 1), _slot(data, 2))), key=lambda record: record.writes, default=None)


def _slot(data: bytes, number: int) -> Record | None:
    fields = data[_SLOT * number : _SLOT * number + _FIELDS.size]
    checksum = data[_SLOT * number + _FIELDS.size :][: _CHECKSUM.size]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(fields):
        return None
    *numbers, unit, phase, collective, group, role = _FIELDS.unpack(fields)
    words = (text.rstrip(b"\0").decode(errors="ignore") for text in (unit, phase, collective, group, role))
    return Record(*numbers, *words)
