"""How systems take turns, and the command line that all benches have."""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.anatomy import render
from bench.player import Ready, Turn
from bench.record import Record, Result, load
from bench.team import PlayerError, Team


@dataclass(frozen=True, slots=True)
class Game:
    """What is played, by how many ranks, and how often."""

    workload: str
    """The module that players import; see `player.py`."""
    settings: dict[str, Any]
    """What its `prepare` is given."""
    systems: Sequence[str]
    rounds: int
    steps: int
    """Of one turn."""
    warm: int
    """Steps before the first turn of a start."""
    ranks: int = 1
    anew: bool = False
    """Whether a system starts again for every turn, because not all of them fit side by side."""
    environment: dict[str, str] = field(default_factory=dict)
    apart: dict[str, dict[str, str]] = field(default_factory=dict)
    """Variables that only some systems have."""

    def team(self, system: str) -> Team:
        """The ranks of one system."""
        return Team(self.workload, system, ranks=self.ranks, extra=self.environment | self.apart.get(system, {}))


@dataclass(slots=True)
class Score:
    """What one system has shown so far."""

    turns: list[list[float]] = field(default_factory=list)
    processor: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    setups: list[float] = field(default_factory=list)
    peak: int = 0
    held: int = 0
    resident: int = 0
    about: dict[str, str] = field(default_factory=dict)

    def start(self, team: Team, game: Game) -> None:
        """Let a team prepare and warm up."""
        ready: list[Ready] = team.ask("prepare", game.settings)
        self.setups.append(max(rank.setup for rank in ready))
        self.about = ready[0].about
        self.losses.clear()
        self._run(team, game.warm)

    def turn(self, team: Team, game: Game) -> None:
        """One turn; a step takes as long as it takes the slowest rank."""
        ranks = self._run(team, game.steps)
        self.turns.append([max(seconds) for seconds in zip(*(rank.seconds for rank in ranks), strict=True)])
        self.processor.append([mean(seconds) for seconds in zip(*(rank.processor for rank in ranks), strict=True)])

    def _run(self, team: Team, steps: int) -> list[Turn]:
        ranks: list[Turn] = team.ask("run", steps)
        self.peak = max(self.peak, *(rank.peak for rank in ranks))
        self.held = max(rank.held for rank in ranks)
        self.resident = max(self.resident, *(rank.resident for rank in ranks))
        self.losses += [mean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True)]
        return ranks

    def result(self, name: str) -> Result:
        """All of it."""
        setup = median(self.setups)
        losses = tuple(self.losses)
        return Result(name, self.turns, self.processor, losses, self.peak, setup, self.held, self.resident)


def play(game: Game, bench: str) -> Record:
    """All rounds. Every round has the systems in another order; one that fails is left out from then on, and named."""
    scores = {name: Score() for name in game.systems}
    failures: dict[str, str] = {}
    order = random.Random(0)
    before = load()
    with ExitStack() as stack:
        starts = range(game.rounds if game.anew else 1)
        teams = {(name, start): stack.enter_context(game.team(name)) for start in starts for name in game.systems}
        for number in range(game.rounds):
            for name in order.sample(game.systems, len(game.systems)):
                if name in failures:
                    continue
                team = teams[name, number if game.anew else 0]
                try:
                    if game.anew or number == 0:
                        scores[name].start(team, game)
                    scores[name].turn(team, game)
                    lap = 1000 * median(scores[name].turns[-1])
                    print(f"round {number + 1}: {name} {lap:.1f} ms a step", file=sys.stderr, flush=True)
                except PlayerError as error:
                    failures[name] = str(error)
                if game.anew or name in failures:
                    team.end()
    results = tuple(score.result(name) for name, score in scores.items() if name not in failures)
    settings = {
        **game.settings,
        **{"ranks": game.ranks, "rounds": game.rounds, "steps": game.steps, "warm": game.warm, "anew": game.anew},
    }
    about = {name: value for score in scores.values() for name, value in score.about.items()}
    return Record(bench, settings, results, failures, about, (before, load()))


def dissect(game: Game) -> int:
    """Print the anatomy of every system of a game, one after the other, as rank 0 saw it."""
    for name in game.systems:
        with game.team(name) as team:
            team.ask("prepare", game.settings)
            team.ask("run", max(game.warm, 2))
            print(render(name, team.ask("profile", max(game.steps, 3))[0]))
    return 0


def perform(game: Game, bench: str, report: Callable[[Record], str], options: argparse.Namespace) -> int:
    """What every bench does with the options of `parser_of`: play and print, or show where time goes; its exit code."""
    if options.profile:
        return dissect(game)
    record = play(game, bench)
    print(report(record))
    if options.json:
        record.write(options.json)
    return 1 if record.failures else 0


def parser_of(
    description: str, systems: Iterable[str], *, rounds: int, steps: int, warm: int, more: Iterable[str] = ()
) -> argparse.ArgumentParser:
    """The options that every bench has. Those in `more` take part only when they are asked for."""
    parser = argparse.ArgumentParser(description=description)
    usual, known = installed(systems), installed([*systems, *more])
    parser.add_argument("--systems", nargs="+", choices=known, default=usual, metavar="NAME", help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each system (default: {rounds})")
    parser.add_argument("--steps", type=int, default=steps, help=f"steps of a turn (default: {steps})")
    parser.add_argument("--warm", type=int, default=warm, help=f"steps before the first turn (default: {warm})")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything there")
    parser.add_argument("--profile", action="store_true", help="show where the time of a step goes instead")
    return parser


def installed(systems: Iterable[str]) -> list[str]:
    """Those of some systems that are here; DeepSpeed itself, as opposed to something else under its name."""
    spec = find_spec("deepspeed")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    has_peer = folder is not None and (folder / "git_version_info.py").exists()
    return [name for name in systems if has_peer or not name.startswith("deepspeed")]
