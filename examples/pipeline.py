"""A hand-written pipeline: an AlexNet-like network on made images, in two stages.

    mizzen run --num_gpus 2 examples/pipeline.py --steps 20

Each stage builds its own layers only. A step runs several micro-batches through the stages at once, as the schedule
says; the loss that every rank reports is that of the whole batch.
"""

import argparse

import torch
from torch import nn

import mizzen
from mizzen.pipe import LayerSpec, PipelineModule

CLASSES, SIDE = 10, 32


def layers(width: int) -> list:
    """Convolutions, then a classifier: a list, of which each stage takes a part."""
    return [
        LayerSpec(nn.Conv2d, 3, width, kernel_size=3, stride=2, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.MaxPool2d, kernel_size=2),
        LayerSpec(nn.Conv2d, width, 2 * width, kernel_size=3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Conv2d, 2 * width, 2 * width, kernel_size=3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.AdaptiveAvgPool2d, (4, 4)),
        lambda images: images.flatten(1),
        LayerSpec(nn.Dropout),
        LayerSpec(nn.Linear, 32 * width, 8 * width),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.Linear, 8 * width, CLASSES),
    ]


def made_images(count: int) -> torch.utils.data.TensorDataset:
    """Noise with a bright square whose place says the class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 5)
        image[:, 16 * row : 16 * row + 8, 6 * column : 6 * column + 6] += 2
    return torch.utils.data.TensorDataset(images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--schedule", default="1f1b")
    arguments = parser.parse_args()
    mizzen.init_distributed()
    torch.manual_seed(1)
    model = PipelineModule(layers(arguments.width), num_stages=arguments.stages, loss_fn=nn.CrossEntropyLoss())
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "pipeline": {"schedule": arguments.schedule},
        "steps_per_print": 5,
        "seed": 1,
    }
    engine, *_ = mizzen.initialize(model=model, config=config, training_data=made_images(512))
    for _ in range(arguments.steps):
        report = engine.train_batch()
    print(f"rank {engine.global_rank}: loss {report.loss:.4f} after {report.step} steps", flush=True)


if __name__ == "__main__":
    main()
