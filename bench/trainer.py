"""The work of `hf_trainer`: HF Trainer fine-tunes a Llama built from a configuration, on whatever is called deepspeed.

A turn of a player is a number of steps; Trainer runs as a whole. So Trainer has a thread of its own, which stops after
every step and waits until the player asks for the next one.
"""

import sys
import tempfile
import threading
from importlib import metadata
from typing import Any, Final

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from bench.llama import Size, build
from bench.player import Step
from bench.systems import DECAY, MAX_NORM, RATE

ENOUGH: Final = 10**6
"""Steps that nobody waits for."""
SYSTEMS: Final = tuple(f"{kind}-{stage}" for stage in (2, 3) for kind in ("deepspeed", "mizzen"))


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same in every run; a few, used in turn."""

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, size.vocabulary, (4 * size.samples, size.length), generator=generator)

    def __len__(self) -> int:
        return 2**16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row}


class Baton(TrainerCallback):
    """Passed between the thread of Trainer and that of the player: one of the two runs."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.loss: Any = None
        self.error: BaseException | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait to be asked."""
        self.go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that it is done."""
        self.done.release()

    def step(self, number: int) -> Any:
        """What the player calls."""
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error
        return self.loss


class Recording(Trainer):
    """Hands its losses on."""

    baton: Baton

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As it is."""
        self.baton.loss = super().training_step(*args, **kwargs)
        return self.baton.loss


def check(kind: str) -> None:
    """Whether the package called deepspeed is the one that is to be measured."""
    import deepspeed

    is_ours = "mizzen" in metadata.version("deepspeed")
    if is_ours != (kind == "mizzen"):
        raise RuntimeError(f"{kind} is to be measured, and the package called deepspeed is {deepspeed.__version__}")


def prepare(system: str, settings: dict[str, Any]) -> Step:
    """Start a Trainer up to its first step; `settings` are the fields of `Size`."""
    kind, _, stage = system.partition("-")
    check(kind)
    size = Size(**settings)
    on_gpu = torch.cuda.is_available()
    zero = {"stage": int(stage), "stage3_gather_16bit_weights_on_model_save": True}
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        deepspeed=config,
        use_cpu=not on_gpu,
        bf16=True,
        per_device_train_batch_size=size.samples,
        max_steps=ENOUGH,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
    )
    torch.manual_seed(0)
    model = build(size)
    baton = Baton()
    trainer = Recording(model=model, args=arguments, train_dataset=Tokens(size), callbacks=[baton])
    trainer.baton = baton

    def train() -> None:
        try:
            if on_gpu:
                torch.cuda.set_device(0)
            trainer.train()
        except BaseException as error:  # noqa: BLE001 - the player raises it
            baton.error = error
            baton.done.release()

    threading.Thread(target=train, name="trainer", daemon=True).start()
    print(f"{system}: {sys.modules['deepspeed'].__version__}", file=sys.stderr)
    return baton.step
