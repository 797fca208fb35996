"""`save_checkpoint`: what of an engine goes into a checkpoint, and the order in which ranks and threads do it."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.rank_group import RankGroup, attempt
from mizzen.checkpoint.save import SaveOptions, SaveThread
from mizzen.checkpoint.tagged_json import Encoder, pack
from mizzen.checkpoint.write import Item, Written
from mizzen.comm.mesh import Mesh
from mizzen.config.checkpoint import CheckpointConfig
from mizzen.config.schema import plain
from mizzen.data.loader import Loader
from mizzen.engine.optimizer_states import groups_of, held_states
from mizzen.engine.prepare import version_of
from mizzen.engine.randomness import process_state
from mizzen.engine.run_state import RunState
from mizzen.engine.weights import HeldItem, Weights, extra_states, items_to_write
from mizzen.errors import CheckpointError, MizzenError, UsageError
from mizzen.files import free_bytes
from mizzen.log import get_logger, log_dist, warn_once
from mizzen.model.layer_list import LayerList
from mizzen.model.piece import piece_of_whole
from mizzen.monitor.report import Observer, StepReport
from mizzen.rewrite.recompute import Checkpointing

CLIENT: Final = "client"
RANDOM: Final = "rng"


@dataclass(slots=True)
class Saving(Observer):
    """What an engine needs to save; as an observer it brings the error of a save beside training to the next step."""

    settings: CheckpointConfig
    group: RankGroup
    background: SaveThread
    told: tuple[Observer, ...] = ()
    """Who hears of each checkpoint that is committed."""
    run: str = field(default_factory=lambda: os.urandom(8).hex())

    def on_step(self, report: StepReport) -> None:
        """Raise what a save beside training has run into."""
        self.report_failure(self.background.raise_error)

    def report_failure(self, hear: Callable[[], None]) -> None:
        """Hear of the save before; that it has failed stops what comes now, or is said, as the configuration wants."""
        try:
            hear()
        except CheckpointError as error:
            self.report(error)

    def close(self) -> None:
        """Wait for the last save."""
        self.report_failure(self.background.wait)

    def report(self, error: MizzenError) -> None:
        """Stop, or go on and say so, as the configuration wants."""
        if self.settings.on_save_error == "stop":
            raise error
        get_logger().error("training goes on without this checkpoint: %s", error)

    def terms(self, latest: bool) -> SaveOptions:
        """How this run saves."""
        settings = self.settings
        return SaveOptions(
            run=self.run,
            tag_validation=settings.tag_validation,
            is_local=settings.use_node_local_storage,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            latest=latest,
        )


def rank_group_of(mesh: Mesh) -> RankGroup:
    """All ranks, on the group that training does not use."""
    return RankGroup(mesh.rank, mesh.layout.world, mesh.aside.group)


def folder_of(settings: CheckpointConfig, given: str | os.PathLike[str] | None) -> Path:
    """The folder of a call, or that of the configuration."""
    if given is None and settings.dir is None:
        raise UsageError("which folder? Give one to the call, or set checkpoint.dir in the configuration")
    if given is not None and (not isinstance(given, str | os.PathLike) or not os.fspath(given)):
        raise UsageError(f"a folder is a text or a path, not {given!r}; '.' is the folder that the job was started in")
    return Path(given if given is not None else str(settings.dir))


def preflight(run: RunState, root: Path) -> None:
    """Warn when a folder has no room for a checkpoint of this run. Nothing is written."""
    own = sum(each.item.nbytes for each in everything_held(run, Weights.of(run.module, run.stores), frozenset()))
    if run.optimizer is not None and not run.optimizer.state:
        own *= 3  # states that come with the first step: two for each parameter, as those of Adam
    free, failure = attempt(lambda: free_bytes(root))
    if failure:
        warn_once(f"checkpoints in {root} may fail: {failure}")
    elif free is not None and own > free:
        warn_once(f"{root} has {free:,} bytes free, and this rank alone needs {own:,} for one checkpoint")


Given = str | os.PathLike[str] | None
"""A folder as a call was given it; None is that of the configuration."""


def save_checkpoint(
    run: RunState,
    saving: Saving,
    given: Given,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen: bool,
    beside: bool,
) -> bool:
    """Save; true when the checkpoint is committed, or on its way where it is written beside training."""
    run.changes.adopt()
    try:
        if saving.settings.async_policy == "refuse":
            saving.background.refuse_another(saving.group)
        collected = _collected(run, client_state, exclude_frozen)
        arguments = {"exclude_frozen_parameters": bool(exclude_frozen)}
        return _save(saving, given, tag, collected, saving.terms(save_latest), arguments, beside)
    except CheckpointError as error:
        saving.report(error)
        return False


@dataclass(frozen=True, slots=True)
class CollectedState:
    """What a rank brings to a save."""

    held: Sequence[HeldItem]
    facts: Mapping[str, Any]
    """Of the run: those of the first rank are kept."""
    own: Mapping[str, Any]
    """Of the parts of the model on this rank: those of all ranks are merged."""


def _save(
    saving: Saving,
    given: Given,
    tag: str,
    collected: tuple[CollectedState | None, str | None],
    terms: SaveOptions,
    arguments: Mapping[str, object],
    beside: bool,
) -> bool:
    group, started = saving.group, time.perf_counter()
    _, unsaved = attempt(lambda: saving.report_failure(saving.background.wait))  # others may know it already
    root, unusable = attempt(lambda: folder_of(saving.settings, given))
    found, failure = collected
    found = found or CollectedState((), {}, {})
    needed = sum(item.nbytes for item in items_to_write(found.held, group.rank, ()))
    failure = unusable or unsaved or failure
    try:
        ticket = protocol.begin(root or Path(), tag, group, terms, needed=needed, failure=failure, arguments=arguments)
    except CheckpointError as error:
        raise UsageError(str(error)) if unusable else error from None
    mine = items_to_write(found.held, group.rank, ticket.nodes)
    known = [each.item.entry for each in found.held if not each.is_joint]
    items, uncopied = attempt(lambda: saving.background.staging.copies(mine)) if beside else (mine, None)

    def write() -> Written | None:
        try:
            return protocol.write(ticket, items or (), group, known)
        finally:
            protocol.let_go(items or ())

    def finish() -> None:
        written, failure = attempt(write) if items is not None else (None, uncopied)
        manifest = protocol.commit(ticket, written, failure, found.facts, group, terms, own=found.own)
        if manifest is not None and group.is_first:
            seconds = time.perf_counter() - started
            speed = manifest.nbytes / max(seconds, 1e-9) / 1e9
            log_dist(f"saved {ticket.folder}: {manifest.nbytes:,} bytes in {seconds:.2f} s ({speed:.2f} GB/s)")
            for observer in saving.told:
                observer.on_save(tag, found.facts["counters"]["global_steps"], seconds)

    if beside:
        saving.background.start(finish)
    else:
        finish()
    return True


def save_and_wait(saving: Saving, save: Callable[[], bool]) -> bool:
    """Let the save under way end, well or badly, then make another and wait for it too; whether that is there."""
    _, unsaved = attempt(saving.background.wait)
    if unsaved:
        get_logger().error("%s", unsaved)
    is_saved = save()
    saving.background.wait()
    return is_saved


def _collected(
    run: RunState, client_state: Mapping[str, Any], exclude_frozen: bool
) -> tuple[CollectedState | None, str | None]:
    if run.is_accumulating:
        warn_once(
            "save_checkpoint() in the middle of an accumulation: gradients are not saved, so the micro-batches since "
            "the last step are lost for a run that is resumed; save after a step"
        )

    def collect() -> CollectedState:
        weights = Weights.of(run.module, run.stores)
        skip = weights.frozen if exclude_frozen else frozenset[str]()
        trusts, place = run.settings.checkpoint.pickled_client_state, model_place(run.mesh)
        of_run, of_model = (Encoder(root, allow_pickle=trusts) for root in ("client_state", f"extra_state{place}"))
        facts = facts_of(run, client_state, of_run)
        own = weights.facts(skip) | {"extra": of_model.encode(extra_states(run.modules))}
        held = everything_held(run, weights, skip)
        for encoder, holders in ((of_run, tuple(range(run.mesh.layout.world))), (of_model, run.mesh.same_piece)):
            pieces = (piece_of_whole(name, value) for name, value in encoder.tensors.items())
            held += (HeldItem(Item(CLIENT, piece), holders, is_joint=True) for piece in pieces)
        return CollectedState(held, facts, own)

    return attempt(collect)


def everything_held(run: RunState, weights: Weights, skip: frozenset[str]) -> list[HeldItem]:
    """Weights, optimizer states and random states of this rank."""
    rank = run.mesh.rank
    held = list(weights.held(rank, run.mesh.same_piece, skip))
    if run.optimizer is not None:
        held += held_states(run.optimizer, run.stores, rank)
    return [*held, HeldItem(Item(RANDOM, piece_of_whole(role_of(run.mesh), _random_states(run))), (rank,))]


def model_place(mesh: Mesh) -> str:
    """Which part of a model a rank has, for names of what modules want to have saved; empty for the first part."""
    first = mesh.same_piece[0]
    return f" of rank {first}" if first else ""


def role_of(mesh: Mesh) -> str:
    """Who a rank is, for its random numbers: the same at every number of ranks."""
    return " ".join(f"{axis}={place}" for axis, place in mesh.role.items())


def _random_states(run: RunState) -> Tensor:
    """The random states of a rank, as bytes."""
    states = {
        "stream": run.stream.state_dict(),
        "process": process_state(),
        "named": Checkpointing.current().streams.get_states(),
    }
    return pack(states)


def facts_of(run: RunState, client_state: Mapping[str, Any], encoder: Encoder) -> dict[str, Any]:
    """Everything of a run that is not a tensor."""
    if not isinstance(client_state, Mapping):
        raise UsageError(f"client_state is a {type(client_state).__name__}: give a dict")
    optimizer, scheduler, loader, names = run.optimizer, run.scheduler, run.loader, run.groups
    facts: dict[str, Any] = {
        "versions": {"mizzen": version_of("mizzen"), "torch": torch.__version__, "python": platform.python_version()},
        "layout": run.mesh.degrees,
        "config": plain(run.settings),
        "seed": run.seed,
        "counters": {
            "global_steps": run.applied_steps,
            "global_samples": run.global_samples,
            "skipped_steps": run.skipped_steps,
            "micro_steps": run.micro_steps,
        },
        "batch": {"train": run.batch.train, "accumulation": run.batch.accumulation},
        "data": loader.state_dict() if isinstance(loader, Loader) else None,
        "client": encoder.encode(dict(client_state)),
    }
    for layers in (vars(module).get("layer_list") for module in run.modules):
        if isinstance(layers, LayerList):  # every chunk of a model knows all layers
            facts["layers"] = [layer.path for layer in layers.layers]
    if optimizer is not None:
        padded = [*names, *[()] * (len(optimizer.param_groups) - len(names))]
        facts["optimizer"] = {
            "type": type(optimizer).__name__,
            "groups": encoder.encode(groups_of(optimizer, padded), "optimizer.param_groups"),
        }
        facts["scaler"] = run.scaler.state_dict()
    if scheduler is not None and "state_dict" in dir(scheduler):
        facts["scheduler"] = {
            "type": type(scheduler).__name__,
            "state": encoder.encode(scheduler.state_dict(), "lr_scheduler"),
        }
    return facts
