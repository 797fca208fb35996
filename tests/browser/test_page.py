"""The page of `mizzen watch` in a real browser, on runs of real ranks."""

import json
import signal
import subprocess
import sys

import pytest

from browser.conftest import TRAIN, packages, serving
from launches import COMMAND, environment


def steps_of(events):
    return [json.loads(line) for line in events.read_text().splitlines()]


def first_run(visit, address, **how):
    seen = visit(**how)
    seen.open(address)
    return seen


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_number_comes_from_the_events(visit, finished, dark, width):
    steps = steps_of(finished)
    last = steps[-1]
    with serving(finished) as server:
        seen = first_run(visit, server.address, dark=dark, width=width)
        [loss] = seen.drawn("loss")
        assert len(loss["y"]) == len(steps) == 41
        assert [y for y in loss["y"] if y is not None] == [step["loss"] for step in steps if step["applied"]]
        [speed] = seen.drawn("tokens_per_sec")
        measured = [step["measures"]["tokens_per_sec"] for step in steps[1:] if "measures" in step]
        assert speed["y"] == (measured or [step["tokens"] / step["seconds"] for step in steps[1:]])
        for name, values in (
            ("lr", [step["lr"][0] for step in steps]),
            ("grad_norm", [step["grad_norm"] for step in steps]),
        ):
            assert seen.drawn(name)[0]["y"] == [None if isinstance(value, str) else value for value in values]
        figures = seen.figures()
        assert figures["step"] == "40" and figures["skipped_steps"] == "1"
        assert float(figures["loss"]) == pytest.approx(last["loss"], rel=1e-4)
        assert float(figures["lr"]) == pytest.approx(last["lr"][0], rel=1e-4)
        assert len(seen.drawn("memory per rank")) == 4
        assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        seen.check(server.address)


def test_four_ranks_the_plan_and_what_happened(visit, finished):
    with serving(finished) as server:
        seen = first_run(visit, server.address)
        assert seen.texts(".run .state") == ["finished"]
        tiles = seen.texts(".rank")
        assert [tile.splitlines()[0] for tile in tiles] == [f"rank {number}" for number in range(4)]
        assert all("ended" in tile and "step 40" in tile and "MiB" in tile for tile in tiles)
        assert "ZeRO stage 2 over dp=4" in seen.texts(".plan pre")[0]
        assert "4 ranks: pp 1 × dp 4" in seen.page.text_content(".plan svg")
        happened = " | ".join(seen.texts("#marks li"))
        for word in ("checkpoint", "global_step15", "global_step30", "gradient not finite on rank 0", "4 ranks"):
            assert word in happened
        lines = seen.page.eval_on_selector('.plot[data-name="loss"]', "box => box.layout.shapes.length")
        assert lines == 4  # start, two checkpoints, one skipped step
        seen.check(server.address)


def test_it_follows_a_run_that_goes_on(visit, tmp_path):
    events = tmp_path / "run.jsonl"
    events.touch()
    words = ["--num_gpus", "4", "--no_local_rank", str(TRAIN), str(tmp_path), "--steps", "150", "--pause", "0.1"]
    job = subprocess.Popen([*COMMAND, *words], env=environment(**packages()), stderr=subprocess.DEVNULL)
    try:
        with serving(events) as server:
            seen = first_run(visit, server.address)
            seen.until("document.querySelectorAll('.rank.alive').length === 4")
            assert seen.texts(".run .state") == ["running"]
            read = "Number(document.querySelector('dd[data-name=step]').innerText)"
            before = seen.page.evaluate(read)
            seen.until(f"{read} > {before + 3}")
            points = len(seen.drawn("loss")[0]["y"])
            assert job.wait(120) == 0
            seen.until("document.querySelector('.run .state').innerText === 'finished'")
            assert points < len(seen.drawn("loss")[0]["y"]) == len(steps_of(events)) == 150
            seen.check(server.address)
    finally:
        job.kill()


def test_a_rank_that_died_is_told(visit, lost):
    with serving(lost) as server:
        seen = first_run(visit, server.address)
        assert seen.texts(".run .state") == ["failed"]
        assert "rank 2 on" in seen.texts(".run .words")[0] and "signal 9 (SIGKILL)" in seen.texts(".run .words")[0]
        happened = " | ".join(seen.texts("#marks li"))
        assert "restart" in happened and "went on after step 15" in happened
        assert None in seen.drawn("loss")[0]["y"]  # the line breaks where the run went back
        seen.check(server.address)


def test_several_runs_are_compared(visit, finished, lost):
    with serving(finished, lost) as server:
        seen = first_run(visit, server.address)
        assert seen.texts(".run strong") == ["run", "lost"]
        assert seen.page.is_checked("input[value=step]")
        first, second = seen.drawn("loss")
        assert first["x"][:3] == second["x"][:3] == [1, 2, 3]
        seen.page.check("input[value=elapsed]", force=True)
        assert 0 <= seen.drawn("loss")[1]["x"][0] < 1
        seen.page.click("#more summary")
        assert len(seen.drawn("samples")) == 2
        seen.check(server.address)


def test_one_file_shows_the_same_without_a_server(visit, finished, tmp_path):
    out = tmp_path / "page.html"
    words = ["-m", "mizzen.cli", "watch", str(finished), "--export", str(out)]
    subprocess.run([sys.executable, *words], check=True, env={**environment(), "PYTHONPATH": ":".join(sys.path)})
    seen = first_run(visit, out.as_uri())
    assert seen.texts(".run .state") == ["finished"] and "exported" in seen.texts("#link")[0]
    assert len(seen.drawn("loss")[0]["y"]) == 41 and len(seen.texts(".rank")) == 4
    seen.check(out.as_uri())


def test_the_command_says_where_the_page_is_and_the_page_says_when_it_ends(visit, finished):
    words = [sys.executable, "-m", "mizzen.cli", "watch", str(finished)]
    job = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "PYTHONPATH": ":".join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs do not hear it
    )
    try:
        seen = first_run(visit, job.stdout.readline().strip())
        assert seen.texts("#link") == ["live"]
        job.send_signal(signal.SIGINT)
        assert job.wait(30) == 130
        seen.page.wait_for_selector("#link.gone")
        assert seen.figures()["step"] == "40"
    finally:
        job.kill()


EVIL = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<a href='javascript:alert(1)'>x</a>",
    "<b>bold</b>&lt;i&gt;{{7*7}}${alert(1)}",
    "__proto__",
    "constructor",
]


@pytest.fixture
def hostile(tmp_path):
    """A run in which every text that a page shows was written by somebody who means harm."""
    name = "<a href='https:x'><img src=x onerror=alert(1)>"  # plotly knows links; no slash, since it is a file's name
    events, ranks = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.ranks"
    ranks.mkdir()
    time = "2026-03-01T12:00:{:02}+00:00"
    lines = [{"step": number, "applied": True, "loss": 1.0, "samples": 1} for number in (1, 2)]
    lines += [{"step": 2, "applied": False, "reason": evil, evil: 3.0, "phases": {evil: 1.0}} for evil in EVIL]
    lines += [{"event": evil, "value": number, "global_samples": 1} for number in (1, 2) for evil in EVIL]
    events.write_text("".join(json.dumps({"time": time.format(at), **line}) + "\n" for at, line in enumerate(lines)))
    plan = {"text": "".join(EVIL), "layout": {"dp": EVIL[0], EVIL[1]: 1}, "cost": {evil: 5 for evil in EVIL}}
    for rank in (0, 1):
        notes = [
            {"kind": "start", "rank": rank, "world": 2, "host": EVIL[1], "heartbeat": 1, "plan": plan},
            {"kind": "save", "tag": EVIL[0], "step": 1, "seconds": 1},
            {"kind": "end", "error": "".join(EVIL), "step": 1, "phase": EVIL[2], "waiting": EVIL[3]},
        ]
        text = "".join(json.dumps({"time": time.format(9), **note}) + "\n" for note in notes)
        (ranks / f"rank-{rank}.jsonl").write_text(text)
    (ranks / "launcher-x.jsonl").write_text(
        json.dumps({"time": time.format(59), "kind": "ending", "code": 1, "text": EVIL[1]}) + "\n"
    )
    return events


def look_at_all(seen, name):
    assert seen.texts(".run strong")[0] == name
    seen.page.click("#more summary")
    for evil in EVIL[:2]:
        assert evil in "".join(seen.texts("#marks li"))
    assert "".join(EVIL) in seen.texts(".plan pre")[0]
    seen.until("document.querySelectorAll('#more .plot .main-svg').length > 6")
    # What plotly draws when the mouse comes by: the name of the run.
    seen.page.eval_on_selector(
        '.plot[data-name="loss"]', "box => Plotly.Fx.hover(box, [{curveNumber: 0, pointNumber: 0}])"
    )
    seen.until("document.querySelector('.hoverlayer').textContent.includes('onerror')")
    found = "document.querySelectorAll('main img, main a, main script, main iframe, main b, main svg[onload]').length"
    assert seen.page.evaluate(found) == 0
    assert seen.page.evaluate("({}).x === undefined && Object.keys(Object.prototype).length === 0")


def test_no_text_of_a_run_becomes_markup(visit, hostile, finished):
    with serving(hostile, finished) as server:
        seen = first_run(visit, server.address)
        look_at_all(seen, hostile.stem)
        seen.check(server.address)


def test_nor_in_an_exported_file(visit, hostile, finished, tmp_path):
    from mizzen.watch.run import Watcher, find_runs
    from mizzen.watch.server import exported_page

    watcher = Watcher(find_runs([str(hostile), str(finished)]))
    watcher.read_all()
    out = tmp_path / "page.html"
    out.write_text(exported_page(watcher.since(0)))
    seen = first_run(visit, out.as_uri())
    look_at_all(seen, hostile.stem)
    seen.check(out.as_uri())


def test_an_inline_script_would_not_run(visit, finished):
    with serving(finished) as server:
        seen = first_run(visit, server.address)
        seen.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=alert(1)>')")
        seen.page.wait_for_timeout(300)
        for _ in range(100):
            if any("Content Security Policy" in each for each in seen.complaints):
                break
            seen.page.wait_for_timeout(100)
        assert any("Content Security Policy" in each for each in seen.complaints)
        assert not any(each.startswith("dialog") for each in seen.complaints)
