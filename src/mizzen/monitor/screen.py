"""Rank 0's standard error: lines that stay, and at most one that is written over.

The line that is written over is drawn without a thread, without hiding the cursor and without taking over `sys.stderr`,
so that a killed run leaves a sane terminal and bars of the user's own keep working.
"""

import sys
from functools import cached_property
from typing import TYPE_CHECKING

from mizzen.monitor.guard import Guard

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """say() writes a line for good; show() draws the passing line, and keep() or the next say() ends it."""

    def __init__(self) -> None:
        self._guard = Guard("standard error")
        self._is_drawn = False

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console  # 60 ms that runs without a terminal do not pay

        return Console(stderr=True, highlight=False)

    @property
    def can_redraw(self) -> bool:
        """Whether a line can be written over: standard error is a terminal that knows how."""
        return sys.stderr.isatty() and not self._console.is_dumb_terminal

    def say(self, text: str) -> None:
        """Write a line."""
        self.erase()
        self._write(f"mizzen: {text}\n")

    def show(self, markup: str) -> None:
        """Draw the passing line, in rich's markup, cut to the width of the terminal."""
        self.erase()
        if self._guard.is_open:
            with self._guard:
                # The cursor goes back to the first column: what others print next starts there and not after our text.
                self._console.print(markup, end="\r", no_wrap=True, overflow="ellipsis", crop=True)
                self._is_drawn = True

    def erase(self) -> None:
        """Take the passing line away, before something else is written."""
        self._end_with("\x1b[2K")

    def keep(self) -> None:
        """Let the passing line stay as it is, and go on below it."""
        self._end_with("\n")

    def _end_with(self, text: str) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(text)

    def _write(self, text: str) -> None:
        if self._guard.is_open:
            with self._guard:
                sys.stderr.write(text)
                sys.stderr.flush()
