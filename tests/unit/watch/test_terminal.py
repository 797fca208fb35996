import io

from rich.console import Console

from mizzen.watch.terminal import show, sparkline


def drawn(written):
    out = io.StringIO()
    show(written.watcher, Console(file=out, width=100))
    return out.getvalue()


def test_the_essentials_of_a_run(written):
    written.write("rank-0", kind="start", rank=0, world=20, host="a", heartbeat=0)
    for rank in range(20):
        written.write(f"rank-{rank}", at=1, kind="beat", step=2, phase="forward", memory={"allocated": 2**30})
    written.write("rank-17", at=2, kind="end", error="ValueError: boom", step=2)
    for number in (1, 2, 3):
        written.step(number, tokens=5000, seconds=0.5, measures={"mfu": 0.413, "comm_exposed_ms_dp": 1.5})
    text = drawn(written)
    assert "run" in text and "failed" in text and "rank 17: ValueError: boom" in text
    assert "41.3%" in text and "10,000" in text and "0.33333" in text and "1.00 GiB" in text and "█" in text
    assert "and 4 more ranks" in text and "ValueError: boom" in text.split("heard")[1].splitlines()[1]


def test_a_text_cannot_steer_the_terminal(written):
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n[bold red]x[/]\u202e"
    written.write("rank-0", kind="start", rank=0, world=1, host=evil, heartbeat=0)
    written.write("rank-0", kind="end", error=evil, step=1, phase=evil)
    written.step(1, applied=False, reason=evil)
    text = drawn(written)
    assert not set("\x1b\x07\x9b\r\u202e") & set(text)
    assert "[bold red]x[/]" in text


def test_a_small_drawing():
    assert sparkline([0, 1, 2, float("nan"), 7]) == "▁▂▃█"
    assert sparkline([3, 3]) == "▁▁" and sparkline([]) == "" and len(sparkline([*range(1000)])) <= 60
