import io
import sys

import pytest

from mizzen.monitor.screen import Screen

ERASE = "\x1b[2K"


def test_a_line_stays(capsys):
    Screen().say("hello")
    assert capsys.readouterr() == ("", "mizzen: hello\n")


def test_the_passing_line_is_drawn_over_and_gives_way_to_lines_that_stay(terminal):
    seen = terminal()
    screen = Screen()
    assert screen.can_redraw
    screen.show("one")
    screen.show("two")
    assert seen() == f"one\r{ERASE}two\r"
    screen.say("stays")
    assert seen() == f"{ERASE}mizzen: stays\r\n"
    screen.erase()
    screen.keep()
    assert seen() == "", "nothing is drawn any more"
    screen.show("last")
    screen.keep()
    assert seen() == "last\r\r\n"


def test_the_passing_line_never_wraps(terminal):
    seen = terminal()
    Screen().show("x" * 300)
    assert seen() == "x" * 99 + "…\r"


def test_it_leaves_cursor_and_streams_alone(terminal):
    seen = terminal()
    before = sys.stdout, sys.stderr
    screen = Screen()
    screen.show("line")
    assert (sys.stdout, sys.stderr) == before
    assert "\x1b[?25l" not in seen(), "a hidden cursor would stay hidden after a kill"


@pytest.mark.parametrize("kind", ["file", "dumb terminal"])
def test_where_a_line_cannot_be_written_over(kind, request, monkeypatch):
    if kind == "dumb terminal":
        request.getfixturevalue("terminal")()
        monkeypatch.setenv("TERM", "dumb")
    else:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not Screen().can_redraw


def test_a_terminal_that_has_gone_away_is_given_up(monkeypatch, warned):
    class Gone(io.StringIO):
        writes = 0

        def write(self, text):
            Gone.writes += 1
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Gone())
    screen = Screen()
    screen.say("one")
    screen.say("two")
    screen.show("three")
    assert Gone.writes == 1
    assert [text.split(":")[0] for text in warned] == ["standard error"]
