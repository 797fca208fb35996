"""Teams of real processes: who takes turns when, what is added up over ranks, and what becomes of those that fail."""

import sys
from pathlib import Path

import pytest
from bench import play as playing
from bench.play import Game, dissect, installed, play
from bench.player import Turn
from bench.team import PlayerError, Team

FOLDER = str(Path(__file__).parent)


@pytest.fixture
def game(monkeypatch):
    """A game of toys; players find the module beside this file."""
    monkeypatch.setenv("PYTHONPATH", ":".join([FOLDER, *(path for path in sys.path if path)]))

    def make(*systems, **changes):
        return Game(
            **{"workload": "toy", "settings": {}, "systems": systems, "rounds": 2, "steps": 2, "warm": 1} | changes
        )

    return make


def test_systems_take_turns_and_ranks_are_put_together(game):
    record = play(game("good", ranks=2), "toys")
    (result,) = record.results
    assert [len(turn) for turn in result.turns] == [2, 2]
    assert result.losses == (5.0, 6.0, 7.0, 8.0, 9.0)  # the mean of ranks 0 and 1, warm-up included
    assert result.peak > 10**7 and result.setup > 0
    assert record.settings["rounds"] == 2 and record.failures == {}
    assert record.surroundings["torch"]


@pytest.mark.wide  # processes cost seconds; turns, sums and failures are in the others
def test_those_that_start_anew_repeat_their_first_steps(game):
    (result,) = play(game("good", anew=True), "toys").results
    assert result.losses == (0.0, 1.0, 2.0)
    assert len(result.turns) == 2


@pytest.mark.wide
def test_one_that_fails_is_named_and_the_others_play_on(game):
    record = play(game("bad", "late", "dead", "good", steps=1), "toys")
    assert [result.name for result in record.results] == ["good"]
    assert "ValueError: cannot be built" in record.failures["bad"]
    assert "one too many" in record.failures["late"]
    assert "famous last words" in record.failures["dead"]


@pytest.mark.wide  # processes cost seconds; turns, sums and failures are in the others
def test_a_player_that_is_told_to_run_first_says_so(game):
    with game("good").team("good") as team, pytest.raises(PlayerError, match="before it was told to prepare"):
        team.ask("run", 1)


@pytest.mark.wide  # processes cost seconds; turns, sums and failures are in the others
def test_the_anatomy_of_a_step_is_shown(game, capsys):
    assert dissect(game("good")) == 0
    shown = capsys.readouterr().out
    assert "## good:" in shown and "aten::lift_fresh" in shown


def test_every_round_has_every_system_once_in_another_order(monkeypatch):
    played = []

    class Silent(Team):
        def __init__(self, workload, system, **others):
            self.system = system

        def ask(self, order, *arguments):
            if order == "prepare":
                return [playing.Ready(0.1, {})]
            played.append(self.system)
            return [Turn([1.0] * arguments[0], [1.0] * arguments[0], [0.0] * arguments[0], 1)]

        def end(self):
            pass

    monkeypatch.setattr(playing, "Team", Silent)
    names = list("abcdef")
    play(Game("toy", {}, names, rounds=5, steps=1, warm=0), "toys")
    turns = played[12:]  # after the first round, in which each also warms up
    rounds = [turns[start : start + 6] for start in range(0, len(turns), 6)]
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1


def test_a_stranger_under_the_peers_name_is_not_the_peer(monkeypatch, tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed(["ddp", "deepspeed-0"]) == ["ddp"]
    (tmp_path / "deepspeed" / "git_version_info.py").write_text("")
    assert installed(["ddp", "deepspeed-0"]) == ["ddp", "deepspeed-0"]
