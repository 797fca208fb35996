"""What one rank does with the trainers of TRL; as `drive_trainer.py` is run.

Everything is as their defaults have it, recomputed activations included, except for precision and size.
"""

import sys
from pathlib import Path

import torch
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from clients.small import configuration, forget, leave, llama, norms
from clients.words import pairs, prompts, texts, tokenizer

STEPS, MIDDLE = 20, 10
WAYS = {"ddp": None, "stage 2": configuration(2), "stage 3": configuration(3)}


def common(folder: Path, config: dict | None, **more) -> dict:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "deepspeed": config,
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": MIDDLE,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 11,
        **more,
    }


def sft(folder: Path, config: dict | None):
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(**common(folder, config, gradient_accumulation_steps=2), max_length=16),
        train_dataset=texts(96),
        processing_class=tokenizer(),
    )


def packed(folder: Path, config: dict | None):
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(**common(folder, config), max_length=16, packing=True, packing_strategy="wrapped"),
        train_dataset=texts(200),
        processing_class=tokenizer(),
    )


def dpo(folder: Path, config: dict | None):
    """The reference is another model, sharded where the trained one is."""
    return DPOTrainer(
        model=llama(3),
        ref_model=llama(4),
        args=DPOConfig(**common(folder, config), max_length=16),
        train_dataset=pairs(48),
        processing_class=tokenizer(),
    )


def synced(folder: Path, config: dict | None):
    """The reference follows the trained model."""
    settings = DPOConfig(
        **common(folder, config), max_length=16, sync_ref_model=True, ref_model_sync_steps=4, ref_model_mixup_alpha=0.5
    )
    return DPOTrainer(
        model=llama(3), ref_model=llama(3), args=settings, train_dataset=pairs(48), processing_class=tokenizer()
    )


def even(completion_ids, **_) -> list[float]:
    """What a rank generates decides what it learns."""
    return [float(sum(token % 2 == 0 for token in tokens)) for tokens in completion_ids]


def grpo(folder: Path, config: dict | None, steps: int = STEPS, **more):
    """The model and its reference come from a folder; at stage 3 both are sharded while they are read."""
    settings = GRPOConfig(
        **common(folder, config, max_steps=steps, learning_rate=1e-2),
        num_generations=4,
        max_completion_length=8,
        beta=0.05,
        model_init_kwargs={"dtype": "float32"},
        **more,
    )
    return GRPOTrainer(
        model=str(folder.parent / "pretrained"),
        reward_funcs=even,
        args=settings,
        train_dataset=prompts(24),
        processing_class=tokenizer(),
    )


def in_pieces(folder: Path, config: dict | None):
    """The same, gathered layer by layer for every token."""
    return grpo(folder, config, 6, ds3_gather_for_generation=False)


def run(trainer, is_sharded: bool, resumed: Path | None = None) -> dict:
    losses = []
    step = trainer.training_step

    def record(*arguments, **keywords):
        loss = step(*arguments, **keywords)
        losses.append(loss.item())
        return loss

    trainer.training_step = record
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    logs = [line for line in trainer.state.log_history if "loss" in line]
    found = {
        "losses": losses,
        "logs": [{name: value for name, value in line.items() if isinstance(value, float)} for line in logs],
        "norms": norms(trainer.accelerator.unwrap_model(trainer.model_wrapped), is_sharded),
    }
    trainer.accelerator.free_memory()
    return found


def main(folder: Path, *chosen: str) -> None:
    makers = {"sft": sft, "packed": packed, "dpo": dpo, "synced": synced, "grpo": grpo, "in pieces": in_pieces}
    found = {}
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        llama(3).save_pretrained(folder / "pretrained")
    torch.distributed.barrier()
    for kind, make in makers.items():
        for way, config in WAYS.items() if not chosen or kind in chosen else ():
            place = folder / f"{kind} {way}"
            found[f"{kind}, {way}"] = run(make(place, config), config is not None)
            forget()
            if kind in ("sft", "dpo", "grpo"):
                again = make(folder / f"{kind} {way} 2", config)
                found[f"{kind}, {way}, resumed"] = run(again, config is not None, place / f"checkpoint-{MIDDLE}")
                forget()
    leave(found, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *sys.argv[2:])
