"""What one rank of a user's own loop does with Accelerate, for several configurations one after the other.

`python -m torch.distributed.run --nproc-per-node 2 drive_accelerate.py FOLDER`; rank r leaves its findings in
FOLDER/r.json. A run without a stage is plain DDP; it comes after the others, so that the face makes the process group.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from clients.small import forget, leave
from parity.programs import LENGTH, VOCABULARY, TinyLanguageModel

MICRO, EPOCHS, CLIP, RATE, DECAY, WARMUP = 4, 3, 0.5, 1e-2, 0.1, 3

FULL = {"stage3_param_persistence_threshold": 100, "stage3_gather_16bit_weights_on_model_save": True}


@dataclass(frozen=True)
class Run:
    """Who makes the optimizer, the script or the configuration; the stage, or None for DDP; and the accumulation."""

    maker: str
    stage: int | None
    accumulation: int

    def __str__(self) -> str:
        return f"{self.maker}, {'ddp' if self.stage is None else f'stage {self.stage}'}, {self.accumulation}"

    @property
    def total(self) -> int:
        """Optimizer steps; 7 micro-batches per rank and epoch, so that with 2 per step the last has only one."""
        return EPOCHS * -(-7 // self.accumulation)

    @property
    def configuration(self) -> dict:
        found = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 2000,
                **(FULL if self.stage == 3 else {}),
            },
        }
        if self.maker == "configuration":
            found["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
            params = dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
            found["scheduler"] = {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}
        return found


RUNS = [Run(*row) for row in product(("script", "configuration"), (0, 1, 2, 3, None), (1, 2))]


def own_schedule(done: int) -> float:
    """Accelerate steps a script's schedule once per rank, so it is made for twice the steps."""
    return min(1.0, (done + 1) / 8) * 0.98**done


def configured_schedule(total: int, done: int) -> float:
    """WarmupDecayLR, which starts at step -1."""
    step = max(0, done - 1)
    return step / WARMUP if step < WARMUP else (total - step) / (total - WARMUP)


def tools(run: Run, model: nn.Module) -> tuple:
    """An optimizer and a schedule as the script makes them."""
    if run.maker == "script":
        optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
        return optimizer, LambdaLR(optimizer, own_schedule)
    if run.stage is None:
        optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
        return optimizer, LambdaLR(optimizer, lambda done: configured_schedule(run.total, done))
    optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=DECAY)
    # Accelerate divides the steps by the ranks.
    return optimizer, DummyScheduler(optimizer, total_num_steps=2 * run.total, warmup_num_steps=WARMUP)


def make_accelerator(run: Run) -> Accelerator:
    keywords = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    if run.stage is not None:
        keywords["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=run.configuration)
    else:
        keywords["cpu"] = True
        keywords["gradient_accumulation_steps"] = run.accumulation
    return Accelerator(**keywords)


def train(run: Run) -> dict:
    accelerator = make_accelerator(run)
    torch.manual_seed(7)
    model = TinyLanguageModel("tied")
    optimizer, scheduler = tools(run, model)
    tokens = torch.randint(0, VOCABULARY, (7 * 2 * MICRO, LENGTH), generator=torch.Generator().manual_seed(5))
    loader = DataLoader(tokens, batch_size=MICRO)
    if run.maker == "configuration" and run.stage is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = {"losses": [], "norms": [], "rates": [], "skipped": []}
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                    found["rates"].append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if accelerator.sync_gradients or run.maker == "script":
                    scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    found["skipped"].append(optimizer.step_was_skipped)
            found["losses"].append(accelerator.gather(loss.detach()).mean().item())
    model.eval()
    with torch.no_grad():
        found["gathered"] = accelerator.gather_for_metrics(model(tokens[:MICRO]).reshape(1)).tolist()
    state = accelerator.get_state_dict(model)
    found["state"] = state and {name: value.double().norm().item() for name, value in state.items()}
    whole = accelerator.unwrap_model(model)
    found["unwrapped"] = type(whole).__name__
    if run.stage is not None:
        found["written"] = write(whole)
    accelerator.free_memory()
    found["after"] = whole(tokens[:MICRO]).item()
    return found


def write(model: nn.Module) -> list[float]:
    """What rank 0 writes inside the context is everyone's afterwards; then the old values come back in the same way."""
    import deepspeed

    weight, seen = model.norm.weight, []
    for value in (torch.full_like(weight, 2.0), weight.detach().clone()):
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            if deepspeed.comm.get_rank() == 0:
                weight.data.copy_(value)
        seen.append(weight.max().item())
    return seen


def shuffled() -> list[int]:
    """The samples of this rank when the data is prepared after the model, with a sampler that takes torch's seed."""
    sizes = {"train_batch_size": 2 * MICRO, "train_micro_batch_size_per_gpu": MICRO}
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=Run("script", 2, 1).configuration | sizes),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    torch.manual_seed(7)
    model = TinyLanguageModel()
    accelerator.prepare(model, AdamW(model.parameters()))
    loader = accelerator.prepare(DataLoader(torch.arange(32), batch_size=MICRO, shuffle=True))
    found = torch.cat(list(loader)).tolist()
    accelerator.free_memory()
    return found


def main(folder: Path) -> None:
    found = {}
    for run in sorted(RUNS, key=lambda run: run.stage is None):
        found[str(run)] = train(run)
        forget()
    found["shuffled"] = shuffled()
    forget()
    leave(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
