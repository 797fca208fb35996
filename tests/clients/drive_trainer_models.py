"""HF Trainer with other precisions, adapters, models from folders, and generation; as `drive_trainer.py` is run."""

import sys
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from clients.small import (
    LENGTH,
    RATE,
    VOCABULARY,
    Tokens,
    configuration,
    forget,
    gpt2,
    leave,
    llama,
    llama_shape,
    norms,
)
from mizzen.parallel.zero.full.sharded_parameter import find_record

STEPS = 20
FP16 = {"enabled": "auto", "initial_scale_power": 20, "loss_scale_window": 5, "hysteresis": 1}
"""A scale that is far too high, so that the first steps are skipped."""


class Recording(Trainer):
    """Keeps every loss as it is."""

    def __init__(self, **keywords) -> None:
        super().__init__(**keywords)
        self.losses = []

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        self.losses.append(loss.item())
        return loss


class RecordingPairs(Recording, Seq2SeqTrainer):
    pass


def arguments_of(folder: Path, config: dict | None, kind: type = TrainingArguments, **more) -> TrainingArguments:
    return kind(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=STEPS,
        learning_rate=RATE,
        logging_steps=1,
        save_strategy="steps",
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )


def train(trainer: Recording, is_sharded: bool, resumed: Path | None = None) -> dict:
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return {
        "losses": trainer.losses,
        "logged": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "evaluated": trainer.evaluate()["eval_loss"],
        "norms": norms(trainer.accelerator.unwrap_model(trainer.model_wrapped), is_sharded),
    }


def simple(folder: Path, build, config: dict | None, *, resumed: Path | None = None, **more) -> dict:
    """Train what `build` makes; its arguments are there before the model is."""
    arguments = arguments_of(folder, config, **more)
    model = build()
    held = sum(value.to_local().numel() if find_record(value) else value.numel() for value in model.parameters())
    trainer = Recording(model=model, args=arguments, train_dataset=Tokens(48), eval_dataset=Tokens(24))
    found = train(trainer, config is not None, resumed)
    found["held at first"] = held
    if config is not None and arguments.fp16:
        found["scale"] = trainer.model_wrapped.loss_scale()
        found["skipped"] = trainer.model_wrapped.skipped_steps
    trainer.save_model(str(folder / "saved"))
    trainer.accelerator.wait_for_everyone()
    found["files"] = sorted(path.name for path in (folder / "saved").iterdir())
    trainer.accelerator.free_memory()
    return found


def precisions(folder: Path) -> dict:
    found = {"ddp, bf16": simple(folder / "ddp-bf16", gpt2, None, bf16=True)}
    forget()
    found["ddp, fp32"] = simple(folder / "ddp-fp32", gpt2, None)
    forget()
    for kind in ("bf16", "fp16"):
        for stage in range(4):
            name = f"stage {stage}, {kind}"
            config = configuration(stage, fp16=FP16)
            found[name] = simple(folder / name, gpt2, config, **{kind: True})
            forget()
        for stage in (2, 3):
            name = f"stage {stage}, {kind}"
            config = configuration(stage, fp16=FP16)
            middle = folder / name / "checkpoint-10"
            found[f"{name}, resumed"] = simple(folder / f"{name}-2", gpt2, config, resumed=middle, **{kind: True})
            forget()
    return found


def with_adapter(build=llama) -> torch.nn.Module:
    model = build()
    chosen = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(6)
    return get_peft_model(model, chosen)


def adapters(folder: Path) -> dict:
    """LoRA, on a whole model and on one that is sharded while it is loaded from a folder."""
    found = {}
    for name, config in {"ddp": None, "stage 2": configuration(2), "stage 3": configuration(3)}.items():
        place = folder / f"lora {name}"
        found[f"lora, {name}"] = simple(place, with_adapter, config)
        forget()
        found[f"lora, {name}, resumed"] = simple(
            folder / f"lora {name} 2", with_adapter, config, resumed=place / "checkpoint-10"
        )
        forget()
    source = folder / "base"
    if torch.distributed.get_rank() == 0:
        llama(5).save_pretrained(source)
    torch.distributed.barrier()
    read = partial(with_adapter, partial(AutoModelForCausalLM.from_pretrained, source))
    for name, config in {"ddp": None, "stage 3": configuration(3)}.items():
        found[f"lora read, {name}"] = simple(folder / f"lora read {name}", read, config)
        forget()
    return found


def from_folders(folder: Path) -> dict:
    """Models that `from_pretrained` and `from_config` make, at stage 3 sharded as they are made."""
    place = folder / "pretrained"
    if torch.distributed.get_rank() == 0:
        llama(5).save_pretrained(place)
    torch.distributed.barrier()
    read = partial(AutoModelForCausalLM.from_pretrained, place)
    found = {}
    for name, config in {"ddp": None, "stage 2": configuration(2), "stage 3": configuration(3)}.items():
        found[f"pretrained, {name}"] = simple(folder / f"from {name}", read, config)
        forget()
    for name, config in {"ddp": None, "stage 3": configuration(3)}.items():
        found[f"evaluated at once, {name}"] = evaluate(folder / f"at once {name}", config, read)
        forget()
    made = folder / "made"
    found["made, stage 3"] = simple(folder / "made 3", partial(make_and_keep, made), configuration(3))
    forget()
    found["made, ddp"] = simple(folder / "made ddp", partial(AutoModelForCausalLM.from_pretrained, made), None)
    forget()
    return found


def evaluate(folder: Path, config: dict | None, read) -> dict:
    """A Trainer that never trains: an engine without an optimizer."""
    arguments = arguments_of(folder, config)
    trainer = Recording(model=read(), args=arguments, eval_dataset=Tokens(24))
    found = {"evaluated": trainer.evaluate()["eval_loss"]}
    trainer.accelerator.free_memory()
    return found


def make_and_keep(folder: Path) -> torch.nn.Module:
    """A model from a configuration; a whole copy of what it is at first goes to a folder."""
    import deepspeed

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(llama_shape())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if torch.distributed.get_rank() == 0:
            whole = llama()
            whole.load_state_dict(state)
            whole.save_pretrained(folder)
    torch.distributed.barrier()
    return model


class Pairs(Tokens):
    def __getitem__(self, index: int) -> dict:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.tokens[index][:6]}


def translator() -> T5ForConditionalGeneration:
    torch.manual_seed(4)
    shape = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(shape)


def generation(folder: Path) -> dict:
    """Evaluation that generates: the ranks stop at different lengths, and stay together."""
    found = {}
    for name, config in {"ddp": None, "stage 2": configuration(2), "stage 3": configuration(3)}.items():
        arguments = arguments_of(
            folder / f"pairs {name}",
            config,
            Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=LENGTH,
        )
        trainer = RecordingPairs(model=translator(), args=arguments, train_dataset=Pairs(48), eval_dataset=Pairs(20))
        found[f"generation, {name}"] = train(trainer, config is not None)
        predicted = trainer.predict(Pairs(18))
        found[f"generation, {name}"]["tokens"] = predicted.predictions.tolist()
        trainer.accelerator.free_memory()
        forget()
    return found


def main(folder: Path) -> None:
    leave({**precisions(folder), **adapters(folder), **from_folders(folder), **generation(folder)}, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
