"""Train a Hugging Face causal language model on a text, then let it write. Needs the extra `clients`.

Without --model it is a small Llama that starts from nothing and reads bytes; with it, a folder or a name on the hub.
Such a model wants a lower learning rate than the configuration has.

On one rank:  python examples/finetune_causal_lm.py
On two:       python -m torch.distributed.run --standalone --nproc-per-node 2 examples/finetune_causal_lm.py
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

import mizzen

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerBase
except ImportError as error:
    raise mizzen.MissingExtra("transformers", extra="clients", purpose="this example") from error


def load(name: str | None) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """A model with its tokenizer."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    tokenizer = ByT5Tokenizer()
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, **shape)
    return AutoModelForCausalLM.from_config(config), tokenizer


def samples(tokens: list[int], length: int) -> list[dict[str, Tensor]]:
    """A data set of the model's own keyword arguments; a causal language model shifts its labels itself."""
    pieces = torch.tensor(tokens).split(length)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, help="a file; else the help texts of Python")
    parser.add_argument("--config", default=str(Path(__file__).parent / "configs" / "finetune.json"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, tokenizer = load(args.model)
    text = args.text.read_text() if args.text else "\n\n".join(topics.values())
    data = samples(tokenizer.encode(text, add_special_tokens=False), args.length)
    engine, *_ = mizzen.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=args.config
    )
    for _ in range(args.steps):
        engine.train_batch()
    engine.destroy()

    if engine.global_rank == 0:
        model.eval()
        prompt = tokenizer("The ", return_tensors="pt", add_special_tokens=False).to(engine.device)
        written = model.generate(**prompt, max_new_tokens=200, do_sample=True, temperature=0.7)
        print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
