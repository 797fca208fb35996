"""A save: every rank writes its own file, all vote, and one rename commits. Until then nothing has happened.

    begin     all ranks agree on a folder and a tag; the first marks it
    write     each rank writes its data, durably; nothing of an older save of the tag is touched
    commit    all vote; the first renames the manifest into place, then `latest`, then old files go

`begin` is called where training stands still. `write` and `commit` may run beside it, on copies (`Staging`), in a
thread (`SaveThread`): one save at a time, and its error is raised at the next step.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.accelerator import Accelerator, get_accelerator
from mizzen.checkpoint.folder import (
    Committed,
    check_tag,
    data_name,
    delete,
    discard,
    is_marked,
    mark,
    next_moment,
    remove_if_empty,
    retain,
    sweep,
    sweep_all,
    unmark,
    write_latest,
)
from mizzen.checkpoint.manifest import Manifest, TensorEntry, is_plain
from mizzen.checkpoint.rank_group import RankGroup, Validation, attempt, in_words, place_of, refuse_unequal
from mizzen.checkpoint.read import MANIFEST
from mizzen.checkpoint.write import Item, Written, flaws, merge, merge_facts, pack_facts, unwritten, write_items
from mizzen.comm.mesh import Aside
from mizzen.errors import CheckpointError, FileError, MizzenError
from mizzen.files import commit_bytes, free_bytes, fsync_folder, make_folder
from mizzen.log import get_logger
from mizzen.model.piece import Piece, Unread
from mizzen.wording import rank_list


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a run saves."""

    run: str
    tag_validation: Validation = "Warn"
    is_local: bool = False
    """Whether each node has a filesystem of its own."""
    keep_last: int | None = None
    keep_every: int | None = None
    latest: bool = True


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save that has begun."""

    root: Path
    tag: str
    id: str
    nodes: tuple[str, ...] = ()
    """By rank, where each node has a filesystem of its own."""

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.root / self.tag


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank brings to a save that is about to begin."""

    pending: PendingSave
    place: str
    """The folder that it was given, by the name that ranks compare."""
    needed: int = 0
    """Bytes that it wants to write."""
    free: int | None = None
    """Bytes that its filesystem has, where that is known."""
    failure: str | None = None
    """Why it cannot save; then none does."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """What all ranks have to be called with alike."""


CALL: Final = "save_checkpoint()"
UNSHARED: Final = "Give every rank the same folder, or set checkpoint.use_node_local_storage where nodes share none"


def begin(
    root: Path,
    tag: str,
    group: RankGroup,
    options: SaveOptions,
    *,
    needed: int = 0,
    failure: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> PendingSave:
    """Agree on where to save, in one exchange. All ranks come here together, or find out that they do not.

    `needed` are the bytes that this rank wants to write; `failure` says why it cannot, and then none does. What is in
    `arguments` has to be the same on all ranks.
    """
    pending = PendingSave(root, tag, os.urandom(8).hex())
    if options.is_local:  # who commits on which node has to be known first
        said = group.all_gather((pending.id, pending.tag, group.node), CALL)
        pending = replace(pending, id=said[0][0], tag=said[0][1], nodes=tuple(node for _, _, node in said))
    place, lost = attempt(lambda: place_of(root))
    failure = failure or lost
    if _leads(pending, group) and failure is None and is_plain(pending.tag):
        _, failure = attempt(lambda: _mark(pending, options))
    free, _ = attempt(lambda: free_bytes(root))
    offer = Offer(replace(pending, tag=tag), place or "", needed, free, failure, arguments or {})
    try:
        return _agreed(pending, group.all_gather(offer, CALL), group, options)
    except MizzenError:
        if is_plain(pending.tag):
            give_up(pending, group)
        raise


def _mark(pending: PendingSave, options: SaveOptions) -> None:
    try:
        mark(pending.folder, pending.id, options.run)
    except FileError as error:
        if options.is_local and error.errno == errno.EEXIST:
            words = (
                "another node saves here too, and checkpoint.use_node_local_storage is for nodes that share no folder"
            )
            raise CheckpointError(f"{pending.folder}: {words}") from error
        raise


def _agreed(pending: PendingSave, offers: Sequence[Offer], group: RankGroup, options: SaveOptions) -> PendingSave:
    """The first rank's save, unless somebody cannot; every rank sees the same offers and so decides alike."""
    if failures := {rank: offer.failure for rank, offer in enumerate(offers) if offer.failure}:
        raise CheckpointError(in_words(failures))
    refuse_unequal([offer.arguments for offer in offers], CALL)
    group.take_first("tags", {rank: offer.pending.tag for rank, offer in enumerate(offers)}, options.tag_validation)
    first = offers[0].pending
    pending = replace(pending, tag=check_tag(first.tag), id=first.id)
    pending = _in_one_folder(pending, offers, group, options)
    together = [rank for rank in range(group.size) if not pending.nodes or pending.nodes[rank] == group.node]
    needed = sum(offers[rank].needed for rank in together)
    free = min((room for rank in together if (room := offers[rank].free) is not None), default=needed)
    if needed > free:
        raise CheckpointError(
            f"{pending.root}: the checkpoint needs {needed:,} bytes, and the filesystem has {free:,} free"
        )
    return pending


def _in_one_folder(
    pending: PendingSave, offers: Sequence[Offer], group: RankGroup, options: SaveOptions
) -> PendingSave:
    """The save with the folder that this rank writes to: its own where that is the first rank's by another name.

    The mark that the first rank has put into its folder is seen in the same folder only, however that is called.
    """
    first = _leader(pending, group.rank)
    if all(offer.place == offers[_leader(pending, rank)].place for rank, offer in enumerate(offers)):
        return pending
    theirs = replace(pending, root=Path(offers[first].place))
    (own, _), (shared, _) = (attempt(partial(is_marked, each.folder, each.id)) for each in (pending, theirs))
    said = group.all_gather((bool(own), bool(shared)), CALL)
    places = {
        rank: offers[_leader(pending, rank) if sees_own else rank].place for rank, (sees_own, _) in enumerate(said)
    }
    if lost := [rank for rank, seen in enumerate(said) if not any(seen)]:
        raise CheckpointError(
            f"the ranks were given different folders: {in_words(places)}; and {rank_list(lost)} "
            f"cannot see that of the first. {UNSHARED}"
        )
    if not all(sees_own for sees_own, _ in said):
        group.take_first("folders", places, options.tag_validation)
    return pending if own else theirs


def _leader(pending: PendingSave, rank: int) -> int:
    """The rank that commits for a rank: the first of all, or of its node."""
    return pending.nodes.index(pending.nodes[rank]) if pending.nodes else 0


def _leads(pending: PendingSave, group: RankGroup) -> bool:
    return group.rank == _leader(pending, group.rank)


def write(pending: PendingSave, items: Sequence[Item], group: RankGroup, known: Sequence[TensorEntry] = ()) -> Written:
    """This rank's file; `known` are the tensors that it knows of, whoever writes them."""
    make_folder(pending.folder)
    if not is_marked(pending.folder, pending.id):
        remove_if_empty(pending.folder)
        raise CheckpointError(
            f"{pending.folder} on node {group.node} is not what the first rank sees under this name. {UNSHARED}"
        )
    metadata = {"save": pending.id, "tag": pending.tag, "rank": str(group.rank)}
    written = write_items(pending.folder / data_name(pending.id, group.rank), items, known, metadata=metadata)
    fsync_folder(pending.folder)
    return written


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a rank brings to a commit."""

    written: Written | None
    failure: str | None = None
    """Why it has written nothing; then there is no checkpoint."""
    facts: bytes = b""
    """What it knows and others may not, packed."""


def commit(
    pending: PendingSave,
    written: Written | None,
    failure: str | None,
    facts: Mapping[str, Any],
    group: RankGroup,
    options: SaveOptions,
    *,
    own: Mapping[str, Any] | None = None,
) -> Manifest | None:
    """Hear from every rank what it has written, and make the checkpoint exist if all is well.

    Returns its manifest on the rank that commits. `facts` are those of that rank. `own` is what each rank knows of the
    model, whose parts may be on different ranks: dicts and lists that are merged. The weights in its list `names` have
    to have been written.
    """
    vote = Contribution(written, failure, pack_facts(own or {}))
    votes = (group.all_gather if pending.nodes else group.gather)(vote, CALL)
    leads = _leads(pending, group)
    manifest = None
    failure = None
    if leads:
        manifest, failure = attempt(lambda: _make_it_exist(pending, votes, facts, group, options))
    try:
        if pending.nodes:  # nothing older goes before the save is on every node
            group.raise_failures(failure, CALL)
        if manifest is not None:
            _tidy(pending, manifest, options)
        group.raise_failures(failure, CALL)
    except CheckpointError:
        if manifest is not None:  # another node has failed, so that it is none here either
            attempt(partial(delete, Committed(pending.folder, manifest)))
        give_up(pending, group)
        raise
    return manifest


def give_up(pending: PendingSave, group: RankGroup) -> None:
    """A save that has begun will not be: leave nothing behind."""
    discard(pending.folder, pending.id)
    if _leads(pending, group):
        unmark(pending.folder, pending.id)
        remove_if_empty(pending.folder)


def _make_it_exist(
    pending: PendingSave,
    votes: Sequence[Contribution],
    facts: Mapping[str, Any],
    group: RankGroup,
    options: SaveOptions,
) -> Manifest:
    if failures := {rank: vote.failure for rank, vote in enumerate(votes) if vote.failure}:
        raise CheckpointError(f"{pending.folder}: nothing was saved: {in_words(failures)}")
    written = {rank: vote.written for rank, vote in enumerate(votes) if vote.written}
    here = [
        each if not pending.nodes or pending.nodes[rank] == group.node else replace(each, file=None)
        for rank, each in written.items()
    ]
    tensors, files = merge(here, once=bool(pending.nodes))
    merged = merge_facts(vote.facts for vote in votes)
    if words := flaws(written, pending.nodes) or unwritten(merged.pop("names", []), tensors):
        raise CheckpointError(f"{pending.folder}: nothing was saved: {words}")
    manifest = Manifest(
        id=pending.id,
        run=options.run,
        tag=pending.tag,
        step=int(facts.get("counters", {}).get("global_steps", 0)),
        created=next_moment(pending.root),
        tensors=tensors,
        files=files,
        facts={**facts, **merged},
        node=group.node if pending.nodes else "",
        nodes=tuple(dict.fromkeys(pending.nodes)),
    )
    commit_bytes(pending.folder / MANIFEST, manifest.to_bytes())
    return manifest


def _tidy(pending: PendingSave, manifest: Manifest, options: SaveOptions) -> None:
    """What follows a commit; that it fails does not undo the commit.

    While `latest` may name an older checkpoint, none is removed.
    """
    log, failure = get_logger(), None
    if options.latest:
        _, failure = attempt(lambda: write_latest(pending.root, pending.tag))
        if failure:
            advice = f"load it with tag='{pending.tag}' until a later save writes it"
            log.warning("%s is saved, but 'latest' may not name it: %s; %s", pending.folder, failure, advice)
    unmark(pending.folder, pending.id)

    def tidy() -> None:
        sweep(pending.folder, manifest, options.run)
        if not failure:
            retain(pending.root, options.run, last=options.keep_last, every=options.keep_every, newest=pending.tag)
        sweep_all(pending.root, options.run)

    _, untidy = attempt(tidy)
    if untidy:
        log.warning("%s is saved, but tidying up after it failed: %s", pending.folder, untidy)


class Staging:
    """Memory of the host for copies of what is saved, kept from one save to the next: new pages cost most of a copy."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def copies(self, items: Sequence[Item]) -> list[Item]:
        """Copies in memory that training does not change, which is used again for the next save.

        What rests outside the device is not copied, and comes lot by lot: `done` of its pieces lets training change it.
        """
        kept, self._kept = self._kept, {}
        accelerator = get_accelerator()
        found: list[Item] = []
        try:
            for number, item in enumerate(_by_lot(items)):
                found.append(_to_read(item) or self._copied(number, item, kept.get(number), accelerator))
        except BaseException:
            let_go(found)
            raise
        if any(_is_away(item.piece.device, accelerator) for item in items):
            accelerator.synchronize()
        return found

    def _copied(self, number: int, item: Item, place: Tensor | None, accelerator: Accelerator) -> Item:
        piece = item.piece
        data = piece.data.detach()
        is_away = _is_away(piece.device, accelerator)
        if place is None or place.shape != data.shape or place.dtype != data.dtype:
            place = torch.empty(data.shape, dtype=data.dtype)
            place = accelerator.pin_memory(place) if is_away else place
        self._kept[number] = place.copy_(data, non_blocking=is_away)
        return replace(item, piece=Piece(piece.name, piece.shape, piece.boxes, place))


def let_go(items: Iterable[Item]) -> None:
    """Nobody reads these any more, beside training: it may change all of them."""
    for item in items:
        item.piece.done()


def _by_lot(items: Sequence[Item]) -> list[Item]:
    """What changes together one after the other, so that it need not wait for the rest; first what is to be copied."""
    order: dict[int, int] = {}
    for item in items:
        order.setdefault(_lot(item), len(order) + 1)
    order[0] = 0
    return sorted(items, key=lambda item: order[_lot(item)])


def _lot(item: Item) -> int:
    source = item.piece.source
    return id(source.readers) if isinstance(source, Unread) and source.readers is not None else 0


def _to_read(item: Item) -> Item | None:
    """An item that is read where it rests while training goes on; None where that cannot be."""
    source = item.piece.source.beside() if isinstance(item.piece.source, Unread) else None
    return None if source is None else replace(item, piece=replace(item.piece, source=source))


def _is_away(device: torch.device, accelerator: Accelerator) -> bool:
    """Whether tensors there are in memory of the device's own: copies from it need not be waited for one by one."""
    return device.type == accelerator.name and not accelerator.shares_host_memory


class SaveThread:
    """The thread of at most one save. The process does not end before it has.

    Engines of one layout share the group that saves talk on, so a save also waits for those of other engines.
    """

    def __init__(self, aside: Aside | None = None) -> None:
        self._aside = aside or Aside(None)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.staging = Staging()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def refuse_another(self, group: RankGroup) -> None:
        """Raise on every rank while one is still writing: ranks come to the end of a save at different moments."""
        busy = (
            "a save is still being written, and checkpoint.async_policy is 'refuse': save less often, or let the "
            "second save wait with 'wait'"
        )
        group.on_job_group().raise_failures(busy if self.is_busy else None, "save_checkpoint()")

    def start(self, do: Callable[[], None]) -> None:
        """Let something go on beside training."""
        self._thread = threading.Thread(target=self._run, args=(do,), name="mizzen-save", daemon=False)
        self._aside.thread = self._thread
        self._thread.start()

    def _run(self, do: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            do()
        except Exception as error:  # noqa: BLE001  whatever it is: training would never hear of it
            get_logger().error("a save beside training failed after %.1f s: %s", time.perf_counter() - started, error)
            self._error = error

    def wait(self) -> None:
        """Wait for the save under way, if there is one, and raise its error if it was this engine's."""
        self._aside.wait()
        self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a save that has failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {error}") from error
