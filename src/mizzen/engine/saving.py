"""`save_checkpoint`: what of an engine goes into a checkpoint, and the order in which ranks and threads do it."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.background import Background
from mizzen.checkpoint.save import Terms
from mizzen.checkpoint.tagged import Encoder, pack
from mizzen.checkpoint.team import Team, attempt
from mizzen.checkpoint.write import Item
from mizzen.comm.mesh import Mesh
from mizzen.config.checkpoint import CheckpointConfig
from mizzen.config.dump import plain
from mizzen.data.loader import Loader
from mizzen.engine.randomness import process_state
from mizzen.engine.state import Held, Weights, extra_states, share_of
from mizzen.engine.states import groups_of, held_states
from mizzen.errors import CheckpointError, MizzenError, UsageError
from mizzen.files import free_bytes
from mizzen.log import get_logger, log_dist, warn_once
from mizzen.model.piece import piece_of_whole
from mizzen.monitor.report import Observer, StepReport
from mizzen.rewrite.checkpointing import Checkpointing

if TYPE_CHECKING:
    from mizzen.engine.face import Face

CLIENT: Final = "client"
RANDOM: Final = "rng"


@dataclass(slots=True)
class Saving(Observer):
    """What an engine needs to save; as an observer it brings the error of a save beside training to the next step."""

    settings: CheckpointConfig
    team: Team
    background: Background
    run: str = field(default_factory=lambda: os.urandom(8).hex())

    def on_step(self, report: StepReport) -> None:
        """Raise what a save beside training has run into."""
        self.settle(self.background.surface)

    def settle(self, hear: Callable[[], None]) -> None:
        """Hear of the save before; that it has failed stops what comes now, or is said, as the configuration wants."""
        try:
            hear()
        except CheckpointError as error:
            self.report(error)

    def close(self) -> None:
        """Wait for the last save."""
        self.settle(self.background.wait)

    def report(self, error: MizzenError) -> None:
        """Stop, or go on and say so, as the configuration wants."""
        if self.settings.on_save_error == "stop":
            raise error
        get_logger().error("training goes on without this checkpoint: %s", error)

    def terms(self, latest: bool) -> Terms:
        """How this run saves."""
        settings = self.settings
        return Terms(
            run=self.run,
            tag_validation=settings.tag_validation,
            is_local=settings.use_node_local_storage,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            latest=latest,
        )


def team_of(mesh: Mesh) -> Team:
    """All ranks, on the group that training does not use."""
    return Team(mesh.rank, mesh.layout.world, mesh.aside.group)


def folder_of(settings: CheckpointConfig, given: str | os.PathLike[str] | None) -> Path:
    """The folder of a call, or that of the configuration."""
    if given is None and settings.dir is None:
        raise UsageError("which folder? Give one to the call, or set checkpoint.dir in the configuration")
    if given is not None and (not isinstance(given, str | os.PathLike) or not os.fspath(given)):
        raise UsageError(f"a folder is a text or a path, not {given!r}; '.' is the folder that the job was started in")
    return Path(given if given is not None else str(settings.dir))


def preflight(engine: "Face", root: Path) -> None:
    """Warn when a folder has no room for a checkpoint of this engine. Nothing is written."""
    own = sum(each.item.nbytes for each in everything_held(engine, frozenset()))
    if engine.optimizer is not None and not engine.optimizer.state:
        own *= 3  # states that come with the first step: two for each parameter, as those of Adam
    free, failure = attempt(lambda: free_bytes(root))
    if failure:
        warn_once(f"checkpoints in {root} may fail: {failure}")
    elif free is not None and own > free:
        warn_once(f"{root} has {free:,} bytes free, and this rank alone needs {own:,} for one checkpoint")


Given = str | os.PathLike[str] | None
"""A folder as a call was given it; None is that of the configuration."""


def save_checkpoint(
    engine: "Face",
    given: Given,
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
    beside: bool,
) -> bool:
    """Save; true when the checkpoint is committed, or on its way where it is written beside training."""
    saving = engine.saving
    try:
        if saving.settings.async_policy == "refuse":
            saving.background.refuse_another(saving.team)
        return _save(engine, given, tag, client_state, saving.terms(save_latest), exclude_frozen, beside)
    except CheckpointError as error:
        saving.report(error)
        return False


def _save(
    engine: "Face",
    given: Given,
    tag: str | None,
    client_state: Mapping[str, Any],
    terms: Terms,
    exclude_frozen: bool,
    beside: bool,
) -> bool:
    team, started = engine.saving.team, time.perf_counter()
    if engine.is_accumulating:
        warn_once(
            "save_checkpoint() in the middle of an accumulation: gradients are not saved, so the micro-batches since "
            "the last step are lost for a run that is resumed; save after a step"
        )
    _, unsaved = attempt(lambda: engine.saving.settle(engine.saving.background.wait))  # others may know it already
    root, unusable = attempt(lambda: folder_of(engine.settings.checkpoint, given))
    collected, failure = _collected(engine, client_state, exclude_frozen)
    held, facts = collected or ([], {})
    needed = sum(item.nbytes for item in share_of(held, team.rank, ()))
    tag = tag or f"global_step{engine.global_steps}"
    try:
        ticket = protocol.begin(
            root or Path(),
            tag,
            team,
            terms,
            needed=needed,
            failure=unusable or unsaved or failure,
            arguments={"exclude_frozen_parameters": bool(exclude_frozen)},
        )
    except CheckpointError as error:
        raise UsageError(str(error)) if unusable else error from None
    mine = share_of(held, team.rank, ticket.nodes)
    known = [each.item.entry for each in held if not each.is_joint]
    items, uncopied = attempt(lambda: engine.saving.background.staging.copies(mine)) if beside else (mine, None)

    def finish() -> None:
        written, failure = (
            attempt(lambda: protocol.write(ticket, items, team, known)) if items is not None else (None, uncopied)
        )
        manifest = protocol.commit(ticket, written, failure, facts, team, terms)
        if manifest is not None and team.is_first:
            seconds = time.perf_counter() - started
            speed = manifest.nbytes / max(seconds, 1e-9) / 1e9
            log_dist(f"saved {ticket.folder}: {manifest.nbytes:,} bytes in {seconds:.2f} s ({speed:.2f} GB/s)")

    if beside:
        engine.saving.background.start(finish)
    else:
        finish()
    return True


def _collected(
    engine: "Face", client_state: Mapping[str, Any], exclude_frozen: bool
) -> tuple[tuple[list[Held], dict[str, Any]] | None, str | None]:
    def collect() -> tuple[list[Held], dict[str, Any]]:
        weights = Weights.of(engine.module, engine.stores)
        skip = weights.frozen if exclude_frozen else frozenset[str]()
        encoder = Encoder("client_state", allow_pickle=engine.settings.checkpoint.pickled_client_state)
        facts = facts_of(engine, weights, client_state, encoder)
        facts["excluded"] = sorted(skip)
        held = everything_held(engine, skip, weights)
        everyone = engine.mesh.same_model
        pieces = (piece_of_whole(name, value) for name, value in encoder.tensors.items())
        return [*held, *(Held(Item(CLIENT, piece), everyone, is_joint=True) for piece in pieces)], facts

    return attempt(collect)


def everything_held(engine: "Face", skip: frozenset[str], weights: Weights | None = None) -> list[Held]:
    """Weights, optimizer states and random states of this rank."""
    rank, everyone = engine.global_rank, engine.mesh.same_model
    weights = weights or Weights.of(engine.module, engine.stores)
    held = list(weights.held(rank, everyone, skip))
    if engine.basic_optimizer is not None:
        held += held_states(engine.basic_optimizer, engine.stores, rank)
    return [*held, Held(Item(RANDOM, piece_of_whole(role_of(engine.mesh), _random_states(engine))), (rank,))]


def role_of(mesh: Mesh) -> str:
    """Who a rank is, for its random numbers: the same at every number of ranks."""
    return " ".join(f"{axis}={place}" for axis, place in mesh.role.items())


def _random_states(engine: "Face") -> Tensor:
    """The random states of a rank, as bytes."""
    states = {
        "stream": engine.surroundings.stream.state_dict(),
        "process": process_state(),
        "named": Checkpointing.current().streams.get_states(),
    }
    return pack(states)


def facts_of(engine: "Face", weights: Weights, client_state: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Everything that is not a tensor."""
    if not isinstance(client_state, Mapping):
        raise UsageError(f"client_state is a {type(client_state).__name__}: give a dict")
    layout = engine.surroundings.resolved.layout
    optimizer, scheduler, loader = engine.basic_optimizer, engine.lr_scheduler, engine.training_dataloader
    names = engine.surroundings.groups
    facts: dict[str, Any] = {
        "versions": {"mizzen": _version("mizzen"), "torch": torch.__version__, "python": platform.python_version()},
        "layout": layout.degrees,
        "config": plain(engine.settings),
        "seed": engine.surroundings.seed,
        "counters": {
            "global_steps": engine.applied_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "micro_steps": engine.micro_steps,
        },
        "batch": {"train": engine.batch.train, "accumulation": engine.batch.accumulation},
        "aliases": dict(weights.aliases),
        "frozen": sorted(weights.frozen),
        "data": loader.state_dict() if isinstance(loader, Loader) else None,
        "client": encoder.encode(dict(client_state)),
        "extra": encoder.encode(extra_states(engine.module), "extra_state"),
    }
    if optimizer is not None:
        padded = [*names, *[()] * (len(optimizer.param_groups) - len(names))]
        facts["optimizer"] = {
            "type": type(optimizer).__name__,
            "groups": encoder.encode(groups_of(optimizer, padded), "optimizer.param_groups"),
        }
        facts["scaler"] = engine.optimizer.loss_scaler.state_dict() if engine.optimizer is not None else None
    if scheduler is not None and "state_dict" in dir(scheduler):
        facts["scheduler"] = {
            "type": type(scheduler).__name__,
            "state": encoder.encode(scheduler.state_dict(), "lr_scheduler"),
        }
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
