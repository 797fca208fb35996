"""mizzen and its peers on the CPU: two gloo ranks of one thread each, a GPT of 17.4 M parameters in fp32.

All systems stand ready at once and take turns of one step, in another order each round, so that whatever else the
machine does hits all of them alike.

    python -m bench.cpu_ranks
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from bench.gpt import SYSTEMS, Size
from bench.paired import typical
from bench.play import Game, parser_of, perform
from bench.record import Record, equal_losses, header, table, versus

FLOOR: Final = "floor"
"""Ranks that do not talk to each other; their losses are their own."""


def main(words: Sequence[str] | None = None) -> int:
    """Play, print, write."""
    parser = parser_of("mizzen and its peers on two CPU ranks", SYSTEMS, rounds=12, steps=1, warm=1)
    for item in fields(Size):
        parser.add_argument(f"--{item.name}", type=int, default=item.default, help=f"(default: {item.default})")
    options = parser.parse_args(words)
    size = Size(**{item.name: vars(options)[item.name] for item in fields(Size)})
    game = Game(
        workload="bench.gpt",
        settings=asdict(size),
        systems=options.systems,
        rounds=options.rounds,
        steps=options.steps,
        warm=options.warm,
        ranks=2,
        environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
    )
    return perform(game, "cpu_ranks", report, options)


def report(record: Record) -> str:
    """The tables of a run."""
    base = record.result(FLOOR)
    losses = equal_losses(result for result in record.results if result.name != FLOOR)
    rows = [
        (
            result.name,
            f"{1000 * result.seconds:.0f}",
            result.against(base).as_overhead() if base and result is not base else "-",
            f"{1000 * typical(result.processor):.0f}",
            result.against(base, "processor").as_overhead() if base and result is not base else "-",
            f"{result.peak / 1e6:.0f}",
            f"{result.setup:.1f}",
            losses.get(result.name, "-"),
        )
        for result in record.results
    ]
    heads = [
        *("system", "ms/step", "over the floor", "processor ms", "over the floor"),
        *("peak RSS MB", "set-up s", "losses"),
    ]
    both = [versus(record.results), versus(record.results, "processor")]
    return "\n\n".join([header(record), table(heads, rows), *both])


if __name__ == "__main__":
    raise SystemExit(main())
