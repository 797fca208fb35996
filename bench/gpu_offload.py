"""mizzen and its peers on one GPU with optimizer states in host memory: a Llama of 3.02 B parameters.

Every turn is a process of its own, as in `gpu_llama.py`; until the seventh step mizzen measures which share of the
states should pass through the device. Beside the time of a step stand the bytes on the device after
it, where masters and moments must not be, and those of host memory.

    python -m bench.gpu_offload
    python -m bench.gpu_offload --parameters
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from bench.gpu_llama import PEAK_FLOPS
from bench.llama import HOLLOW, Size
from bench.play import Game, installed, parser_of, perform
from bench.record import Record, header, table, versus

LARGE: Final = Size(hidden=3072, layers=28, heads=24)
"""3.02 B parameters."""
SYSTEMS: Final = ("fsdp2-3+cpu", "deepspeed-2+cpu", "deepspeed-3+cpu+params", "mizzen-2+cpu", "mizzen-2+cpu+fused")
PARAMETERS: Final = ("fsdp2-3+cpu", "deepspeed-3+cpu+params", "mizzen-3+cpu+params", "mizzen-3+cpu+params+fused")
"""Stage 3 with parameters in host memory, too; FSDP2's policy offloads both."""
OURS: Final = ("mizzen-2", "mizzen-2+fused", "mizzen-2+cpu", "mizzen-2+cpu+fused", "mizzen-3+cpu+params")
MORE: Final = (
    *OURS[:2],
    *PARAMETERS[2:],
    *("mizzen-2+cpu+compile", "mizzen-2+cpu+compile+fused"),
    *("mizzen-2+cpu+auto", "mizzen-2+cpu+auto+fused", "mizzen-2+cpu+early", "mizzen-2+cpu+early+fused"),
    *("mizzen-3+cpu", "mizzen-3+cpu+fused", "mizzen-3+cpu+params+auto", "mizzen-3+cpu+params+auto+fused"),
    *(f"mizzen-2+cpu+stream{percent}" for percent in range(0, 101, 10)),
    *(f"{name}+accumulate8" for name in OURS),
    *("fsdp2-3", "deepspeed-2", "deepspeed-3", "deepspeed-3+cpu", "deepspeed-2+cpu+accumulate8"),
)
"""Systems that take part only when they are asked for."""


def main(words: Sequence[str] | None = None) -> int:
    """Play, print, write."""
    parser = parser_of("states in host memory on one GPU", SYSTEMS, more=MORE, rounds=1, steps=5, warm=8)
    parser.add_argument("--hollow", action="store_true", help="a tiny twin of the model: shows the time of the host")
    parser.add_argument("--parameters", action="store_true", help="stage 3 with parameters in host memory, too")
    options = parser.parse_args(words)
    game = Game(
        workload="bench.llama",
        settings=asdict(HOLLOW if options.hollow else LARGE),
        systems=installed(PARAMETERS) if options.parameters else options.systems,
        rounds=options.rounds,
        steps=options.steps,
        warm=options.warm,
        anew=True,
    )
    return perform(game, "gpu_offload", report, options)


def report(record: Record) -> str:
    """The tables of a run."""
    size = Size(**{item.name: record.settings[item.name] for item in fields(Size)})
    rows = [
        (
            result.name,
            f"{result.seconds:.3f}",
            f"{size.tokens * _micros(result.name) / result.seconds:,.0f}",
            f"{100 * size.flops * _micros(result.name) / result.seconds / PEAK_FLOPS:.1f} %",
            f"{result.peak / 2**30:.1f}",
            f"{result.held / 2**30:.1f}",
            f"{result.resident / 2**30:.1f}",
            f"{result.resident / size.parameters:.1f}",
            f"{result.setup:.1f}",
            f"{result.losses[-1]:.4f}",
        )
        for result in record.results
    ]
    heads = ["system", "s/step", "tokens/s", "MFU", "peak GiB", "after GiB", "host GiB", "B/param", "set-up s", "loss"]
    return "\n\n".join([header(record), table(heads, rows), versus(record.results)])


def _micros(system: str) -> int:
    """Micro-batches of a step."""
    return 8 if system.endswith("accumulate8") else 1


if __name__ == "__main__":
    raise SystemExit(main())
