"""`load_checkpoint`: the state of an engine out of a checkpoint of any layout."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.checkpoint.choose import CALL, LoadRequest, ask_together, candidates_together, open_together
from mizzen.checkpoint.rank_group import RankGroup, attempt, in_words
from mizzen.checkpoint.read import Reader
from mizzen.checkpoint.tagged_json import PICKLED, decode, has_pickles, unpack
from mizzen.checkpoint.write import WEIGHT
from mizzen.data.loader import Loader
from mizzen.engine.access import refresh_masters
from mizzen.engine.budgets import tell_other_budgets
from mizzen.engine.optimizer_states import create_states, fill_states, set_groups
from mizzen.engine.randomness import restore_process
from mizzen.engine.run_state import RunState
from mizzen.engine.saving import CLIENT, RANDOM, Given, Saving, folder_of, preflight, role_of
from mizzen.engine.weights import Weights, set_extra_states
from mizzen.errors import CheckpointError, UsageError
from mizzen.log import get_logger, log_dist, warn_once
from mizzen.optim.rules import has_stepped, renew_states
from mizzen.rewrite.recompute import Checkpointing
from mizzen.wording import and_more

SHOWN: Final = 8
STATES: Final = 1 << 22
"""Bytes that the random states of a role may have: some thousand for each generator."""
MIXED: Final = "The engine's state is now a mixture: load another checkpoint"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What of a checkpoint is wanted."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom: Callable[..., None] | None = None
    must_be_there: bool = True
    """Whether it deserves a warning that there is none."""

    def arguments(self) -> dict[str, object]:
        """The arguments of `load_checkpoint` that these are, by their names."""
        return {
            "load_module_strict": bool(self.strict),
            "load_module_only": bool(self.module_only),
            "load_optimizer_states": bool(self.optimizer),
            "load_lr_scheduler_states": bool(self.scheduler),
            "whether there is a custom_load_fn": self.custom is not None,
        }

    @property
    def continues(self) -> bool:
        """Whether the run of the checkpoint goes on; otherwise it is another, which may not delete what that saved."""
        return self.optimizer and not self.module_only


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How the names of a checkpoint and of a model fit."""

    missing: tuple[str, ...] = ()
    """In the model, not in the checkpoint: they keep their values."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the model."""
    misshaped: tuple[str, ...] = ()
    """In both, with another shape: they keep their values."""
    states: tuple[str, ...] = ()
    """Optimizer states that the checkpoint lacks: they start from zero."""

    @property
    def is_exact(self) -> bool:
        """Whether every name of the model was found, and no other."""
        return not (self.missing or self.unexpected or self.misshaped)

    def __str__(self) -> str:
        rows = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of another shape", self.misshaped),
            ("optimizer states missing", self.states),
        )
        return "; ".join(f"{len(names)} {what}: {and_more(names, SHOWN)}" for what, names in rows if names)


@dataclass(frozen=True, slots=True)
class Match:
    """A checkpoint laid beside a model."""

    weights: Weights
    names: Mapping[str, str]
    """Of the model's names those that are read, with what they are called in the checkpoint."""
    report: LoadReport

    @classmethod
    def of(cls, weights: Weights, reader: Reader) -> "Match":
        """Find every name, under another name of the same tied tensor if need be."""
        stored = {name: entry for (kind, name), entry in reader.entries.items() if kind == WEIGHT}
        aliases: dict[str, str] = dict(_names(reader, "aliases", dict))
        excluded = set(_names(reader, "excluded", list))
        others: dict[str, list[str]] = {}
        for alias, name in weights.aliases.items():
            others.setdefault(name, []).append(alias)
        names, missing, misshaped = {}, [], []
        for name, shape in weights.shapes.items():
            tried = [name, aliases.get(name, name), *others.get(name, [])]
            found = next((each for each in tried if each in stored), None)
            if found is None:
                missing += [] if name in excluded else [name]
            elif stored[found].shape != shape:
                misshaped.append(f"{name} {list(stored[found].shape)} instead of {list(shape)}")
            else:
                names[name] = found
        known = {*names.values(), *weights.shapes, *weights.aliases}
        unexpected = [name for name in stored if name not in known]
        return cls(weights, names, LoadReport(tuple(missing), tuple(unexpected), tuple(misshaped)))

    def of_all(self, group: RankGroup) -> "Match":
        """This match with a report that holds for all ranks. They may have different parts of the model: a name that
        one of them knows is not unexpected.
        """
        said: list[LoadReport] = group.all_gather(self.report, CALL)
        unexpected = set(self.report.unexpected).intersection(*(each.unexpected for each in said))
        return replace(
            self,
            report=LoadReport(
                _all_of(each.missing for each in said),
                tuple(name for name in self.report.unexpected if name in unexpected),
                _all_of(each.misshaped for each in said),
            ),
        )


def _all_of(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def _names(reader: Reader, key: str, kind: type[dict[str, str]] | type[list[str]]) -> Any:
    """Names that the facts have under a key: a list of them, or a dict from one to another."""
    found = reader.manifest.facts.get(key) or kind()
    texts = found.values() if isinstance(found, dict) else found
    if not isinstance(found, kind) or not all(isinstance(each, str) for each in texts):
        raise CheckpointError(f"{reader.folder}: its facts cannot be used: '{key}' is no {kind.__name__} of names")
    return found


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    folder: str
    client: dict[str, Any]
    report: LoadReport


def load_checkpoint(
    run: RunState, saving: Saving, given: Given, tag: str | None, options: LoadOptions
) -> Loaded | None:
    """Load one, or an older one where the configuration says so; None when there is none."""
    run.changes.adopt()
    group, settings = saving.group, run.settings.checkpoint
    _, unsaved = attempt(saving.background.wait)
    if unsaved:
        get_logger().error("%s", unsaved)
    asked = _ask(saving, given, tag, options)
    tried = candidates_together(asked, group, with_older=settings.on_corrupt == "previous")
    if not tried:
        tag = asked.tag
        what = f"there is no checkpoint '{tag}' in {asked.root}" if tag else f"there is no checkpoint in {asked.root}"
        if options.must_be_there:
            log_dist(f"{what}: nothing was loaded", level=logging.WARNING)
        return None
    for number, chosen in enumerate(tried):
        try:
            with open_together(asked, chosen, group) as reader:
                folder = reader.folder
                match = Match.of(Weights.of(run.module, run.stores), reader).of_all(group)
                if options.strict and not match.report.is_exact and options.custom is None:
                    raise Unfit(
                        f"{folder} does not fit the model: {match.report}. load_module_strict=False loads the rest"
                    )
                if has_pickles(reader.manifest.facts) and not settings.pickled_client_state:
                    raise Unfit(f"{folder}: {PICKLED}")
                client, report = _load(run, group, reader, match, options)
                if options.continues:
                    tell_other_budgets(run.settings, reader.manifest.facts, folder)
                    saving.run = reader.manifest.run
        except Unfit as error:
            raise CheckpointError(str(error)) from None
        except CheckpointError as error:
            if number + 1 == len(tried):
                raise
            get_logger().error("%s. The checkpoint before it, '%s', is tried", error, tried[number + 1])
            continue
        if not report.is_exact or report.states:
            log_dist(f"{folder} was loaded, but not all fitted: {report}", level=logging.WARNING)
        preflight(run, folder.parent)
        return Loaded(str(folder), client, report)
    raise AssertionError(f"none of {tried} was loaded, and none has failed")


def _ask(saving: Saving, given: Given, tag: str | None, options: LoadOptions) -> LoadRequest:
    """What all ranks want to load. What a load reads and sets has to be asked for by all of them alike."""
    settings = saving.settings
    root, unusable = attempt(lambda: folder_of(settings, given))
    try:
        return ask_together(
            root or Path(),
            tag,
            saving.group,
            validation=settings.tag_validation,
            is_local=settings.use_node_local_storage,
            failure=unusable,
            arguments=options.arguments(),
        )
    except CheckpointError as error:
        raise UsageError(str(error)) if unusable else error from None


class Unfit(CheckpointError):
    """A checkpoint that is whole, and of another model or not trusted: an older one must not be taken for it."""


def _load(
    run: RunState, group: RankGroup, reader: Reader, match: Match, options: LoadOptions
) -> tuple[dict[str, Any], LoadReport]:
    """Read everything on every rank, then set what is no tensor; where one rank fails, all do."""
    optimizer = run.optimizer
    has_states = any(kind not in (WEIGHT, RANDOM, CLIENT) for kind, _ in reader.entries)
    wants_states = options.optimizer and optimizer is not None
    if wants_states and has_states and optimizer is not None and not (optimizer.state and has_stepped(optimizer)):
        create_states(optimizer, run.stores)
    read, failure = attempt(lambda: _read(run, reader, match, options, wants_states and has_states))
    said = group.all_gather((failure, read[2] if read else []), CALL)
    failures = {rank: words for rank, (words, _) in enumerate(said) if words}
    missing = list(dict.fromkeys(name for _, names in said for name in names))
    if failures:
        raise CheckpointError(f"{reader.folder}: {in_words(failures)}. {MIXED}")
    if missing and options.strict:
        raise Unfit(
            f"{reader.folder}: {len(missing)} optimizer states are not in the checkpoint: "
            f"{and_more(missing, SHOWN)}; load_optimizer_states=False starts the optimizer afresh, "
            f"load_module_strict=False only those. {MIXED}"
        )
    if read is None:
        raise AssertionError("what was read without a word is not there")
    client, extra, _, whole = read
    if options.optimizer and optimizer is not None and not has_states:
        warn_once(f"{reader.folder} has no optimizer states: the optimizer starts afresh")
        renew_states(optimizer)
    if options.custom is not None:
        options.custom(src=whole, dst=run.module)
        refresh_masters(run.module)
    else:
        for store in run.stores:
            store.write_back()
    set_extra_states(run.modules, extra)
    _set_facts(run, reader, options)
    return client, replace(match.report, states=tuple(missing))


def _read(
    run: RunState, reader: Reader, match: Match, options: LoadOptions, with_states: bool
) -> tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Tensor]]:
    """What this rank needs. Nothing here waits for another rank."""
    facts, trusts = reader.manifest.facts, run.settings.checkpoint.pickled_client_state
    client, extra = (
        decode(facts.get(key, {}), partial(reader.whole, CLIENT), allow_pickle=trusts) for key in ("client", "extra")
    )
    if not (isinstance(client, dict) and isinstance(extra, dict)):
        raise CheckpointError("its facts cannot be used: 'client' and 'extra' are not both dicts")
    whole = {}
    if options.custom is not None:
        whole = {name: reader.whole(kind, name) for kind, name in reader.entries if kind == WEIGHT}
    else:
        with torch.no_grad():
            for piece in match.weights.pieces:
                if piece.name in match.names:
                    reader.fill(WEIGHT, piece, match.names[piece.name])
    missing: list[str] = []
    if with_states and run.optimizer is not None:
        missing = fill_states(run.optimizer, run.stores, reader, match.names)
    if not options.module_only:
        _restore_random(run, reader)
    return client, extra, missing, whole


def _restore_random(run: RunState, reader: Reader) -> None:
    """Random numbers go on where the same role left them.

    [Note: ranks that did not exist]
    A role that was not saved gets a stream of its own, from the run's seed, its place and the step, so that it draws
    what no other rank draws. The process's own numbers, by which scripts choose alike on all ranks, are the first's.
    """
    facts, stream = reader.manifest.facts, run.stream
    role = role_of(run.mesh)
    roles = [name for kind, name in reader.entries if kind == RANDOM]
    if not roles:
        return
    name = role if role in roles else min(roles)
    if (size := reader.entries[RANDOM, name].nbytes) > STATES:
        raise CheckpointError(f"{reader.folder}: the random states of '{name}' have {size:,} bytes; at most {STATES:,}")
    mine = unpack(reader.whole(RANDOM, name))
    try:
        restore_process(mine["process"])
        if stream.is_own and role in roles and mine["stream"]:
            stream.load_state_dict(mine["stream"])
        elif stream.is_own:
            stream.restart(int(facts["seed"]), int(reader.manifest.step))
        if role in roles and mine["named"]:
            Checkpointing.current().streams.set_states(mine["named"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{reader.folder}: the random states of '{role}' cannot be used: {error}") from error


def _set_facts(run: RunState, reader: Reader, options: LoadOptions) -> None:
    """Counters, settings, schedule, scaler and data position."""
    if options.module_only:
        return
    facts = reader.manifest.facts
    try:
        counters, accumulation = facts.get("counters", {}), int(facts.get("batch", {}).get("accumulation", 1))
        run.applied_steps = int(counters.get("global_steps", 0))
        run.global_samples = int(counters.get("global_samples", 0))
        run.skipped_steps = int(counters.get("skipped_steps", 0))
        run.micro_steps = int(counters.get("micro_steps", 0)) // accumulation * run.batch.accumulation
        _set_optimizer(run, reader, options)
        loader, position = run.loader, facts.get("data")
        if isinstance(loader, Loader) and position is not None:
            loader.load_state_dict(position)
            run.set_loader(loader)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{reader.folder}: its facts cannot be used: {type(error).__name__}: {error}") from error


def _set_optimizer(run: RunState, reader: Reader, options: LoadOptions) -> None:
    facts, trusts = reader.manifest.facts, run.settings.checkpoint.pickled_client_state
    optimizer, scheduler, names = run.optimizer, run.scheduler, run.groups
    saved, read = facts.get("optimizer"), partial(reader.whole, CLIENT)
    if options.optimizer and optimizer is not None and saved is not None:
        padded = [*names, *[()] * (len(optimizer.param_groups) - len(names))]
        groups = decode(saved["groups"], read, allow_pickle=trusts)
        set_groups(optimizer, padded, groups, with_rates=options.scheduler)
        if facts.get("scaler") is not None:
            run.scaler.has_scaled = False
            run.scaler.load_state_dict(facts["scaler"])
    if not options.scheduler or scheduler is None or "load_state_dict" not in dir(scheduler):
        return
    if facts.get("scheduler") is None:
        warn_once("the checkpoint has no state of a learning-rate schedule: the schedule starts afresh")
        return
    if facts["scheduler"]["type"] not in ("", type(scheduler).__name__):
        warn_once(
            f"the checkpoint has the state of the schedule {facts['scheduler']['type']}, and the schedule is a "
            f"{type(scheduler).__name__}: it starts afresh"
        )
        return
    state = facts["scheduler"]["state"]
    scheduler.load_state_dict(decode(state, read, allow_pickle=trusts))
