"""Fine-tuning on questions, as after every pre-training: find the words of a text that answer one. Loads its weights.

    python examples/bert/squad.py --model_name_or_path runs/bert/checkpoints --steps 200

The questions are made: a text is four functions of the standard library, each with what it says of itself; a question
is the name of one of them, and its answer what is said there. Without weights to load, it starts from nothing.
"""

import argparse
import inspect
import random
from pathlib import Path

import torch
from deepspeed_train import SIZES
from make_data import DATA
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from transformers import BertConfig, BertForQuestionAnswering

import mizzen

CONFIG = {
    "train_batch_size": 16,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-4, "warmup_num_steps": 20}},
    "steps_per_print": 50,
}
MODULES = ("os", "shutil", "random", "textwrap", "inspect", "statistics", "tempfile", "socket", "string", "json")


def facts() -> list[tuple[str, str]]:
    """(the name of a function, the first line of what it says of itself)."""
    found = []
    for name in MODULES:
        for member, function in inspect.getmembers(__import__(name), inspect.isfunction):
            if (text := inspect.getdoc(function)) and not member.startswith("_"):
                found.append((member.replace("_", " "), text.splitlines()[0][:80]))
    return sorted(set(found))


def question(
    known: list[tuple[str, str]], tokenizer: BertWordPieceTokenizer, length: int, seed: int
) -> dict[str, Tensor]:
    """One sample: `[CLS] name [SEP] name text name text ... [SEP]`, and the first and last token of the answer."""
    choose = random.Random(seed)
    chosen = choose.sample(known, 4)
    asked = choose.randrange(4)

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    row = [2, *tokens(chosen[asked][0]), 3]
    first, start, end = len(row), 0, 0
    for number, (name, text) in enumerate(chosen):
        row += tokens(name)
        begin = len(row)
        row += tokens(text)
        if number == asked:
            start, end = begin, len(row) - 1
    row = [*row[: length - 1], 3]
    padded = torch.tensor(row + [0] * (length - len(row)))
    return {
        "input_ids": padded,
        "attention_mask": (padded > 0).long(),
        "token_type_ids": ((torch.arange(length) >= first) & (padded > 0)).long(),
        "start_positions": torch.tensor(start),  # one beyond the text counts for nothing
        "end_positions": torch.tensor(end),
    }


def load_weights(model: BertForQuestionAnswering, folder: str) -> int:
    """Take over what a checkpoint of `deepspeed_train.py` has of this model; returns how many tensors."""
    state = mizzen.checkpoint.get_fp32_state_dict_from_zero_checkpoint(folder)
    known = {name: tensor for name, tensor in state.items() if name in model.state_dict()}
    model.load_state_dict(known, strict=False)
    return len(known)


@torch.no_grad()
def exact_match(engine: mizzen.Engine, samples: list[dict[str, Tensor]]) -> float:
    """The part of questions whose first and last word are both found."""
    engine.eval()
    batch = {name: torch.stack([each[name] for each in samples]).to(engine.device) for name in samples[0]}
    output = engine(**batch)
    is_right = (output.start_logits.argmax(1) == batch["start_positions"]) & (
        output.end_logits.argmax(1) == batch["end_positions"]
    )
    engine.train()
    return is_right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", metavar="DIR", help="checkpoints of deepspeed_train.py")
    parser.add_argument("--model_size", choices=SIZES, default="tiny")
    parser.add_argument("--data_path_prefix", default=DATA, help="where its vocab.txt is")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers")
    args = parser.parse_args()

    torch.manual_seed(0)
    vocabulary = Path(args.data_path_prefix) / "vocab.txt"
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    padded = -(-tokenizer.get_vocab_size() // 64) * 64
    model = BertForQuestionAnswering(BertConfig(vocab_size=padded, **SIZES[args.model_size]))
    loaded = load_weights(model, args.model_name_or_path) if args.model_name_or_path else 0
    known = facts()
    samples = [question(known, tokenizer, args.max_seq_length, seed) for seed in range(1024 + 128)]
    engine, *_ = mizzen.initialize(model=model, training_data=samples[128:], config=CONFIG)
    for _ in range(args.steps):
        report = engine.train_batch()
    found = exact_match(engine, samples[:128])
    if engine.global_rank == 0:
        print(f"{loaded} tensors loaded; loss after {report.step} steps: {report.loss:.3f}; exact match {found:.2f}")
    engine.destroy()


if __name__ == "__main__":
    main()
