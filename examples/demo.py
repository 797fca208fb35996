"""What `make demo` runs: `gpt_bytes.py` on two ranks of this machine, and a picture of how its loss fell.

Arguments go to `gpt_bytes.py`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import torch
from gpt_bytes import library_text
from torch.nn import functional

OUTPUT = Path("demo-output")


def train(arguments: list[str]) -> list[dict]:
    """Train on two ranks with one thread each; returns the steps as the run has written them down."""
    record = OUTPUT / "gpt_bytes.jsonl"
    record.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("gpt_bytes.py")
    subprocess.run(["env", "OMP_NUM_THREADS=1", *launcher, str(script), *arguments], check=True)
    return [json.loads(line) for line in record.read_text().splitlines()]


def counting() -> dict[str, float]:
    """The losses of simpler ways to predict the same text."""
    text = torch.cat(library_text())
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=256 * 256).view(256, 256).double()
    singles, by_previous = pairs.sum(0), pairs.sum(1)
    entropy = torch.distributions.Categorical(singles).entropy()
    entropies = torch.distributions.Categorical(pairs.clamp(min=1e-9)).entropy()
    return {
        "knowing nothing": torch.tensor(256.0).log().item(),
        "knowing how often each byte comes": entropy.item(),
        "knowing the byte before": (entropies * by_previous / by_previous.sum()).sum().item(),
    }


def draw(losses: list[float], path: Path) -> None:
    """The loss of each step, and a running mean."""
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "demo"})
    from matplotlib import pyplot

    mean = functional.avg_pool1d(torch.tensor([losses]), 15, 1, 7, count_include_pad=False)[0]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, level in counting().items():
        axes.axhline(level, color="gray", linewidth=0.8, linestyle="--")
        axes.annotate(name, (len(losses), level), (0, 3), textcoords="offset points", ha="right", color="gray", size=9)
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=0.8, alpha=0.4)
    axes.plot(range(1, len(losses) + 1), mean, color="tab:blue", linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT on two ranks, ZeRO stage 2")
    axes.set(xlim=(0, len(losses)), ylim=(1, 6))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    start = time.monotonic()
    print(
        "A small GPT learns the text of Python's standard library, byte by byte: two ranks, ZeRO stage 2.", flush=True
    )
    losses = [step["loss"] for step in train(sys.argv[1:])]
    picture = OUTPUT / "loss.svg"
    draw(losses, picture)
    last = losses[-20:]
    print(f"\nLoss: from {losses[0]:.2f} to {sum(last) / len(last):.2f}. Time: {time.monotonic() - start:.0f} s.")
    print(f"The curve is in {picture}; the script is examples/gpt_bytes.py.")


if __name__ == "__main__":
    main()
