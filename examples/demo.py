"""What `make demo` runs: `gpt_bytes.py` on two ranks of this machine, and a picture of how its loss fell."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import torch
from gpt_bytes import library_text

RUN = Path("demo-output")


def train(arguments: list[str]) -> list[dict]:
    """Train on two ranks with one thread each; returns the steps as the run has written them down."""
    record = RUN / "gpt_bytes.jsonl"
    record.unlink(missing_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("gpt_bytes.py")
    subprocess.run(["env", "OMP_NUM_THREADS=1", *launch, str(script), *arguments], check=True)
    return [json.loads(line) for line in record.read_text().splitlines()]


def draw(steps: list[dict], path: Path) -> None:
    """The loss over the steps, beside what simple counting would reach."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers, losses = [step["step"] for step in steps], [step["loss"] for step in steps]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    for name, level in counting_losses().items():
        axes.axhline(level, color="gray", linewidth=0.8, linestyle="--")
        axes.annotate(name, (numbers[-1], level), (0, 3), textcoords="offset points", ha="right", color="gray", size=9)
    axes.plot(numbers, losses, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A byte-level GPT on two ranks, ZeRO stage 2")
    axes.set(xlim=(0, numbers[-1]), ylim=(0, 6))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def counting_losses() -> dict[str, float]:
    """What counting bytes alone, or pairs of bytes, gives on the same text."""
    text = torch.cat(library_text())
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=1 << 16).view(256, 256).double()
    pairs, single = pairs / pairs.sum(), pairs.sum(0) / pairs.sum()
    before = pairs.sum(1, keepdim=True)
    return {
        "guessing": torch.tensor(256.0).log().item(),
        "counting bytes": -torch.special.xlogy(single, single).sum().item(),
        "counting pairs": -torch.special.xlogy(pairs, pairs / before.clamp(min=1e-30)).sum().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default="400")
    parser.add_argument("--width", default="192")
    args = parser.parse_args()
    start = time.monotonic()
    print("A byte-level GPT learns the text of Python's standard library: two ranks, ZeRO stage 2.\n", flush=True)
    steps = train(["--steps", args.steps, "--width", args.width])
    draw(steps, RUN / "loss.png")
    first, last = steps[0]["loss"], sum(step["loss"] for step in steps[-10:]) / len(steps[-10:])
    print(f"\nThe loss fell from {first:.2f} to {last:.2f} in {len(steps)} steps; {time.monotonic() - start:.0f} s in all.")
    print(f"The curve is in {RUN / 'loss.png'}, each step in {RUN / 'gpt_bytes.jsonl'}; the script is examples/gpt_bytes.py.")


if __name__ == "__main__":
    main()
