"""HF Trainer on mizzen and on DeepSpeed: the same script, a Llama of 1.107 B parameters, ZeRO-2 and ZeRO-3, bf16.

Each turn is a process of its own. Those of mizzen have the drop-in on their path; those of DeepSpeed what is installed.

    python -m bench.hf_trainer
"""

from collections.abc import Sequence
from dataclasses import asdict, fields

from bench.llama import HOLLOW, Size
from bench.play import Game, parser_of, perform
from bench.record import Record, header, is_ours, table, versus
from bench.trainer import SYSTEMS
from mizzen.environment import environ
from mizzen.launcher.job import with_drop_in


def main(words: Sequence[str] | None = None) -> int:
    """Play, print, write."""
    parser = parser_of("HF Trainer on mizzen and on DeepSpeed", SYSTEMS, rounds=3, steps=8, warm=4)
    parser.add_argument("--hollow", action="store_true", help="a tiny twin of the model: shows the time of the host")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with a device (default: 1)")
    options = parser.parse_args(words)
    game = Game(
        workload="bench.trainer",
        settings=asdict(HOLLOW if options.hollow else Size()),
        systems=options.systems,
        rounds=options.rounds,
        steps=options.steps,
        warm=options.warm,
        ranks=options.ranks,
        anew=True,
        apart={name: with_drop_in(environ()) for name in options.systems if is_ours(name)},
    )
    return perform(game, "hf_trainer", report, options)


def report(record: Record) -> str:
    """The tables of a run."""
    size = Size(**{item.name: record.settings[item.name] for item in fields(Size)})
    tokens = size.tokens * record.settings["ranks"]
    rows = [
        (
            result.name,
            f"{1000 * result.seconds:.1f}",
            f"{tokens / result.seconds:,.0f}",
            f"{result.peak / 2**30:.1f}",
            f"{result.setup:.1f}",
            f"{result.losses[-1]:.4f}",
        )
        for result in record.results
    ]
    heads = ["system", "ms/step", "tokens/s", "peak GiB", "set-up s", "last loss"]
    return "\n\n".join([header(record), table(heads, rows), versus(record.results)])


if __name__ == "__main__":
    raise SystemExit(main())
