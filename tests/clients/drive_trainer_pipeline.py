"""HF Trainer with a configuration that asks for stages, which it cannot drive: what it is told."""

import sys
from pathlib import Path

from transformers import Trainer, TrainingArguments

from clients.small import Tokens, configuration, gpt2


def main() -> None:
    """Leave the error, and no traceback."""
    folder = Path(sys.argv[1])
    arguments = TrainingArguments(
        str(folder / "trained"), max_steps=1, report_to=[], use_cpu=True,
        deepspeed=configuration(1, pipeline_parallel_size=2),
    )  # fmt: skip
    try:
        Trainer(gpt2(), arguments, train_dataset=Tokens(8)).train()
    except Exception as error:  # noqa: BLE001  whatever it is
        (folder / f"told-{arguments.process_index}").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
