"""A tokenizer that is made here, word by word, and data sets in its few words."""

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
WORDS = tuple(f"w{number}" for number in range(60))
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found.chat_template = TEMPLATE
    return found


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def texts(count: int) -> Dataset:
    chance = random.Random(count)
    return Dataset.from_list([{"text": sentence(chance, chance.randint(6, 14))} for _ in range(count)])


def pairs(count: int) -> Dataset:
    """Prompts, each with an answer that is preferred to another."""
    chance = random.Random(count)
    row = lambda: {  # noqa: E731
        "prompt": sentence(chance, 4) + " ",
        "chosen": sentence(chance, chance.randint(3, 8)),
        "rejected": sentence(chance, chance.randint(3, 8)),
    }
    return Dataset.from_list([row() for _ in range(count)])


def prompts(count: int) -> Dataset:
    chance = random.Random(count)
    return Dataset.from_list([{"prompt": sentence(chance, chance.randint(3, 6))} for _ in range(count)])
