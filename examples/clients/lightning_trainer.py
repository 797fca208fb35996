"""Lightning's Trainer. Its strategy wants CUDA; on a CPU this script says so and ends.

mizzen run --drop-in --no_local_rank --num_gpus 2 examples/clients/lightning_trainer.py
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}


class Squares(pl.LightningModule):
    """Learns the sum of the squares of a row."""

    def configure_model(self):
        """At stage 3 it is sharded as it is built."""
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, rows, index):
        """The loss of one batch."""
        loss = nn.functional.mse_loss(self.model(rows), rows.square().sum(1, keepdim=True))
        if (index + 1) % 20 == 0:
            self.print(f"loss after {index + 1} steps: {loss.item():.3f}")
        return loss

    def configure_optimizers(self):
        """One that knows nothing of shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder, strategy, accelerator, devices):
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    rows = torch.randn(60 * 16 * devices, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(Squares(), DataLoader(rows, batch_size=16))
    trainer.save_checkpoint(Path(folder) / "last.ckpt")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("the strategy of Lightning for this needs CUDA")
    place = sys.argv[1] if len(sys.argv) > 1 else "demo-output/lightning"
    main(place, DeepSpeedStrategy(config=CONFIG), "cuda", torch.cuda.device_count())
