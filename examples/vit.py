"""A vision transformer of Hugging Face, with ZeRO stage 3 and its blocks recomputed. Needs the extra `clients`.

On one rank:  python examples/vit.py
On two:       mizzen run --num_gpus 2 examples/vit.py
"""

import argparse

import torch
from shapes import KINDS, SIDE, pictures
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

import mizzen

CONFIG = {
    "train_batch_size": 32,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "activation_checkpointing": {"mode": "full"},
    "steps_per_print": 20,
}


class Pictures(Dataset):
    """Keyword arguments of the model, so that its output has a loss."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.pictures, self.kinds = pictures(count, seed)

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> dict:
        return {"pixel_values": self.pictures[index], "labels": self.kinds[index]}


def build() -> ViTForImageClassification:
    """A small one. `zero.Init` keeps each layer's share only, from the moment that it is built."""
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=SIDE, patch_size=4, num_labels=KINDS, **shape)
    with mizzen.zero.Init(config_dict_or_path=CONFIG):
        return ViTForImageClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    mizzen.init_distributed()
    model = build()
    engine, *_ = mizzen.initialize(model=model, training_data=Pictures(2048), config=CONFIG)
    for _ in range(args.steps):
        report = engine.train_batch()
    if engine.global_rank == 0:
        print(f"loss after {report.step} steps: {report.loss:.3f}")
    held = Pictures(256, seed=1)
    engine.eval()
    with torch.no_grad():
        scores = engine(pixel_values=held.pictures.to(engine.device)).logits.argmax(1).cpu()
    if engine.global_rank == 0:
        print(f"accuracy on new pictures: {100 * (scores == held.kinds).float().mean().item():.0f} %")
    engine.destroy()


if __name__ == "__main__":
    main()
