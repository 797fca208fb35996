"""Starting the scripts of this folder on gloo ranks; the module that clients import is on their path alone.

Ranks are forked from a process that has the clients loaded, and meet as those of torchrun do. `run` starts a command.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mizzen.launcher.job import DROP_IN
from pool import Pool
from zygote import Job, pack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEARCH = [str(DROP_IN), str(ROOT / "src"), str(ROOT / "tests")]
LOADED = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "accelerate.utils.deepspeed",
    "datasets",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "lightning.pytorch",
    "lightning.fabric",
)
"""What takes the ranks of most scripts seconds to import."""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PL_"))}
    return kept | {
        "PYTHONPATH": os.pathsep.join(SEARCH),
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


class Scripts:
    """The process that has the clients loaded, and ranks that are forked from it."""

    def __init__(self) -> None:
        loading = {name: value for name, value in environment().items() if name != "PYTHONWARNINGS"}
        self.pool = Pool(LOADED, env=loading, search=SEARCH)

    def run(self, script: str, folder: Path, *words: str, ranks: int = 2, timeout: float = 900) -> str:
        """Run a script of this folder on some ranks; everything that they wrote to the terminal.

        The limit that pytest has for a test comes before `timeout`, and ends the ranks as well.
        """
        from torch.distributed import TCPStore

        # As the agent of torchrun does, so that a script can join several times in a row.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = Job(
            size=ranks,
            backend=None,
            module="clients.launching",
            path=__file__,
            name="be_script",
            arguments=pack(((store.port, str(HERE / script), str(folder), *words), {})),
            timeout=timeout,
            grace=20,
            environment=environment(),
            search=[*SEARCH, *sys.path],
            folder=str(folder),
        )
        ended = self.pool.submit(job)
        written = "".join(outcome.output for outcome in sorted(ended, key=lambda outcome: outcome.rank))
        failed = [f"rank {each.rank}: {each.error_type}\n{each.traceback}" for each in ended if each.error_type]
        assert not failed, "\n".join([written[-8000:], *failed])
        return written

    def launch(self, script: str, folder: Path, ranks: int = 2) -> tuple[list[dict], str]:
        """Run a script on some ranks: what each has found, and everything that was written to the terminal."""
        written = self.run(script, folder, ranks=ranks)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)], written


def be_script(port: int, script: str, *words: str) -> None:
    """What `torchrun SCRIPT WORDS` has in one of its ranks."""
    os.environ.update(
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        GROUP_RANK="0",
        ROLE_NAME="default",
    )
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    warnings.simplefilter("default")
    runpy.run_path(script, run_name="__main__")


def close(value):
    """Five digits."""
    return pytest.approx(value, rel=1e-5, abs=1e-5)


def own_lines(written: str) -> list[str]:
    """What the engine has written, and warnings from its files, beside what the clients write.

    The one line that every engine of the drop-in begins with, because programs look for it, is left out.
    """
    lines = [line for line in written.splitlines() if line.startswith("mizzen") or "src/mizzen" in line]
    return [line for line in lines if "DeepSpeed info: version=" not in line]
