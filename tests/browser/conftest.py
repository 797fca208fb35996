"""These tests open the page of `mizzen watch` in a browser; `make test-browser` runs them, `make test` does not."""

import os
import shutil
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from launches import launch

TRAIN = Path(__file__).with_name("train.py")


def pytest_collection_modifyitems(items):
    if not os.environ.get("BROWSER"):
        for item in items:
            if "/browser/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="make test-browser runs it"))


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; skips where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'mizzen[watch]'")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with api.sync_playwright() as play:
        # A sandbox needs user namespaces, which containers often lack; the pages here are our own.
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that is open, and everything that it did which it should not."""

    def __init__(self, context):
        self.page = context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address):
        self.page.goto(address)
        self.page.wait_for_selector(".run")

    def until(self, expression, patience=60):
        """Wait for something to be true in the page. Playwright's own wait evaluates texts there, which is refused."""
        end = time.monotonic() + patience
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(100)

    def texts(self, selector):
        return self.page.eval_on_selector_all(selector, "all => all.map(each => each.innerText)")

    def figures(self, run=0):
        """What the card of a run says, by the name of the number."""
        pairs = (
            "all => all.map(card => [...card.querySelectorAll('dd')].map(each => [each.dataset.name, each.innerText]))"
        )
        return dict(self.page.eval_on_selector_all(".run", pairs)[run])

    def drawn(self, name):
        """Horizontal and vertical values of the lines of a chart, as plotly holds them."""
        wanted = f'.plot[data-name="{name}"]'
        self.page.wait_for_selector(f"{wanted} .main-svg")
        return self.page.eval_on_selector(wanted, "box => box.data.map(line => ({x: line.x, y: [...line.y]}))")

    def check(self, own):
        """No complaint of the console, no request that leaves loopback."""
        assert self.complaints == []
        assert self.requests and all(url.startswith((own, "data:,")) for url in self.requests)


@pytest.fixture
def visit(browser):
    """Opens pages: `visit(dark=True, width=400)`."""
    contexts = []

    def make(*, dark=False, width=1400):
        scheme = "dark" if dark else "light"
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        return Visit(contexts[-1])

    yield make
    for context in contexts:
        context.close()


@contextmanager
def serving(*paths):
    """The page of some runs, served in this process."""
    from mizzen.watch.run import Watcher, find_runs
    from mizzen.watch.server import Server

    watcher = Watcher(find_runs([str(path) for path in paths]))
    watcher.start()
    with Server(watcher) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            watcher.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The events of a run of four ranks that went well, but for one skipped step."""
    folder = tmp_path_factory.mktemp("finished")
    ran = launch(
        "--num_gpus", 4, "--no_local_rank", TRAIN, folder, "--pause", 0, "--overflow-at", 12, cwd=folder, **packages()
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder / "run.jsonl"


@pytest.fixture(scope="session")
def lost(tmp_path_factory):
    """The events of a run of four ranks that lost one, went on from a checkpoint, and lost it again."""
    folder = tmp_path_factory.mktemp("lost")
    ran = launch(
        "--num_gpus", 4, "--no_local_rank", "--max_restarts", 1, TRAIN, folder,
        "--name", "lost", "--pause", 0.05, "--kill-rank", 2, "--kill-at", 20, cwd=folder, **packages(),
    )  # fmt: skip
    assert ran.returncode == 137, ran.stderr
    return folder / "lost.jsonl"


def packages():
    """Threads are scarce where four ranks share two cores."""
    return {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
