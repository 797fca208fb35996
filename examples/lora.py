"""Adapters of PEFT on a frozen language model: little to train, little to keep, little to save. Needs `all-clients`.

On one rank:  python examples/lora.py
On two:       mizzen run --num_gpus 2 examples/lora.py
"""

import argparse
from pathlib import Path

import torch
from gpt_bytes import library_text
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import mizzen

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
    "steps_per_print": 20,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/lora"))
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, target_modules=targets, modules_to_save=["lm_head"]))
    samples = [{"input_ids": piece, "labels": piece} for piece in library_text(64)[:4096]]
    engine, *_ = mizzen.initialize(model=model, training_data=samples, config=CONFIG)
    for _ in range(args.steps):
        report = engine.train_batch()
    engine.save_checkpoint(args.output, exclude_frozen_parameters=True)
    if engine.global_rank == 0:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        everything = sum(parameter.numel() for parameter in model.parameters())
        print(f"trained {trained:,} of {everything:,} elements; loss after {report.step} steps: {report.loss:.3f}")
        size = sum(file.stat().st_size for file in args.output.rglob("*.safetensors"))
        print(f"the checkpoint has {size / 1e6:.2f} MB")
    engine.destroy()


if __name__ == "__main__":
    main()
