"""A save: every rank writes its own file, all vote, and one rename commits. Until then nothing has happened.

    begin     all ranks agree on a folder and a tag; the first marks it
    write     each rank writes its data, durably; nothing of an older save of the tag is touched
    commit    all vote; the first renames the manifest into place, then `latest`, then old files go

`begin` is called where training stands still. `write` and `commit` may run in a thread beside it, on copies.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

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
from mizzen.checkpoint.read import MANIFEST
from mizzen.checkpoint.team import Team, Validation, attempt, in_words, place_of, refuse_unequal
from mizzen.checkpoint.write import Item, Written, flaws, merge, merge_facts, pack_facts, unwritten, write_items
from mizzen.errors import CheckpointError, FileError, MizzenError
from mizzen.files import commit_bytes, free_bytes, fsync_folder, make_folder
from mizzen.log import get_logger


@dataclass(frozen=True, slots=True)
class Terms:
    """How a run saves."""

    run: str
    tag_validation: Validation = "Warn"
    is_local: bool = False
    """Whether each node has a filesystem of its own."""
    keep_last: int | None = None
    keep_every: int | None = None
    latest: bool = True


@dataclass(frozen=True, slots=True)
class Ticket:
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

    ticket: Ticket
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
    team: Team,
    terms: Terms,
    *,
    needed: int = 0,
    failure: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Ticket:
    """Agree on where to save, in one exchange. All ranks come here together, or find out that they do not.

    `needed` are the bytes that this rank wants to write; `failure` says why it cannot, and then none does. What is in
    `arguments` has to be the same on all ranks.
    """
    ticket = Ticket(root, tag, os.urandom(8).hex())
    if terms.is_local:  # who commits on which node has to be known first
        said = team.everyone((ticket.id, ticket.tag, team.node), CALL)
        ticket = replace(ticket, id=said[0][0], tag=said[0][1], nodes=tuple(node for _, _, node in said))
    place, lost = attempt(lambda: place_of(root))
    failure = failure or lost
    if _leads(ticket, team) and failure is None and is_plain(ticket.tag):
        _, failure = attempt(lambda: _mark(ticket, terms))
    free, _ = attempt(lambda: free_bytes(root))
    offer = Offer(replace(ticket, tag=tag), place or "", needed, free, failure, arguments or {})
    try:
        return _agreed(ticket, team.everyone(offer, CALL), team, terms)
    except MizzenError:
        if is_plain(ticket.tag):
            give_up(ticket, team)
        raise


def _mark(ticket: Ticket, terms: Terms) -> None:
    try:
        mark(ticket.folder, ticket.id, terms.run)
    except FileError as error:
        if terms.is_local and error.errno == errno.EEXIST:
            words = (
                "another node saves here too, and checkpoint.use_node_local_storage is for nodes that share no folder"
            )
            raise CheckpointError(f"{ticket.folder}: {words}") from error
        raise


def _agreed(ticket: Ticket, offers: Sequence[Offer], team: Team, terms: Terms) -> Ticket:
    """The first rank's ticket, unless somebody cannot; every rank sees the same offers and so decides alike."""
    if failures := {rank: offer.failure for rank, offer in enumerate(offers) if offer.failure}:
        raise CheckpointError(in_words(failures))
    refuse_unequal([offer.arguments for offer in offers], CALL)
    team.take_first("tags", {rank: offer.ticket.tag for rank, offer in enumerate(offers)}, terms.tag_validation)
    first = offers[0].ticket
    ticket = replace(ticket, tag=check_tag(first.tag), id=first.id)
    ticket = _in_one_folder(ticket, offers, team, terms)
    together = [rank for rank in range(team.size) if not ticket.nodes or ticket.nodes[rank] == team.node]
    needed = sum(offers[rank].needed for rank in together)
    free = min((room for rank in together if (room := offers[rank].free) is not None), default=needed)
    if needed > free:
        raise CheckpointError(
            f"{ticket.root}: the checkpoint needs {needed:,} bytes, and the filesystem has {free:,} free"
        )
    return ticket


def _in_one_folder(ticket: Ticket, offers: Sequence[Offer], team: Team, terms: Terms) -> Ticket:
    """The ticket with the folder that this rank writes to: its own where that is the first rank's by another name.

    The mark that the first rank has put into its folder is seen in the same folder only, however that is called.
    """
    first = _leader(ticket, team.rank)
    if all(offer.place == offers[_leader(ticket, rank)].place for rank, offer in enumerate(offers)):
        return ticket
    theirs = replace(ticket, root=Path(offers[first].place))
    (own, _), (shared, _) = (attempt(partial(is_marked, each.folder, each.id)) for each in (ticket, theirs))
    said = team.everyone((bool(own), bool(shared)), CALL)
    places = {
        rank: offers[_leader(ticket, rank) if sees_own else rank].place for rank, (sees_own, _) in enumerate(said)
    }
    if lost := [rank for rank, seen in enumerate(said) if not any(seen)]:
        raise CheckpointError(
            f"the ranks were given different folders: {in_words(places)}; and rank {', '.join(map(str, lost[:8]))} "
            f"cannot see that of the first. {UNSHARED}"
        )
    if not all(sees_own for sees_own, _ in said):
        team.take_first("folders", places, terms.tag_validation)
    return ticket if own else theirs


def _leader(ticket: Ticket, rank: int) -> int:
    """The rank that commits for a rank: the first of all, or of its node."""
    return ticket.nodes.index(ticket.nodes[rank]) if ticket.nodes else 0


def _leads(ticket: Ticket, team: Team) -> bool:
    return team.rank == _leader(ticket, team.rank)


def write(ticket: Ticket, items: Sequence[Item], team: Team, known: Sequence[TensorEntry] = ()) -> Written:
    """This rank's file; `known` are the tensors that it knows of, whoever writes them."""
    make_folder(ticket.folder)
    if not is_marked(ticket.folder, ticket.id):
        remove_if_empty(ticket.folder)
        raise CheckpointError(
            f"{ticket.folder} on node {team.node} is not what the first rank sees under this name. {UNSHARED}"
        )
    metadata = {"save": ticket.id, "tag": ticket.tag, "rank": str(team.rank)}
    written = write_items(ticket.folder / data_name(ticket.id, team.rank), items, known, metadata=metadata)
    fsync_folder(ticket.folder)
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
    ticket: Ticket,
    written: Written | None,
    failure: str | None,
    facts: Mapping[str, Any],
    team: Team,
    terms: Terms,
    *,
    own: Mapping[str, Any] | None = None,
) -> Manifest | None:
    """Contribution, and make the checkpoint exist if all is well; returns its manifest on the rank that commits.

    `facts` are those of the rank that commits. `own` is what each rank knows of the model, whose parts may be on
    different ranks: dicts and lists that are merged. The weights in its list `names` have to have been written.
    """
    vote = Contribution(written, failure, pack_facts(own or {}))
    votes = (team.everyone if ticket.nodes else team.first)(vote, CALL)
    leads = _leads(ticket, team)
    manifest = None
    failure = None
    if leads:
        manifest, failure = attempt(lambda: _make_it_exist(ticket, votes, facts, team, terms))
    try:
        if ticket.nodes:  # nothing older goes before the save is on every node
            team.all_well(failure, CALL)
        if manifest is not None:
            _tidy(ticket, manifest, terms)
        team.all_well(failure, CALL)
    except CheckpointError:
        if manifest is not None:  # another node has failed, so that it is none here either
            attempt(partial(delete, Committed(ticket.folder, manifest)))
        give_up(ticket, team)
        raise
    return manifest


def give_up(ticket: Ticket, team: Team) -> None:
    """A save that has begun will not be: leave nothing behind."""
    discard(ticket.folder, ticket.id)
    if _leads(ticket, team):
        unmark(ticket.folder, ticket.id)
        remove_if_empty(ticket.folder)


def _make_it_exist(
    ticket: Ticket,
    votes: Sequence[Contribution],
    facts: Mapping[str, Any],
    team: Team,
    terms: Terms,
) -> Manifest:
    if failures := {rank: vote.failure for rank, vote in enumerate(votes) if vote.failure}:
        raise CheckpointError(f"{ticket.folder}: nothing was saved: {in_words(failures)}")
    written = {rank: vote.written for rank, vote in enumerate(votes) if vote.written}
    here = [
        each if not ticket.nodes or ticket.nodes[rank] == team.node else replace(each, file=None)
        for rank, each in written.items()
    ]
    tensors, files = merge(here, once=bool(ticket.nodes))
    merged = merge_facts(vote.facts for vote in votes)
    if words := flaws(written, ticket.nodes) or unwritten(merged.pop("names", []), tensors):
        raise CheckpointError(f"{ticket.folder}: nothing was saved: {words}")
    manifest = Manifest(
        id=ticket.id,
        run=terms.run,
        tag=ticket.tag,
        step=int(facts.get("counters", {}).get("global_steps", 0)),
        created=next_moment(ticket.root),
        tensors=tensors,
        files=files,
        facts={**facts, **merged},
        node=team.node if ticket.nodes else "",
        nodes=tuple(dict.fromkeys(ticket.nodes)),
    )
    commit_bytes(ticket.folder / MANIFEST, manifest.to_bytes())
    return manifest


def _tidy(ticket: Ticket, manifest: Manifest, terms: Terms) -> None:
    """What follows a commit; that it fails does not undo the commit.

    While `latest` may name an older checkpoint, none is removed.
    """
    log, failure = get_logger(), None
    if terms.latest:
        _, failure = attempt(lambda: write_latest(ticket.root, ticket.tag))
        if failure:
            advice = f"load it with tag='{ticket.tag}' until a later save writes it"
            log.warning("%s is saved, but 'latest' may not name it: %s; %s", ticket.folder, failure, advice)
    unmark(ticket.folder, ticket.id)

    def tidy() -> None:
        sweep(ticket.folder, manifest, terms.run)
        if not failure:
            retain(ticket.root, terms.run, last=terms.keep_last, every=terms.keep_every, newest=ticket.tag)
        sweep_all(ticket.root, terms.run)

    _, untidy = attempt(tidy)
    if untidy:
        log.warning("%s is saved, but tidying up after it failed: %s", ticket.folder, untidy)
