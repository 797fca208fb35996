"""Checkpoints that other programs wrote: `open(path)` recognises the kind and gives a Source. Nothing is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mizzen.checkpoint.foreign import weights
from mizzen.checkpoint.foreign.dcp import open_dcp
from mizzen.checkpoint.foreign.deepspeed import TagFiles, open_deepspeed
from mizzen.checkpoint.foreign.extent import Extent, Folder
from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.errors import CheckpointError
from mizzen.log import get_logger
from mizzen.wording import and_more

__all__ = ["open"]

LATEST: Final = ("latest", "latest_universal")
"""Files that hold the name of the newest tag."""


def open(path: str | Path, tag: str | None = None, *, inert: Sequence[str] = ()) -> ForeignSource:
    """The checkpoint at a path: a file, a tag's folder, or the folder above with `latest` in it.

    `inert` names further packages whose objects may stand in a checkpoint; they become placeholders, never objects.
    """
    path, packages = Path(path), tuple(inert)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.is_dir():
        source = _open_folder(Folder(path), tag, packages)
    elif tag is None:
        source = weights.open_file(Extent.of_file(path), packages)
    else:
        raise CheckpointError(f"{path}: is a file, so it has no tag {tag!r}")
    source.check_size()
    kinds = [kind for kind, _ in source.table]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    get_logger().info(f"{path}: {source.what}: {counts}")
    for sentence in source.left_out:
        get_logger().warning(f"{path}: left out: {sentence}")
    return source


def _open_folder(folder: Folder, tag: str | None, inert: tuple[str, ...]) -> ForeignSource:
    if tag is not None:
        if not folder.inside(tag).is_dir():
            raise CheckpointError(f"{folder.path}: has no folder for the tag {tag!r}; it has {_listing(folder)}")
        return _open_format(folder.folder(tag), inert)
    named = next((name for name in LATEST if folder.has(name)), None)
    if named is None or not TagFiles.of(folder).is_empty:
        return _open_format(folder, inert)
    tag = folder.file(named).bytes(4096, "the name of a tag").decode("utf8", "replace").strip()
    if not folder.inside(tag).is_dir():
        raise CheckpointError(
            f"{folder.path}: '{named}' says {tag!r}, and there is no such folder; it has {_listing(folder)}"
        )
    return _open_format(folder.folder(tag), inert)


def _open_format(folder: Folder, inert: tuple[str, ...]) -> ForeignSource:
    if folder.has(".metadata"):
        return open_dcp(folder, inert)
    files = TagFiles.of(folder)
    if not files.is_empty:
        return open_deepspeed(folder, files, inert)
    if (name := weights.find(folder)) is not None:
        return weights.open_folder(folder, name, inert)
    raise CheckpointError(
        f"{folder.path}: no checkpoint that is known. Looked for manifest.json (ours), mp_rank_XX_model_states.pt, "
        "zero_pp_rank_X_mp_rank_XX_model_states.pt and latest (DeepSpeed), .metadata (torch.distributed.checkpoint), "
        f"{', '.join((*weights.INDICES, *weights.SINGLES))} (weights); it has {_listing(folder)}"
    )


def _listing(folder: Folder) -> str:
    return and_more(name[:60] for name in folder.names()) or "nothing"
