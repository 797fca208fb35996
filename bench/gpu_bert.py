"""mizzen and its peers on one GPU: pre-training of BERT-large, masked words and next sentences, bf16 with fp32 masters.

python -m bench.gpu_bert                                # 128 sequences of 128 tokens
python -m bench.gpu_bert --length 512 --samples 32
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from bench.bert import OTHERS, SYSTEMS, Size
from bench.gpu_llama import PEAK_FLOPS
from bench.play import Game, parser_of, perform
from bench.record import Record, header, table, versus

HEADS: Final = ["system", "ms/step", "samples/s", "MFU", "peak GiB", "set-up s", "last loss"]


def main(words: Sequence[str] | None = None) -> int:
    """Play, print, write."""
    parser = parser_of("BERT pre-training on one GPU", SYSTEMS, more=OTHERS, rounds=3, steps=20, warm=10)
    usual = Size()
    parser.add_argument("--length", type=int, default=usual.length, help=f"tokens (default: {usual.length})")
    parser.add_argument("--samples", type=int, default=usual.samples, help=f"sequences (default: {usual.samples})")
    options = parser.parse_args(words)
    game = Game(
        workload="bench.bert",
        settings=asdict(Size(samples=options.samples, length=options.length)),
        systems=options.systems,
        rounds=options.rounds,
        steps=options.steps,
        warm=options.warm,
        anew=True,
    )
    return perform(game, "gpu_bert", report, options)


def report(record: Record) -> str:
    """The tables of a run."""
    size = Size(**{item.name: record.settings[item.name] for item in fields(Size)})
    rows = [
        (
            result.name,
            f"{1000 * result.seconds:.1f}",
            f"{size.samples / result.seconds:,.0f}",
            f"{100 * size.flops / result.seconds / PEAK_FLOPS:.1f} %",
            f"{result.peak / 2**30:.1f}",
            f"{result.setup:.1f}",
            f"{result.losses[-1]:.4f}",
        )
        for result in record.results
    ]
    work = f"{size.samples} sequences of {size.length} tokens"
    return "\n\n".join([header(record), work, table(HEADS, rows), versus(record.results)])


if __name__ == "__main__":
    raise SystemExit(main())
