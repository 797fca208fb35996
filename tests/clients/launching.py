"""Starting the scripts of this folder on two gloo ranks; the module that clients import is on their path alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mizzen.launcher.job import DROP_IN

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment(**more: str) -> dict[str, str]:
    search = [DROP_IN, ROOT / "src", ROOT / "tests"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PL_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, search)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONWARNINGS": "default",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        **more,
    }


def run(words, folder: Path, timeout: float = 280, **more: str) -> str:
    """Run a command to its end; returns everything that it wrote to the terminal."""
    output = folder / "output"
    with output.open("w+") as stream:
        process = subprocess.Popen(
            [*map(str, words)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(**more),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    written = output.read_text()
    assert code == 0, written[-8000:]
    return written


def launch(script: str, folder: Path) -> tuple[list[dict], str]:
    """Run a script on two ranks: what each has found, and everything that was written to the terminal."""
    written = run([*TORCHRUN, HERE / script, folder], folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], written


def close(value):
    """Five digits."""
    return pytest.approx(value, rel=1e-5, abs=1e-5)


def own_lines(written: str) -> list[str]:
    """What the engine has written, and warnings from its files, beside what the clients write.

    The one line that every engine of the drop-in begins with, because programs look for it, is left out.
    """
    lines = [line for line in written.splitlines() if line.startswith("mizzen") or "src/mizzen" in line]
    return [line for line in lines if "DeepSpeed info: version=" not in line]
