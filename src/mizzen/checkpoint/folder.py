"""A folder of checkpoints: which tags are committed, what dead saves have left, what to keep.

Only files whose names this library gives are ever removed, and only here.
"""

import errno
import json
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from mizzen.checkpoint.manifest import Manifest, is_plain
from mizzen.checkpoint.read import MANIFEST, read_manifest
from mizzen.comm.rank_status import is_elsewhere, is_gone, this_process
from mizzen.errors import CheckpointError, FileError, UsageError
from mizzen.files import (
    BESIDE,
    commit_text,
    fsync_folder,
    list_folder,
    make_folder,
    read_head,
    remove,
    replace,
    write_bytes,
)
from mizzen.log import get_logger

LATEST: Final = "latest"
"""The file that names the tag which a load without one takes."""
LEASE: Final = 3600.0
"""Seconds after which a save on another machine, of the run that saves now, is one of an attempt that died."""
_DATA: Final = re.compile(r"([0-9a-f]{16})-\d{5,}\.safetensors")
_CLAIMS: Final = re.compile(rb'"run":"([^"]+)","tag":"[^"]*","step":\d+,"created":"([^"]+)"')
_HEAD: Final = 1 << 14
"""Bytes of a manifest in which these are found."""
_MOST: Final = 4096
"""Bytes that are read of a mark, or of `latest`."""
_MARK: Final = re.compile(r"([0-9a-f]{16})\.saving")
_BESIDE: Final = re.compile(rf"{re.escape(MANIFEST)}\.[0-9a-f]+{re.escape(BESIDE)}")
_LATEST_BESIDE: Final = re.compile(rf"{LATEST}\.[0-9a-f]+{re.escape(BESIDE)}")
"""What a manifest and `latest` are called before they have their names."""


@dataclass(frozen=True, slots=True)
class Committed:
    """One checkpoint that exists."""

    folder: Path
    manifest: Manifest

    @property
    def age(self) -> tuple[str, int, str]:
        """Sorts what was committed earlier before what was later; a run that went back has its later steps earlier."""
        return self.manifest.created, self.manifest.step, self.folder.name


def data_name(save: str, rank: int) -> str:
    """The name of one rank's file."""
    return f"{save}-{rank:05d}.safetensors"


def check_tag(tag: str) -> str:
    """A tag is the name of a folder, and not a way out of one."""
    if not is_plain(tag):
        raise UsageError(
            f"the tag {str(tag)[:80]!r} cannot be used: a tag is a plain name of letters, digits, '.', '_' and '-' "
            "that begins with a letter or digit"
        )
    if tag == LATEST:
        raise UsageError(
            f"the tag {tag!r} cannot be used: a file beside the checkpoints is called so. A load without a "
            "tag takes the one that it names"
        )
    return tag


def read_latest(root: Path) -> str | None:
    """The tag that the file `latest` names, if it names one."""
    try:
        tag = read_head(root / LATEST, _MOST).decode().strip()
    except (FileError, UnicodeDecodeError):
        return None
    return tag if is_plain(tag) else None


def write_latest(root: Path, tag: str) -> None:
    """Name the tag that a load without one takes."""
    commit_text(root / LATEST, tag + "\n")


def committed(root: Path) -> list[Committed]:
    """Every checkpoint in a folder, oldest first; what is damaged or half written is none."""
    found = []
    for folder in _tags(root):
        with suppress(CheckpointError, FileError):
            found.append(Committed(folder, read_manifest(folder)))
    return sorted(found, key=lambda each: each.age)


def next_moment(root: Path) -> str:
    """The time for a commit: now, or right after the newest checkpoint of a folder where the clock went backwards."""
    now = datetime.now(UTC)
    with suppress(FileError):
        for folder in _tags(root):
            with suppress(FileError, CheckpointError, ValueError, TypeError, OverflowError):
                if claims(folder)[1] >= _stamp(now):  # hardly ever; only then all of the manifest is read
                    now = max(now, datetime.fromisoformat(read_manifest(folder).created) + timedelta(microseconds=1))
    return _stamp(now)


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def claims(folder: Path) -> tuple[str, str]:
    """The run of a manifest and the time of its commit, by its first bytes, whose hash nobody has looked at."""
    match = _CLAIMS.search(read_head(folder / MANIFEST, _HEAD))
    return (match[1].decode(), match[2].decode()) if match else ("", "")


def _tags(root: Path) -> list[Path]:
    """The folders that seem committed. That they cannot be listed is an error: a run would take it for a new start."""
    try:
        listed = list_folder(root)
    except FileError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise
    return [path for path in listed if is_plain(path.name) and _has_manifest(path)]


def _has_manifest(folder: Path) -> bool:
    with suppress(OSError):  # what others have may be closed to us
        return (folder / MANIFEST).exists()
    return False


def mark(folder: Path, save: str, run: str = "") -> None:
    """Say that a save is going on: until this is gone, or the process is, nobody removes its files."""
    make_folder(folder)
    write_bytes(folder / f"{save}.saving", json.dumps({"process": this_process(), "run": run}).encode())
    fsync_folder(folder)


def is_marked(folder: Path, save: str) -> bool:
    """Whether the mark of a save is there: only then is this the folder that its first rank writes to."""
    return (folder / f"{save}.saving").exists()


def unmark(folder: Path, save: str) -> None:
    """It is over, well or badly."""
    with suppress(FileError):
        remove(folder / f"{save}.saving", missing_ok=True)


def discard(folder: Path, save: str) -> None:
    """Remove what was written for a save that failed; one whose manifest is in place may still come to be."""
    with suppress(CheckpointError):
        if read_manifest(folder).id == save:
            return
    for path in _listed(folder):
        match = _DATA.fullmatch(path.name)
        if match and match[1] == save:
            with suppress(FileError):
                remove(path, missing_ok=True)


def sweep(folder: Path, keep: Manifest | None, run: str = "") -> list[Path]:
    """Remove what older saves have left in a tag's folder, dead ones too; returns what is gone.

    Whether a save on another machine is dead cannot be seen: after `LEASE`, one of the same `run` counts as dead.
    """
    return _remove_all(_not_live(folder, run), keep)


def sweep_all(root: Path, run: str = "") -> list[Path]:
    """Remove what dead saves have left in every tag of a folder: of one that is not committed nothing is kept."""
    gone: list[Path] = []
    for folder in _folders(root):
        found = _not_live(folder, run)  # before the manifest is read: what a save commits in between is then in that
        if not found:
            continue
        is_committed = (folder / MANIFEST).exists()
        if _are_of_one_save(found) if is_committed else _may_arrive(found):
            continue  # as nearly always; the manifest of a large model takes a while to read
        try:
            keep = read_manifest(folder) if is_committed else None
        except CheckpointError:
            continue  # damaged: somebody may still want to look at it
        removed = _remove_all(found, keep)
        gone += removed
        if removed and keep is None:
            remove_if_empty(folder)
    unfinished = [path for path in _listed(root) if _LATEST_BESIDE.fullmatch(path.name)]
    if unfinished and not any(_live(_listed(folder), run) for folder in _folders(root)):
        gone += _remove_all(unfinished, None)
    return gone


def _not_live(folder: Path, run: str) -> list[Path]:
    """The files in a tag's folder that no save under way may still need, those of a committed one among them."""
    listed = _listed(folder)
    live, found = _live(listed, run), []
    for path in listed:
        match = _DATA.fullmatch(path.name) or _MARK.fullmatch(path.name)
        is_ours = match is not None and match[1] not in live
        if (is_ours or (_BESIDE.fullmatch(path.name) and not live)) and not path.is_dir():
            found.append(path)
    return found


def _live(listed: list[Path], run: str) -> set[str]:
    """The saves that are under way, by what lies in a tag's folder."""
    return {match[1] for path in listed if (match := _MARK.fullmatch(path.name)) and _is_live(path, run)}


def _are_of_one_save(paths: list[Path]) -> bool:
    """Whether these are data of one save and nothing else."""
    data = [_DATA.fullmatch(path.name) for path in paths]
    return len({match[1] if match else None for match in data}) <= 1 and None not in data


def _may_arrive(paths: list[Path]) -> bool:
    """Whether these may be a checkpoint that somebody copies here: a save, or what is left of one, has a mark."""
    if any(_MARK.fullmatch(path.name) for path in paths):
        return False
    with suppress(OSError):
        return time.time() - max(path.stat().st_ctime for path in paths) < LEASE
    return True


def _remove_all(paths: list[Path], keep: Manifest | None) -> list[Path]:
    kept = {file.name for file in keep.files} if keep else set()
    doomed = [path for path in paths if path.name not in kept]
    doomed.sort(key=lambda path: bool(_MARK.fullmatch(path.name)))  # whoever comes after a crash knows by the mark
    for path in doomed:
        remove(path, missing_ok=True)
    return doomed


def _folders(root: Path) -> Iterator[Path]:
    for path in _listed(root):
        if is_plain(path.name) and path.is_dir() and not path.is_symlink():
            yield path


def _listed(folder: Path) -> list[Path]:
    try:
        return list_folder(folder)
    except FileError:
        return []


def _is_live(path: Path, run: str) -> bool:
    try:
        found = json.loads(read_head(path, _MOST))
        process, its_run = str(found["process"]), found.get("run")
        if is_elsewhere(process):
            return not (run and its_run == run and time.time() - path.lstat().st_mtime > LEASE)
        return not is_gone(process)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return False  # torn, or no mark of ours at all: whoever wrote it did not live to finish


def delete(each: Committed) -> None:
    """Remove a checkpoint: first it does not exist any more, then its files go.

    The manifest becomes the mark of a save that is dead, by which the rest is known after a crash.
    """
    replace(each.folder / MANIFEST, each.folder / f"{os.urandom(8).hex()}.saving")
    for file in each.manifest.files:
        remove(each.folder / file.name, missing_ok=True)
    sweep(each.folder, None, each.manifest.run)
    remove_if_empty(each.folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a tag's folder in which nothing is left."""
    with suppress(OSError):
        folder.rmdir()  # somebody else's files may be there


def surplus(
    found: Collection[Committed], *, last: int | None, every: int | None, spare: Collection[str]
) -> list[Committed]:
    """What retention does not keep: neither among the newest, nor at a round step, nor spared by its tag."""
    if last is None:
        return []
    ordered = sorted(found, key=lambda each: each.age)
    return [
        each
        for each in ordered[: max(0, len(ordered) - last)]
        if not (every and each.manifest.step % every == 0) and each.folder.name not in spare
    ]


def retain(root: Path, run: str, *, last: int | None, every: int | None, newest: str) -> None:
    """Delete what a run does not want to keep. Checkpoints of other runs are not counted and not touched."""
    if last is None:
        return
    own = [each for each in committed(root) if each.manifest.run == run]
    spare = {newest, read_latest(root) or newest}
    for each in surplus(own, last=last, every=every, spare=spare):
        try:
            delete(each)
        except FileError as error:
            get_logger().warning(
                "%s was not deleted, or not all of it, although keep_last is %d: %s", each.folder, last, error
            )
            continue
        get_logger().info("checkpoint %s was deleted: keep_last is %d", each.folder, last)
