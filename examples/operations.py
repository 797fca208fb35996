"""Where the operations of a step go: four steps of a byte-level GPT, one of them counted, as a page and a picture.

python examples/operations.py --picture operations.svg
"""

import argparse
from pathlib import Path

from gpt_bytes import GPT, library_text

import mizzen
from mizzen.profiler.render import picture

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "wall_clock_breakdown": True,
    "steps_per_print": 2,
    "flops_profiler": {"enabled": True, "profile_step": 2, "module_depth": 2, "detailed": False},
    "profile": {"peak_tflops": 1.0},
}


def main() -> None:
    """Train, and draw what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", default="operations.svg", help="the file to draw")
    options = parser.parse_args()
    engine, _, loader, _ = mizzen.initialize(model=GPT(width=96, layers=3), config=CONFIG, training_data=library_text())
    batches = iter(loader)
    for _ in range(4):
        report = engine.train_batch(batches)
    if engine.global_rank == 0 and engine.flops_profile is not None:
        Path(options.picture).write_text(picture(engine.flops_profile))
        print(f"The last step used {report.measures['mfu']:.2%} of the peak; {options.picture} shows where it went.")
    engine.destroy()


if __name__ == "__main__":
    main()
