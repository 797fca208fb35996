"""A T5 of Hugging Face learns to write words backwards: encoder, decoder, labels of varying length, and generation.

On one rank:  python examples/seq2seq.py
On two:       mizzen run --num_gpus 2 examples/seq2seq.py
"""

import argparse
import keyword
import sys

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

import mizzen

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
    "fused": {"head_loss": True},
    "steps_per_print": 50,
}
PAD, END = 0, 1


def encode(word: str) -> Tensor:
    return torch.tensor([ord(letter) - ord("a") + 3 for letter in word] + [END])


def decode(tokens: Tensor) -> str:
    return "".join(chr(token - 3 + ord("a")) for token in tokens.tolist() if token > 2)


def words() -> list[str]:
    """Names of modules and keywords."""
    names = {*sys.stdlib_module_names, *keyword.kwlist}
    return sorted(name for name in names if name.isalpha() and name.islower() and 3 <= len(name) <= 8)


def collate(samples: list[str]) -> dict[str, Tensor]:
    """Words and the same backwards, padded; a label of -100 counts for nothing."""
    inputs = [encode(word) for word in samples]
    outputs = [encode(word[::-1]) for word in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad(inputs, batch_first=True, padding_value=PAD)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "labels": pad(outputs, batch_first=True, padding_value=-100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=PAD, **shape))
    engine, *_ = mizzen.initialize(model=model, training_data=words(), collate_fn=collate, config=CONFIG)
    for _ in range(args.steps):
        report = engine.train_batch()
    engine.eval()
    shown = ["python", "launch", "tensor"]
    written = engine.module.generate(collate(shown)["input_ids"].to(engine.device), max_new_tokens=8, do_sample=False)
    if engine.global_rank == 0:
        print(f"loss after {report.step} steps: {report.loss:.3f}")
        for word, tokens in zip(shown, written, strict=True):
            print(f"{word} -> {decode(tokens)}")
    engine.destroy()


if __name__ == "__main__":
    main()
