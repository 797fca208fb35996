"""HF Trainer and a loop of one's own with Accelerate, with `tensor_parallel.autotp_size` in the configuration.

`python -m torch.distributed.run --nproc-per-node N drive_autotp.py FOLDER`; rank r leaves its findings in
FOLDER/r.json. Every run keeps the batches that it was given, and plain torch trains on those of all ranks that have
different ones.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim
from safetensors.torch import load_file
from torch import distributed, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from clients.small import LENGTH, RATE, VOCABULARY, configuration, forget, leave, llama

TP, MICRO, ACCUMULATION, STEPS, CLIP = 2, 2, 2, 4, 0.5
KEPT = {"stage3_gather_16bit_weights_on_model_save": True}


def settings(stage: int, **section) -> dict:
    return configuration(stage, KEPT, tensor_parallel={"autotp_size": TP, **section})


def model() -> LlamaForCausalLM:
    return llama(num_key_value_heads=2)


def data() -> list:
    tokens = torch.randint(1, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": each, "labels": each} for each in tokens]


class Recording(Trainer):
    """Keeps the batches of this rank."""

    def __init__(self, **keywords) -> None:
        super().__init__(**keywords)
        self.batches, self.sizes = [], []

    def training_step(self, model, inputs, *arguments, **keywords):
        self.batches.append(inputs["input_ids"].clone())
        self.sizes = sizes_of(model)
        return super().training_step(model, inputs, *arguments, **keywords)


def sizes_of(engine) -> list[int]:
    """Samples of a step, data ranks, and ranks that share a matrix."""
    return [engine.train_batch_size(), engine.dp_world_size, engine.run_context.resolved.layout.tp]


def compare(batches: list, weights: dict) -> dict:
    """Plain torch on the batches of all data ranks: its losses, and how far updates are from its own, by name."""
    every: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, batches)
    others = [any(map(torch.equal, every[0], own)) for own in every[TP::TP]]
    plain, before = model(), model().state_dict()
    rule, losses = torch.optim.SGD(plain.parameters(), lr=RATE), []
    for step in range(STEPS):
        mine = [own[step * ACCUMULATION + n] for own in every[::TP] for n in range(ACCUMULATION)]
        tokens = torch.cat(mine)
        rule.zero_grad()
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        rule.step()
        losses.append(loss.item())
    moves = {name: value - before[name] for name, value in plain.state_dict().items()}
    return {
        "expected": losses,
        "alike": all(all(map(torch.equal, own, every[rank // TP * TP])) for rank, own in enumerate(every)),
        "shared": sum(others),
        "names": sorted(weights) == sorted(moves),
        "far": max(float((weights[name] - before[name] - move).norm() / move.norm()) for name, move in moves.items()),
    }


def by_trainer(config: dict, folder: Path) -> dict:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        deepspeed=config,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Recording(model=model(), args=arguments, train_dataset=data())
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    distributed.barrier()
    found = compare(trainer.batches, load_file(folder / "saved" / "model.safetensors"))
    found["losses"] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    found["sizes"] = trainer.sizes
    trainer.model_wrapped.destroy()
    forget()
    return found


def by_accelerate(config: dict, folder: Path, *, configured: bool = False) -> dict:
    config |= {"gradient_clipping": CLIP, "gradient_accumulation_steps": ACCUMULATION}
    if configured:
        config |= {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    network = model()
    optimizer = (DummyOptim if configured else torch.optim.SGD)(network.parameters(), lr=RATE)
    loader = DataLoader(data(), batch_size=MICRO, shuffle=True)
    engine, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    batches = [batch for batch, _ in zip(loader, range(ACCUMULATION * (STEPS + 1)), strict=False)]

    def train(batch: dict) -> float:
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.gather(loss.detach().reshape(1)).mean().item()

    *seen, last = (batches[at : at + ACCUMULATION] for at in range(0, len(batches), ACCUMULATION))
    losses = [sum(map(train, step)) / ACCUMULATION for step in seen]
    weights = [accelerator.get_state_dict(engine)]
    distributed.broadcast_object_list(weights)
    found = compare([batch["input_ids"] for step in seen for batch in step], weights[0])
    accelerator.save_state(str(folder))
    once = list(map(train, last))
    accelerator.load_state(str(folder))
    found |= {"losses": losses, "sizes": sizes_of(engine), "once": once, "again": list(map(train, last))}
    accelerator.free_memory()
    forget()
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    cases = {"stage 1": settings(1), "stage 3": settings(3), "sequence parts": settings(2, sequence_parallel=True)}
    for name, config in cases.items():
        found[f"trainer, {name}"] = by_trainer(config, folder / f"trainer {name}")
    for name, stage in (("script", 1), ("configuration", 2), ("script", 3)):
        where = folder / f"accelerate {name} {stage}"
        found[f"accelerate, {name}, stage {stage}"] = by_accelerate(
            settings(stage), where, configured=name == "configuration"
        )
    leave(found, folder)


if __name__ == "__main__":
    main()
