"""Which checkpoint to load: the one that was asked for, the latest, or an older one when that is damaged."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mizzen.checkpoint.folder import LATEST, Committed, check_tag, claims, committed, read_latest
from mizzen.checkpoint.manifest import is_plain
from mizzen.checkpoint.rank_group import RankGroup, Validation, attempt, in_words, place_of, refuse_unequal
from mizzen.checkpoint.read import MANIFEST, Reader, read_manifest
from mizzen.errors import CheckpointError
from mizzen.log import get_logger
from mizzen.wording import and_more

CALL: Final = "load_checkpoint()"
LEFT_FOR_OTHERS: Final = "drop-in.json"
"""Where this lies in a tag's folder, files that look like DeepSpeed's are of the drop-in."""


def candidates(root: Path, tag: str | None, *, with_older: bool) -> list[str]:
    """Tags to try, best first; none when there is nothing to load. Called on one rank.

    `latest` is a hint: a committed tag that it names is taken, otherwise the newest committed one.
    """
    if tag is not None:
        return [check_tag(tag)] if (root / tag).is_dir() else []
    named = read_latest(root)
    is_there = named is not None and (root / named / MANIFEST).exists()
    if named is not None and is_there and not with_older:
        return [named]
    found = committed(root)
    if found and not is_there:
        what, newest = latest_problem(root) or "is missing", found[-1].folder.name
        get_logger().warning("%s/%s %s: the newest committed one, '%s', is taken", root, LATEST, what, newest)
    tags = [named] if named is not None and is_there else []
    found = _before(found, root / tags[0]) if tags else found
    tags += [tag for each in _line(found, named) if (tag := each.folder.name) != named]
    return tags if with_older else tags[:1]


def latest_problem(root: Path) -> str:
    """Why a load without a tag passes `latest` over; empty when it names a committed checkpoint, or does not exist."""
    named = read_latest(root)
    if named is not None and (root / named / MANIFEST).exists():
        return ""
    if named is not None:
        return f"names '{named}', which is not committed"
    return "names no checkpoint" if os.path.lexists(root / LATEST) else ""


def candidates_together(asked: "LoadRequest", group: RankGroup, *, with_older: bool) -> list[str]:
    """Tags to try on all ranks: what the first finds; where each node has a filesystem of its own, what all show."""
    root, tag = asked.root, asked.tag
    if not asked.is_local:
        return group.run_on_first(lambda: _told(root, tag, with_older), CALL)
    found, failure = attempt(lambda: _shown(root, tag, with_older))
    said = group.all_gather((group.node, found, failure), CALL)
    if failures := {rank: words for rank, (_, _, words) in enumerate(said) if words}:
        raise CheckpointError(in_words(failures))
    having = sorted({node for node, tags, _ in said if tags})
    lacking = sorted({node for node, tags, _ in said if not tags})
    if having and lacking:
        what = f"checkpoint '{tag}'" if tag else "checkpoint"
        raise CheckpointError(
            f"{root}: node {', '.join(lacking)}: no {what} is committed here, but there is on node "
            f"{', '.join(having)}; restore the folder, or remove it everywhere to start anew"
        )
    common = [shown for shown in said[0][1] if all(shown in others for _, others, _ in said)]
    firsts = {node: others[0] for node, others, _ in said if others}
    if firsts and common[:1] != list(dict.fromkeys(firsts.values())):
        shown = ", ".join(f"node {node} '{name}'" for node, (name, _) in firsts.items())
        words = f"{root}: the nodes do not show the same save; their newest are {shown}"
        if not common:
            raise CheckpointError(f"{words}, and no other is on all of them: restore the parts that are missing")
        if group.is_first:
            get_logger().error("%s. '%s' is taken, which is on all of them", words, common[0][0])
    return [name for name, _ in (common if with_older else common[:1])]


def _shown(root: Path, tag: str | None, with_older: bool) -> list[tuple[str, str]]:
    """The candidates of one node with their saves. What is damaged is none, unless nothing older is wanted."""
    if tag is not None:
        return [(name, "") for name in _told(root, tag, with_older)]
    shown = []
    for number, name in enumerate(_told(root, None, True)):
        try:
            shown.append((name, read_manifest(root / name).id))
        except CheckpointError as error:
            if number == 0 and not with_older:
                raise
            get_logger().error("%s", error)
    return shown


def _told(root: Path, tag: str | None, with_older: bool) -> list[str]:
    """The candidates; that `latest` promises one and there is none is never passed over in silence."""
    _refuse_others(root, tag)
    found = candidates(root, tag, with_older=with_older)
    if not found and tag is None and (named := read_latest(root)) is not None:
        get_logger().warning("%s/latest names '%s', which is not committed, and no other checkpoint is", root, named)
    return found


def _refuse_others(root: Path, tag: str | None) -> None:
    """Raise for a folder that DeepSpeed has written, where there is no checkpoint of ours."""
    name = tag if tag is not None and is_plain(tag) else read_latest(root) or ""
    if (root / name / MANIFEST).exists() or (tag is None and any(root.glob(f"*/{MANIFEST}"))):
        return
    for folder in (root / name, root):
        if any(folder.glob("*_model_states.pt")) and not (folder / LEFT_FOR_OTHERS).exists():
            which = f" --tag {name}" if name and folder != root else ""
            raise CheckpointError(
                f"{folder} was saved by DeepSpeed. Make a checkpoint of mizzen's out of it, once, and load that: "
                f"mizzen checkpoint import {root}{which} --to FOLDER"
            )


def _before(found: list[Committed], folder: Path) -> list[Committed]:
    """Of a checkpoint that cannot be read, those that its run has committed earlier, as far as it still says."""
    claimed, _ = attempt(lambda: claims(folder))
    if not claimed or not claimed[0] or any(each.folder == folder for each in found):
        return found
    return [each for each in found if each.manifest.run == claimed[0] and each.manifest.created < claimed[1]]


def _line(found: list[Committed], named: str | None) -> list[Committed]:
    """A checkpoint and those that its run came by, newest first; without it, or if it is damaged, the newest's.

    [Note: runs that went back]
    A run that loads an older checkpoint and goes on leaves a branch behind: committed earlier, at later steps. What is
    of a later step than one that was committed after it is of such a branch, and before it so is the same step.
    """
    if not found:
        return []
    names = [each.folder.name for each in found]
    place = names.index(named) if named in names else len(found) - 1
    line = [found[place]]
    limit = found[place].manifest.step
    for each in reversed(found[:place]):
        if each.manifest.run != line[0].manifest.run:
            continue
        if each.manifest.step > limit:
            limit = line[-1].manifest.step - 1
        else:
            line.append(each)
            limit = each.manifest.step
    return line


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What ranks want to load, agreed by all of them."""

    root: Path
    """The folder that this rank was given."""
    places: tuple[str, ...]
    """The folders of all ranks, by the names that they compare."""
    tag: str | None
    validation: Validation
    is_local: bool

    @property
    def first(self) -> Path:
        """The folder of the first rank."""
        return Path(self.places[0])


def ask_together(
    root: Path,
    tag: str | None,
    group: RankGroup,
    *,
    validation: Validation,
    is_local: bool = False,
    failure: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> LoadRequest:
    """Compare what ranks were asked to load: the tag is the first rank's, and what is in `arguments` that of all.

    `failure` says why this rank cannot load; then none does.
    """
    place, lost = attempt(lambda: place_of(root))
    said = group.all_gather((place, tag, failure or lost, arguments or {}), CALL)
    if failures := {rank: words for rank, (_, _, words, _) in enumerate(said) if words}:
        raise CheckpointError(in_words(failures))
    refuse_unequal([given for *_, given in said], CALL)
    group.take_first("tags", {rank: str(named or "the latest") for rank, (_, named, *_) in enumerate(said)}, validation)
    return LoadRequest(root, tuple(place for place, *_ in said), said[0][1], validation, is_local)


def open_together(asked: LoadRequest, name: str, group: RankGroup) -> Reader:
    """Open one checkpoint on all ranks, or on none: all must see the same save, on every node that has a part of it.

    Ranks may have folders of their own that show the same save, by another name or as a copy. Those whose folder shows
    another save, or none, take the first rank's.
    """
    reader, failure = attempt(lambda: Reader(asked.root / name))
    said = _shown_by_all(reader, failure, group)
    apart = {rank for rank, (_, save, *_) in enumerate(said) if save != said[0][1]}
    if not asked.is_local and len(set(asked.places)) > 1 and apart:
        places = {rank: asked.places[rank if rank in apart else 0] for rank in range(group.size)}
        try:
            group.take_first("folders", places, asked.validation)
        except CheckpointError:
            _close(reader)
            raise
        if group.rank in apart:
            _close(reader)
            reader, failure = attempt(lambda: Reader(asked.first / name))
        said = _shown_by_all(reader, failure, group)
    if broken := _broken(said, asked.root / name):
        _close(reader)
        raise CheckpointError(and_more(dict.fromkeys(broken.values()), separator="; "))
    if reader is None:
        raise AssertionError("a checkpoint that opened without a word is not there")
    return reader


Shown = tuple[str, str, tuple[str, ...], str | None]
"""The node of a rank, the save that it sees, the nodes that have a part of that, and why it sees none."""


def _shown_by_all(reader: Reader | None, failure: str | None, group: RankGroup) -> list[Shown]:
    manifest = reader.manifest if reader else None
    shown: Shown = (group.node, manifest.id if manifest else "", manifest.nodes if manifest else (), failure)
    return group.all_gather(shown, CALL)


def _close(reader: Reader | None) -> None:
    if reader is not None:
        reader.close()


def _broken(said: Sequence[Shown], folder: Path) -> dict[int, str]:
    """Why a checkpoint cannot be read by all ranks, by the rank that cannot; nothing when it can."""
    is_local = any(nodes for _, _, nodes, _ in said)
    if broken := {
        rank: f"node {node}: {words}" if is_local else words for rank, (node, _, _, words) in enumerate(said) if words
    }:
        return broken
    ids = {node: save for node, save, _, _ in said}
    if len({save for _, save, *_ in said}) > 1:
        shown = ", ".join(f"{node} has save {save}" for node, save in ids.items())
        return {0: f"{folder}: the nodes do not show the same save: {shown}"}
    lacking = sorted({node for _, _, nodes, _ in said for node in nodes} - ids.keys())
    if lacking:
        return {0: f"{folder}: it was saved on {len(lacking)} nodes that are not here: {', '.join(lacking)}"}
    return {}
