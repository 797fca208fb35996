"""mizzen and its peers on one GPU: Hugging Face's Llama of 1.107 B parameters, bf16 compute with fp32 masters.

Systems do not fit on a device side by side, so each turn is a process of its own: it starts, warms up, runs its steps
and leaves. Rounds of such turns still put a peer's steps within seconds of ours.

    python -m bench.gpu_llama
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from bench.llama import COMPILED, EAGER, FULL, FUSED, HOLLOW, TENSOR, Size
from bench.play import Game, parser_of, perform
from bench.record import Record, header, table, versus

PEAK_FLOPS: Final = 989e12
"""Dense bf16 operations per second of an H100 or H200, from its data sheet."""


def main(words: Sequence[str] | None = None) -> int:
    """Play, print, write."""
    parser = parser_of(
        "mizzen and its peers on one GPU", EAGER, more=(*FULL, *TENSOR, *COMPILED, *FUSED), rounds=3, steps=8, warm=6
    )
    parser.add_argument("--hollow", action="store_true", help="a tiny twin of the model: shows the time of the host")
    options = parser.parse_args(words)
    game = Game(
        workload="bench.llama",
        settings=asdict(HOLLOW if options.hollow else Size()),
        systems=options.systems,
        rounds=options.rounds,
        steps=options.steps,
        warm=options.warm,
        anew=True,
    )
    return perform(game, "gpu_llama", report, options)


def report(record: Record) -> str:
    """The tables of a run."""
    size = Size(**{item.name: record.settings[item.name] for item in fields(Size)})
    rows = [
        (
            result.name,
            f"{1000 * result.seconds:.1f}",
            f"{size.tokens / result.seconds:,.0f}",
            f"{100 * size.flops / result.seconds / PEAK_FLOPS:.1f} %",
            f"{result.peak / 2**30:.1f}",
            f"{result.setup:.1f}",
            f"{result.losses[-1]:.4f}",
        )
        for result in record.results
    ]
    heads = ["system", "ms/step", "tokens/s", "MFU", "peak GiB", "set-up s", "last loss"]
    return "\n\n".join([header(record), table(heads, rows), versus(record.results)])


if __name__ == "__main__":
    raise SystemExit(main())
