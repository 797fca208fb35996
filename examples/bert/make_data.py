"""Make the data that `deepspeed_train.py` trains on: pairs of sentences from the texts of Python's standard library.

    python examples/bert/make_data.py --data_path_prefix runs/bert/data

The documents are what its modules say of themselves. A small WordPiece is learnt from them, and written beside the
shards as `vocab.txt`. A shard is one file of samples, in order; the last shard is kept for validation.
"""

import argparse
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import BertWordPieceTokenizer

DATA = "runs/bert/data"
SHARD = 2048
"""Samples of a shard."""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def documents(most: int) -> Iterator[list[str]]:
    """The sentences of one module after the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & {*path.parts})
    for path in files[:most]:
        texts = re.findall(r'"""(.+?)"""', path.read_text("utf-8", errors="replace"), re.DOTALL)
        sentences = [" ".join(part.split()) for text in texts for part in re.split(r"(?<=[.:!?])\s+|\n\s*\n", text)]
        if len(kept := [sentence for sentence in sentences if len(sentence) > 20]) > 3:
            yield kept


def pairs(tokens: list[list[list[int]]], length: int, choose: random.Random) -> Iterator[tuple[list[int], int, int]]:
    """(tokens, how many of them belong to the first part, whether the second part is some other text).

    The first part is a few sentences. The second is what follows them, or begins anywhere in another document.
    """
    room = length - 3
    for document in tokens:
        place = 0
        while place < len(document) - 1:
            first, place = _fill(document, place, choose.randint(room // 4, room // 2))
            is_other = choose.random() < 0.5
            source = choose.choice(tokens) if is_other else document
            start = choose.randrange(len(source)) if is_other else place
            second, end = _fill(source, start, room - len(first))
            if not is_other:
                place = end
            if second:
                yield [2, *first, 3, *second, 3], len(first) + 2, int(is_other)


def _fill(document: list[list[int]], place: int, size: int) -> tuple[list[int], int]:
    """Sentences from a place on, up to a size, and the place behind them."""
    found: list[int] = []
    while place < len(document) and len(found) < size:
        found += document[place]
        place += 1
    return found[:size], place


def write_shard(folder: Path, number: int, samples: list[tuple[list[int], int, int]]) -> None:
    """Samples end to end, and where each of them ends."""
    tokens, firsts, others = zip(*samples, strict=True)
    arrays = {
        "tokens": np.concatenate([np.asarray(each, dtype=np.int32) for each in tokens]),
        "ends": np.cumsum([len(each) for each in tokens], dtype=np.int64),
        "firsts": np.asarray(firsts, dtype=np.int32),
        "others": np.asarray(others, dtype=np.int64),
    }
    save_file(arrays, folder / f"shard-{number:04}.safetensors")


def make(prefix: str, *, length: int = 128, vocabulary: int = 8192, most: int = 10**6, seed: int = 0) -> int:
    """Write all shards; returns how many. They appear all at once, when the last is written."""
    folder = Path(prefix)
    under_way = folder.with_name(f"{folder.name}.{os.getpid()}.making")
    under_way.mkdir(parents=True)
    texts = list(documents(most))
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    sentences = [sentence for document in texts for sentence in document]
    tokenizer.train_from_iterator(sentences, vocabulary, show_progress=False, special_tokens=SPECIAL)
    tokenizer.save_model(str(under_way))
    encoded = iter(tokenizer.encode_batch(sentences, add_special_tokens=False))
    tokens = [[next(encoded).ids for _ in document] for document in texts]
    choose = random.Random(seed)
    samples = list(pairs(tokens, length, choose))
    choose.shuffle(samples)
    size = min(SHARD, -(-len(samples) // 4))
    starts = range(0, len(samples), size)
    for number, start in enumerate(starts):
        write_shard(under_way, number, samples[start : start + size])
    under_way.rename(folder)
    return len(starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path_prefix", default=DATA, help=f"a folder that is not there yet (default: {DATA})")
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens of a sample (default: 128)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="word pieces (default: 8192)")
    parser.add_argument("--modules", type=int, default=10**6, help="read so many modules of the library only")
    args = parser.parse_args()
    if Path(args.data_path_prefix).exists():
        parser.error(f"{args.data_path_prefix} is there already: remove it to make the data anew")
    count = make(args.data_path_prefix, length=args.max_seq_length, vocabulary=args.vocabulary, most=args.modules)
    print(f"{count} shards in {args.data_path_prefix}")


if __name__ == "__main__":
    main()
