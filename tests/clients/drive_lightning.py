"""What one rank does with Lightning's Trainer and with Fabric; as `drive_trainer.py` is run.

Their strategy wants CUDA. The two classes of this file set that check aside, and nothing else.
"""

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.utils.data import DataLoader

from clients.small import RATE, VOCABULARY, leave, llama, norms

MICRO, STEPS, MIDDLE, CLIP = 4, 20, 10, 0.5


class OnCpu(DeepSpeedStrategy):
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class FabricOnCpu(FabricStrategy):
    def setup_environment(self) -> None:
        super(FabricStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True


class Language(pl.LightningModule):
    """A small Llama, built at once or, as large models are, inside the strategy."""

    def __init__(self, is_late: bool = False, share: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.share = share
        self.model = None if is_late else llama()
        self.losses, self.validated = [], []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = llama()

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss * self.share

    def validation_step(self, batch, index):
        self.validated.append(self.model(input_ids=batch, labels=batch).loss.item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.95**done)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Summary(ModelSummary):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {}

    def on_fit_start(self, trainer, module) -> None:
        summary = self._summary(trainer, module)
        self.found = {"class": type(summary).__name__, "total": summary.total_parameters, "text": str(summary)}


def data(samples: int, seed: int) -> DataLoader:
    """This rank's share."""
    tokens = torch.randint(0, VOCABULARY, (samples, 12), generator=torch.Generator().manual_seed(seed))
    return DataLoader(tokens[int(os.environ["RANK"]) :: 2].clone(), batch_size=MICRO)


def accumulation(name: str) -> int:
    return 2 if name.endswith("accumulated") else 1


def build(name: str) -> Language:
    """With an engine losses are divided by the accumulation twice, by Lightning and by the engine it has told of it."""
    return Language(is_late="late" in name, share=1 / accumulation(name) if name.startswith("ddp") else 1.0)


def strategy_of(name: str):
    if name.startswith("ddp"):
        return DDPStrategy(process_group_backend="gloo")
    stage = int(name.split()[1].strip(","))
    found = OnCpu(stage=stage, logging_batch_size_per_gpu=MICRO, process_group_backend="gloo")
    if stage == 3:  # so that something is sharded in a model of this size
        found.config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    return found


def trainer_of(name: str, folder: Path, *callbacks, epochs: int = 2) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_of(name),
        max_epochs=epochs,
        accumulate_grad_batches=accumulation(name),
        gradient_clip_val=CLIP,
        precision="bf16-true" if name.endswith("bf16") else "32-true",
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )


def run(name: str, folder: Path) -> dict:
    place = folder / f"{name}.ckpt"
    summary = Summary()
    module, epoch = build(name), 2 * MICRO * MIDDLE * accumulation(name)
    trainer = trainer_of(name, folder, summary)
    trainer.fit(module, data(epoch, 5))
    found = {"losses": module.losses, "summary": summary.found}
    found["norms"] = norms(module, not name.startswith("ddp"))
    trainer.validate(module, data(16, 6), verbose=False)
    found["validated"] = module.validated

    # Half of it, to the end of an epoch: Lightning does not know where in its data a run was.
    trainer = trainer_of(name, folder, epochs=1)
    half = build(name)
    trainer.fit(half, data(epoch, 5))
    found["saved norms"] = norms(half, not name.startswith("ddp"))
    trainer.save_checkpoint(place)
    found["is folder"] = place.is_dir()
    again = build(name)
    trainer = trainer_of(name, folder)
    trainer.fit(again, data(epoch, 5), ckpt_path=place, weights_only=False)
    found["resumed"], found["resumed norms"] = again.losses, norms(again, not name.startswith("ddp"))
    torch.distributed.barrier()
    if found["is folder"]:
        found["converted"] = convert(place, folder / f"{name}-{torch.distributed.get_rank()}.pt")
    return found


def convert(place: Path, output: Path) -> dict:
    """One file of a checkpoint, and a module loaded from it."""
    found = convert_zero_checkpoint_to_fp32_state_dict(str(place), str(output))
    module = Language.load_from_checkpoint(output, weights_only=False)
    return {
        "keys": sorted(found),
        "step": found["global_step"],
        "norms": {name: value.double().norm().item() for name, value in module.named_parameters()},
    }


def fabric(stage: int | None, folder: Path) -> dict:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP

    if stage is None:
        strategy = FabricDDP(process_group_backend="gloo")
    else:
        config = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_clipping": CLIP,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        }
        strategy = FabricOnCpu(config=config, process_group_backend="gloo")
    host = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    host.launch()

    def prepare():
        with host.init_module():
            model = llama()
        return host.setup(model, torch.optim.AdamW(model.parameters(), lr=RATE))

    def steps(model, optimizer, batches) -> list[float]:
        losses = []
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            host.backward(loss, model=None if stage is None else model)
            if stage is None:
                host.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    batches = list(data(2 * MICRO * STEPS, 5))
    place = folder / f"fabric-{stage}.ckpt"
    model, optimizer = prepare()
    losses = steps(model, optimizer, batches[:MIDDLE])
    host.save(place, {"model": model, "optimizer": optimizer, "step": MIDDLE, "words": {"a": (1, 2)}})
    losses += steps(model, optimizer, batches[MIDDLE:])
    found = {"losses": losses, "norms": norms(model.module, stage is not None)}
    model, optimizer = prepare()
    state = {"model": model, "optimizer": optimizer, "step": 0, "words": {}}
    host.load(place, state)
    found["resumed"] = steps(model, optimizer, batches[MIDDLE:])
    found["state"] = [state["step"], state["words"]]
    return found


RUNS = (
    *("ddp", "stage 1", "stage 2", "stage 3", "stage 3, late"),
    *("ddp, accumulated", "stage 2, accumulated", "stage 3, accumulated", "ddp, bf16", "stage 2, bf16"),
)


def main(folder: Path) -> None:
    found = {name: run(name, folder) for name in RUNS}
    for stage in (None, 1, 2, 3):
        found[f"fabric, {'ddp' if stage is None else f'stage {stage}'}"] = fabric(stage, folder)
    leave(found, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
