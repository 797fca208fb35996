"""HF Trainer with every published file (`tests/drop_in/published`); as `drive_trainer.py` is run."""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from clients.small import Tokens, forget, gpt2, leave
from drop_in.published_files import EVALUATED, STEPS, TABLE, completed, number, read


def arguments_of(name: str, folder: Path, **more) -> TrainingArguments:
    """What a user of the file says on the command line: the numbers of the file, and others for the rest."""
    raw, whole = read(name), completed(name, 2)
    rule = raw.get("optimizer", {}).get("params", {})
    first, second = rule["betas"] if isinstance(rule.get("betas"), list) else (0.9, 0.999)
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        **{"deepspeed": raw} | more,
        per_device_train_batch_size=whole.get("train_micro_batch_size_per_gpu", 2),
        gradient_accumulation_steps=whole.get("gradient_accumulation_steps", 1),
        max_steps=STEPS,
        learning_rate=number(rule.get("lr"), 1e-3),
        weight_decay=number(rule.get("weight_decay"), 0.0),
        adam_beta1=first,
        adam_beta2=second,
        max_grad_norm=number(raw.get("gradient_clipping"), 1.0),
        fp16=raw.get("fp16", {}).get("enabled") is True,
        bf16=raw.get("bf16", {}).get("enabled") is True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(name: str, folder: Path) -> str:
    """The error, or the word that there was none."""
    try:
        trainer = Trainer(model=gpt2(), args=arguments_of(name, folder), train_dataset=Tokens(96))
        trainer.train()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the user sees
        return f"{type(error).__name__}\n{error}"
    trainer.accelerator.free_memory()
    return "trained"


def evaluate(name: str, folder: Path, place: Path, **more) -> float:
    """A Trainer that never trains takes the optimizer out of the file and leaves the schedule."""
    arguments = arguments_of(name, folder, **more)
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(place), args=arguments, eval_dataset=Tokens(24))
    found = trainer.evaluate()["eval_loss"]
    trainer.accelerator.free_memory()
    return found


def main(folder: Path) -> None:
    os.chdir(folder)
    found = {}
    for name in TABLE:
        found[name] = train(name, folder / name)
        forget()
    place = folder / "pretrained"
    if torch.distributed.get_rank() == 0:
        gpt2(5).save_pretrained(place)
    torch.distributed.barrier()
    for name in EVALUATED:
        found[f"{name}, evaluated"] = evaluate(name, folder / f"{name}-2", place)
        forget()
    found["evaluated without a file"] = evaluate(EVALUATED[-1], folder / "plain", place, deepspeed=None)
    forget()
    leave(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
