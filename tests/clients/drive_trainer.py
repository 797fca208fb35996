"""What one rank of a user's script does with HF Trainer, for several configurations one after the other.

`python -m torch.distributed.run --nproc-per-node 2 drive_trainer.py FOLDER`; rank r leaves its findings in
FOLDER/r.json.
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

VOCABULARY, LENGTH, STEPS, WARMUP, RATE, DECAY = 64, 16, 10, 3, 1e-2, 0.1
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


def configuration(stage: int, zero: dict | None = None, **more) -> dict:
    """As the guides of Trainer tell users to write it."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": "auto",
            "contiguous_gradients": True,
            **(zero or {}),
        },
        **more,
    }


RUNS = {
    "ddp": None,
    "stage 0": configuration(0),
    "stage 1": configuration(1),
    "stage 2": configuration(2),
    "stage 2, fused head": configuration(2, fused={"head_loss": True, "head_chunk": 10}),
    "stage 3": configuration(
        3,
        {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    ),
    # Trainer spares biases and norms from weight decay; an optimizer of the configuration does not.
    "ddp, one group": None,
    "stage 2, optimizer": configuration(2, optimizer=OPTIMIZER),
    "ddp, one group, late": None,
    "stage 2, optimizer and schedule": configuration(2, optimizer=OPTIMIZER, scheduler=SCHEDULER),
}


class Tokens(Dataset):
    """Sequences with labels that are partly masked, so that no two batches count the same number of tokens."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        masked = torch.rand((samples, LENGTH), generator=generator) < torch.rand((samples, 1), generator=generator) / 2
        self.labels = self.tokens.masked_fill(masked, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


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


def build() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    shape = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(shape)


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


def run(name: str, config: dict | None, folder: Path) -> dict:
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
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = build()
    # 7 micro-batches per rank and epoch: the last step of each has only one of them.
    trainer = Recording(
        model=model,
        args=arguments,
        train_dataset=Tokens(56),
        eval_dataset=Tokens(24),
        optimizers=tools(name, model),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(Tokens(13))
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    saved = load_file(folder / "saved" / "model.safetensors")
    found = {
        "losses": trainer.losses,
        "logs": [line for line in trainer.state.log_history if "loss" in line],
        "reported": trainer.reported,
        "eval_loss": evaluated["eval_loss"],
        "predictions": [*predicted.predictions.shape, float(predicted.predictions.sum())],
    }
    with whole(model, config):
        found["saved"] = {name: torch.equal(value, model.state_dict()[name]) for name, value in saved.items()}
        found["norms"] = {name: value.double().norm().item() for name, value in model.named_parameters()}
    if config is not None:
        engine = trainer.model_wrapped
        found["generated"] = list(engine.generate(torch.tensor([[1, 2]]), max_length=6, do_sample=False).shape)
    trainer.accelerator.free_memory()
    return found


def whole(model: GPT2LMHeadModel, config: dict | None):
    """Where a user reads parameters, at any stage."""
    if config is None:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def forget() -> None:
    """What is process-wide in the clients, so that one process can hold several runs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def main(folder: Path) -> None:
    found = {}
    for number, (name, config) in enumerate(RUNS.items()):
        found[name] = run(name, config, folder / f"run-{number}")
        forget()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
