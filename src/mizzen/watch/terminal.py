"""The essentials of some runs in a terminal, drawn with rich. Texts of a run are shown without control characters."""

import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mizzen.watch.run import Run, Watcher
from mizzen.wording import gib

PERIOD: Final = 1.0
BARS: Final = "▁▂▃▄▅▆▇█"
COLOURS: Final = {"running": "cyan", "alive": "cyan", "finished": "green", "ended": "green", "failed": "bold red"}
FIGURES: Final = {
    "loss": "loss",
    "lr": "lr",
    "grad_norm": "gradient norm",
    "tokens_per_sec": "tokens/s",
    "mfu": "MFU",
    "skipped_steps": "skipped",
}
MOST_RANKS: Final = 16


def show(watcher: Watcher, console: Console | None = None) -> None:
    """Draw until the user interrupts; where no person is looking, once."""
    console = console or Console()
    if not console.is_terminal:
        watcher.read_all()
        console.print(picture(watcher))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            until = time.monotonic() + PERIOD
            while watcher.look() and time.monotonic() < until:
                pass
            live.update(picture(watcher), refresh=True)
            time.sleep(max(0.0, until - time.monotonic()))


def picture(watcher: Watcher) -> RenderableType:
    """All runs, one below the other."""
    return Group(*(_run(run, run.since(0)) for run in watcher.runs))


def _run(run: Run, told: Mapping[str, Any]) -> Panel:
    colour = COLOURS.get(told["state"], "yellow")
    head = Text.assemble((told["state"], colour), "  ", _plain(told["words"]))
    figures = Table.grid(padding=(0, 3))
    latest = [("step", told["step"])] + [
        (title, told["latest"][name]) for name, title in FIGURES.items() if name in told["latest"]
    ]
    exposed = [value for name, value in told["latest"].items() if name.startswith("comm_exposed_ms")]
    latest += [("exposed ms", sum(value for value in exposed if not isinstance(value, str)))] if exposed else []
    figures.add_row(*(Text(title, style="dim") for title, _ in latest))
    figures.add_row(*(Text(_figure(title, value)) for title, value in latest))
    parts: list[RenderableType] = [head, figures]
    if "loss" in run.series:
        parts.append(Text.assemble(("loss  ", "dim"), sparkline(run.series["loss"].last)))
    if told["ranks"]:
        parts.append(_ranks(told["ranks"]))
    for mark in told["marks"][-3:]:
        moment = time.strftime("%H:%M:%S", time.localtime(mark["time"]))
        parts.append(Text(f"{moment}  step {mark['step']}  {mark['kind']}  {_plain(mark['text'])}", style="dim"))
    return Panel(Group(*parts), title=Text(_plain(told["name"])), title_align="left", border_style=colour)


def _ranks(ranks: list[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("rank", "state", "step", "where", "memory", "heard"):
        table.add_column(title, justify="right" if title in ("rank", "step", "memory", "heard") else "left")
    # Those that something is wrong with come first: the first lines are what a terminal has room for.
    order = sorted(ranks, key=lambda rank: (rank["state"] in ("alive", "ended"), rank["rank"]))
    for rank in order[:MOST_RANKS]:
        table.add_row(
            str(rank["rank"]),
            Text(rank["state"], style=COLOURS.get(rank["state"], "yellow")),
            str(rank["step"]),
            Text(_plain(rank["error"] or rank["where"])),
            gib(rank["memory"]) if rank["memory"] is not None else "",
            f"{rank['ago']:.0f} s",
        )
    left = len(ranks) - MOST_RANKS
    return Group(table, Text(f"and {left} more ranks", style="dim")) if left > 0 else table


def sparkline(values: list[float], width: int = 60) -> str:
    """The last values of a series as a row of small bars."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    step = max(1, len(finite) // width)
    shown = finite[::-1][::step][:width][::-1]
    low, high = min(shown), max(shown)
    return "".join(BARS[round((value - low) / (high - low) * 7) if high > low else 0] for value in shown)


def _figure(title: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.1%}" if title == "MFU" else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"


def _plain(text: str) -> str:
    """Without escape sequences and line ends: a log line must not move the cursor or recolour the terminal."""
    return "".join(sign if sign.isprintable() else "·" for sign in text)[:500]
