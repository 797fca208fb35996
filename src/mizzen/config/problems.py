"""Everything that is wrong with a configuration, and what in it changes nothing. `load` stops at the first kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mizzen.config.checks import why_without_effect
from mizzen.config.describe import fate_words
from mizzen.config.load import ConfigSource, load, read_source
from mizzen.config.migrate import Problem, drop_ignored, name_keys, spread_paths, walk
from mizzen.config.optimizer import check_optimizer, check_scheduler
from mizzen.config.schema import Config
from mizzen.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Findings:
    """The parsed configuration unless there are problems, and notes on keys that are old or without effect."""

    config: Config | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def examine(source: ConfigSource, *, pass_over: bool = False) -> Findings:
    """Look for every problem that can be found without knowing the number of ranks.

    With `pass_over`, as the drop-in does, keys that DeepSpeed does not read are notes.
    """
    try:
        raw = read_source(source)
        ignored = drop_ignored(raw, Config) if pass_over else []
        spread_paths(raw)
        unknown = name_keys(raw, Config)
    except ConfigError as error:
        return Findings(None, _split(error), ())
    for path, _ in unknown:
        _drop(raw, path)
    problems = [f"{path}: {message}" for path, message in unknown]
    try:
        config = load(raw)
    except ConfigError as error:
        problems += _unless_caused_by(unknown, _split(error))
        return Findings(None, tuple(dict.fromkeys(problems)), ())
    notes = (*(f"{key}: not read, there and here" for key in ignored), *_notes(raw, config))
    return Findings(None if problems else config, tuple(problems), notes)


def _split(error: ConfigError) -> tuple[str, ...]:
    return tuple(str(error).split("\n  also "))


def _drop(raw: Any, path: str) -> None:
    """Remove what stands at a path; keys may have dots, so each is compared whole."""
    holders = list(raw.items()) if isinstance(raw, dict) else list(enumerate(raw)) if isinstance(raw, list) else []
    for key, inner in holders:
        if path == str(key):
            del raw[key]
        elif path.startswith(f"{key}."):
            _drop(inner, path.removeprefix(f"{key}."))


def _unless_caused_by(unknown: list[Problem], found: tuple[str, ...]) -> Iterator[str]:
    """A key that is missing beside a misspelt one is most likely that one."""
    sections = {path.rpartition(".")[0] for path, _ in unknown}
    for problem in found:
        path, _, message = problem.partition(": ")
        if not (message.startswith("required here") and path.rpartition(".")[0] in sections):
            yield problem


def _notes(raw: dict[str, Any], config: Config) -> Iterator[str]:
    for found in walk(raw, Config):
        if found.fate.kind == "moved":
            yield f"{found.path}: {fate_words(found.fate)}"
        elif reason := why_without_effect(found, config):
            yield f"{found.path}: no effect: {reason}"
    if autos := config.autos():
        yield f'filled in by the client, where the file says "auto": {", ".join(autos)}'


def wrong_names(config: Config) -> Iterator[ConfigError]:
    """What `initialize` would say of the names in a configuration."""
    for section, check in ((config.optimizer, check_optimizer), (config.scheduler, check_scheduler)):
        try:
            if section is not None:
                check(section.type)
        except ConfigError as error:
            yield error
