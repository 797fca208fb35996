"""A loop with Accelerate that saves, resumes, and trains with two models; as `drive_accelerate.py` is run.

With a second argument it is the script of `accelerate launch`, whose plugin comes from the environment.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch.nn.functional import kl_div, log_softmax
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from clients.small import RATE, VOCABULARY, configuration, forget, leave, llama, norms
from mizzen.parallel.zero.full.sharded_parameter import find_record

MICRO, STEPS, MIDDLE, CLIP = 4, 20, 10, 0.5


def batches() -> DataLoader:
    """One micro-batch per rank and step, in the order of the data."""
    tokens = torch.randint(0, VOCABULARY, (STEPS * 2 * MICRO, 12), generator=torch.Generator().manual_seed(5))
    return DataLoader(tokens, batch_size=MICRO)


def from_file(folder: Path, stage: int) -> DeepSpeedPlugin:
    path = folder / f"stage-{stage}-{os.environ['RANK']}.json"
    path.write_text(json.dumps(configuration(stage)))
    return DeepSpeedPlugin(hf_ds_config=str(path), gradient_clipping=CLIP)


def from_arguments(stage: int, *, shards_early: bool = False) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=1,
        gradient_clipping=CLIP,
        zero3_init_flag=shards_early,
        zero3_save_16bit_model=True,
    )


def accelerator_of(plugin) -> Accelerator:
    keywords = {"deepspeed_plugin": plugin} if plugin is not None else {"cpu": True}
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **keywords)


def prepared(accelerator: Accelerator, model: LlamaForCausalLM | None = None) -> tuple:
    model = llama() if model is None else model
    optimizer = AdamW(model.parameters(), lr=RATE)
    # Accelerate steps a schedule once per rank.
    scheduler = LambdaLR(optimizer, lambda done: 0.97**done)
    return accelerator.prepare(model, optimizer, batches(), scheduler)


def loop(accelerator: Accelerator, tools: tuple, first: int, last: int) -> list[float]:
    """The steps from `first` to `last`."""
    model, optimizer, loader, scheduler = tools
    losses = []
    if first:
        loader = accelerator.skip_first_batches(loader, first)
    for tokens, _ in zip(loader, range(first, last), strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def unbroken(plugin, place: Path) -> dict:
    accelerator = accelerator_of(plugin)
    tools = prepared(accelerator)
    losses = loop(accelerator, tools, 0, MIDDLE)
    accelerator.save_state(str(place))
    losses += loop(accelerator, tools, MIDDLE, STEPS)
    model = tools[0]
    state = accelerator.get_state_dict(model)
    whole = accelerator.unwrap_model(model)
    found = {
        "losses": losses,
        "norms": norms(whole, plugin is not None),
        "state": None if state is None else {name: value.double().norm().item() for name, value in state.items()},
        "files": sorted(path.name for path in place.iterdir()),
    }
    whole.save_pretrained(
        place / "model", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.wait_for_everyone()
    found["model"] = sorted(path.name for path in (place / "model").iterdir())
    accelerator.free_memory()
    return found


def resumed(plugin, place: Path) -> dict:
    accelerator = accelerator_of(plugin)
    tools = prepared(accelerator)
    loop(accelerator, tools, 0, 2)  # what is loaded does not depend on what was there
    accelerator.load_state(str(place))
    losses = loop(accelerator, tools, MIDDLE, STEPS)
    found = {"losses": losses, "norms": norms(accelerator.unwrap_model(tools[0]), plugin is not None)}
    accelerator.free_memory()
    return found


def pretrained(plugin, place: Path) -> dict:
    """A model that is read from a folder; with the plugin's `zero3_init_flag` it is sharded as it is read.

    Without the flag it is built by hand: Accelerate has models sharded at stage 3 whatever the flag says.
    """
    accelerator = accelerator_of(plugin)
    if accelerator.is_main_process and not place.exists():
        llama(5).save_pretrained(place)
    accelerator.wait_for_everyone()
    is_built = plugin is not None and not plugin.zero3_init_flag
    model = llama(5) if is_built else LlamaForCausalLM.from_pretrained(place)
    held = sum(each.to_local().numel() if find_record(each) else each.numel() for each in model.parameters())
    tools = prepared(accelerator, model)
    found = {"held": held, "losses": loop(accelerator, tools, 0, STEPS)}
    found["norms"] = norms(accelerator.unwrap_model(tools[0]), plugin is not None)
    accelerator.free_memory()
    return found


def two_models(stages: tuple[int, int] | None) -> dict:
    """A student that learns from a teacher, each with a plugin of its own."""
    if stages is None:
        accelerator = accelerator_of(None)
    else:
        plugins = {name: from_arguments(stage) for name, stage in zip(("student", "teacher"), stages, strict=True)}
        # Without an optimizer there is one use for a plugin: sharding.
        accelerator = Accelerator(deepspeed_plugins=plugins, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    student = llama(3)
    optimizer = AdamW(student.parameters(), lr=RATE)
    student, optimizer, loader = accelerator.prepare(student, optimizer, batches())
    teacher = llama(4)
    if stages is not None:
        accelerator.state.select_deepspeed_plugin("teacher")
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = MICRO
        if stages[1] == 3:
            teacher = accelerator.prepare(teacher)
        accelerator.state.select_deepspeed_plugin("student")
    teacher.eval()
    losses = []
    for tokens in loader:
        with torch.no_grad():
            wanted = log_softmax(teacher(input_ids=tokens).logits, -1)
        loss = kl_div(log_softmax(student(input_ids=tokens).logits, -1), wanted, reduction="batchmean", log_target=True)
        accelerator.backward(loss)
        if stages is None:
            accelerator.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    found = {"losses": losses, "norms": norms(accelerator.unwrap_model(student), stages is not None)}
    accelerator.free_memory()
    return found


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ways = {"ddp": lambda: None}
    for stage in range(4):
        ways[f"arguments, stage {stage}"] = lambda stage=stage: from_arguments(stage)
    for stage in (2, 3):
        ways[f"file, stage {stage}"] = lambda stage=stage: from_file(folder, stage)
    found = {}
    for name, make in ways.items():
        found[name] = unbroken(make(), folder / name)
        forget()
        found[f"{name}, resumed"] = resumed(make(), folder / name)
        forget()
    for name, make in {
        "ddp": lambda: None,
        "whole": lambda: from_arguments(3),
        "sharded": lambda: from_arguments(3, shards_early=True),
    }.items():
        found[f"pretrained, {name}"] = pretrained(make(), folder / "pretrained")
        forget()
    for name, stages in {
        "ddp": None,
        "stages 2 and 0": (2, 0),
        "stages 2 and 3": (2, 3),
        "stages 3 and 3": (3, 3),
    }.items():
        found[f"two models, {name}"] = two_models(stages)
        forget()
    leave(found, folder)


def launched(folder: Path) -> None:
    """The plugin is what `accelerate launch` has put into the environment."""
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    tools = prepared(accelerator)
    found = {
        "losses": loop(accelerator, tools, 0, STEPS),
        "stage": accelerator.state.deepspeed_plugin.zero_stage,
        "type": str(accelerator.distributed_type),
        "engine": type(tools[0]).__module__,
    }
    accelerator.free_memory()
    leave(found, folder)


if __name__ == "__main__":
    (launched if len(sys.argv) > 2 else main)(Path(sys.argv[1]))
