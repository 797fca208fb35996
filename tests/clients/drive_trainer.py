"""What one rank of a user's script does with HF Trainer, for several configurations one after the other.

`python -m torch.distributed.run --nproc-per-node 2 drive_trainer.py FOLDER`; rank r leaves its findings in
FOLDER/r.json. Every run trains, evaluates and saves on the way, predicts and saves at the end; some are then resumed
from the middle by a new Trainer.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from behind import use_behind
from clients.small import DECAY, RATE, Tokens, configuration, forget, gpt2, leave, norms

STEPS, WARMUP = 20, 3
OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "total_num_steps": "auto",
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}
OFFLOAD = {"device": "cpu", "pin_memory": True}
RUNS = {
    "ddp": None,
    "stage 0": configuration(0),
    "stage 1": configuration(1),
    "stage 2": configuration(2),
    "stage 2, fused head": configuration(2, fused={"head_loss": True, "head_chunk": 10}),
    "stage 3": configuration(3),
    # Trainer spares biases and norms from weight decay; an optimizer of the configuration does not.
    "ddp, one group": None,
    "stage 2, optimizer": configuration(2, optimizer=OPTIMIZER),
    "ddp, one group, late": None,
    "stage 2, optimizer and schedule": configuration(2, optimizer=OPTIMIZER, scheduler=SCHEDULER),
    # On a device whose memory lies behind copies, from here on.
    "stage 2, optimizer, offload": configuration(2, {"offload_optimizer": OFFLOAD}, optimizer=OPTIMIZER),
}
RESUMED = ("ddp", "stage 0", "stage 1", "stage 2", "stage 3", "stage 2, optimizer and schedule")


class Recording(Trainer):
    """Keeps every loss as it is, before Trainer adds and averages it, and what an engine says of each step."""

    def __init__(self, **keywords) -> None:
        super().__init__(**keywords)
        self.losses, self.reported = [], []

    def training_step(self, model, *arguments, **keywords):
        loss = super().training_step(model, *arguments, **keywords)
        self.losses.append(loss.item())
        if self.is_deepspeed_enabled and self.accelerator.sync_gradients:
            self.reported.append(model.last_step.loss)
        return loss


def tools(name: str, model: GPT2LMHeadModel) -> tuple:
    """An optimizer and a schedule for Trainer; None lets it make its own."""
    if not name.startswith("ddp, one group"):
        return None, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, late) if name.endswith("late") else None


def late(done: int) -> float:
    """Trainer's own schedule, one step behind: WarmupDecayLR starts at step -1."""
    step = max(0, done - 1)
    return step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)


def trainer_of(name: str, config: dict | None, folder: Path) -> Recording:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=RATE,
        weight_decay=DECAY,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        logging_steps=1,
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = gpt2()
    # 7 micro-batches per rank and epoch: the last step of each has only one of them.
    return Recording(
        model=model,
        args=arguments,
        train_dataset=Tokens(56),
        eval_dataset=Tokens(24),
        optimizers=tools(name, model),
    )


def run(name: str, config: dict | None, folder: Path) -> dict:
    trainer = trainer_of(name, config, folder)
    trainer.train()
    logs = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    predicted = trainer.predict(Tokens(13))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    saved = load_file(folder / "saved" / "model.safetensors")
    found = {
        "losses": trainer.losses,
        "logs": [line for line in logs if "loss" in line],
        "reported": trainer.reported,
        "evaluated": [line["eval_loss"] for line in logs if "eval_loss" in line],
        "best": [trainer.state.best_metric, Path(trainer.state.best_model_checkpoint).name],
        "evaluated again": trainer.evaluate()["eval_loss"],
        "predictions": [*predicted.predictions.shape, float(predicted.predictions.sum())],
        "saved": {name: value.double().norm().item() for name, value in saved.items()},
        "norms": norms(model, config is not None),
    }
    if config is not None:
        engine = trainer.model_wrapped
        found["places"] = sorted({lot.rest.place for store in engine.stores for lot in store.contents.lots})
        units = [unit for store in engine.stores for unit in vars(store).get("units", ())]
        rests = [rest for unit in units for message in unit.messages for rest in message.rests]
        found["shards"] = sorted({"device" if rest is None else rest.place for rest in rests})
        found["generated"] = list(engine.generate(torch.tensor([[1, 2]]), max_length=6, do_sample=False).shape)
    trainer.accelerator.free_memory()
    return found


def resume(name: str, config: dict | None, folder: Path) -> dict:
    """The second half of a run, by a Trainer that knows nothing but the folder."""
    trainer = trainer_of(name, config, folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-10"))
    found = {
        "losses": trainer.losses,
        "logs": [line for line in trainer.state.log_history if "loss" in line][10:],
        "norms": norms(trainer.accelerator.unwrap_model(trainer.model_wrapped), config is not None),
    }
    trainer.accelerator.free_memory()
    return found


def main(folder: Path) -> None:
    found = {}
    for number, (name, config) in enumerate(RUNS.items()):
        place = folder / f"run-{number}"
        if name.endswith("offload"):
            use_behind()
        found[name] = run(name, config, place)
        forget()
        if name in RESUMED:
            found[f"{name}, resumed"] = resume(name, config, place)
            forget()
    leave(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
