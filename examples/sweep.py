"""Every ZeRO stage on the same model: memory of a rank and speed, as a table and a picture.

    python examples/sweep.py --ranks 2 --steps 10

Memory is what the plan says that a rank holds: parameters, gradients, master weights, optimizer states.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from gpt_bytes import GPT, library_text

import mizzen

OUTPUT = Path("runs/sweep")
STAGES = (0, 1, 2, 3)


def config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "progress": {"enabled": False},
        "jsonl_monitor": {"enabled": True, "output_path": str(OUTPUT), "job_name": f"stage{stage}"},
    }


def train(stage: int, steps: int) -> None:
    """What a rank does."""
    torch.manual_seed(0)
    engine, *_ = mizzen.initialize(model=GPT(), training_data=library_text(), config=config(stage))
    for _ in range(steps):
        engine.train_batch()
    engine.destroy()


def planned(stage: int, ranks: int) -> float:
    """MiB of a rank, as `mizzen plan` says before anything is started."""
    file = (OUTPUT / f"stage{stage}.json").absolute()
    file.write_text(json.dumps(config(stage)))
    words = ["plan", str(file), "--world", str(ranks), "--model", "gpt_bytes:GPT"]
    command = [sys.executable, "-m", "mizzen.cli", *words]
    said = subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout
    size, unit = re.search(r"^memory +([\d.]+) (\w+)", said, re.MULTILINE).groups()
    return float(size) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[unit]


def sweep(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(stage, MiB of a rank, samples per second) of one run after the other."""
    found = []
    for stage in STAGES:
        record = OUTPUT / f"stage{stage}.jsonl"
        record.unlink(missing_ok=True)
        words = [__file__, "--stage", str(stage), "--steps", str(args.steps)]
        launcher = [sys.executable, "-m", "mizzen.cli", "run", "--num_gpus", str(args.ranks), *words]
        subprocess.run(launcher, check=True)
        steps = [json.loads(line) for line in record.read_text().splitlines()][2:]
        rate = sum(step["samples"] for step in steps) / sum(step["seconds"] for step in steps)
        found.append((stage, planned(stage, args.ranks), rate))
        print(f"stage {stage}: {found[-1][1]:7.1f} MiB a rank, {rate:6.1f} samples/s", flush=True)
    return found


def draw(found: list[tuple[int, float, float]], path: Path) -> None:
    """Two bars for each stage."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(8, 3.5), dpi=150, layout="constrained")
    names = [f"stage {stage}" for stage, _, _ in found]
    for axes, place, title in zip(sides, (1, 2), ("MiB of a rank", "samples per second"), strict=True):
        axes.bar(names, [row[place] for row in found], color="tab:blue")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=None, help="train with this one: what the sweep starts")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()
    if args.stage is not None:
        train(args.stage, args.steps)
        return
    OUTPUT.mkdir(parents=True, exist_ok=True)
    draw(sweep(args), OUTPUT / "sweep.png")
    print(f"the picture is {OUTPUT / 'sweep.png'}")


if __name__ == "__main__":
    main()
