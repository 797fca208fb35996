"""Two stages on two CPU ranks of one thread each: mizzen beside torch.distributed.pipelining, with the same 1F1B table.

Both train the same blocks with SGD. They take turns of one step, in another order each round. Then mizzen alone takes
as many steps again, of which each forward and backward is timed on both ranks: the share of time in which they wait,
which is the bubble, beside what the table says for the mean times of that step.

    python -m bench.pipeline
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Recorder:
    """Stands in the place of a runner's phases, and notes when each begins and ends."""

    def __init__(self, phases: Any) -> None:
        self.phases = phases
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the runner calls around a forward or a backward; waiting for another stage is outside."""
        with self.phases.phase(name):
            started = time.perf_counter()
            yield
            self.spans.append((name, started, time.perf_counter()))


def bubbles(engine: Any, options: argparse.Namespace, micros: list) -> list[tuple[float, float]]:
    """For each of some steps the bubble as it was, and as the table has it for the mean times of that step."""
    from mizzen.parallel.pipeline.timeline import Times, timeline
    from mizzen.pipe import make_schedule

    recorder = engine.runner.phases = Recorder(engine.runner.phases)
    table, found = make_schedule("1f1b", 2, options.micros), []
    for _ in range(options.rounds):
        recorder.spans.clear()
        dist.barrier()
        engine.train_batch(iter(micros))
        stages: list = [None, None]
        dist.all_gather_object(stages, recorder.spans)
        spans = [span for stage in stages for span in stage]
        length = max(end for *_, end in spans) - min(start for _, start, _ in spans)
        busy = sum(end - start for _, start, end in spans)
        means = {
            name: [statistics.fmean(end - start for each, start, end in stage if each == name) for stage in stages]
            for name in ("forward", "backward")
        }
        found.append((1 - busy / (2 * length), timeline(table, Times(**means)).bubble))
    return found


def ours(options: argparse.Namespace) -> tuple[Callable[[], object], Callable[[], list]]:
    """One step of mizzen as a function, and what measures its bubble."""
    import mizzen
    from mizzen.pipe import LayerSpec, PipelineModule

    torch.manual_seed(0)
    layers = [LayerSpec(Block, options.width) for _ in range(options.blocks)]
    model = PipelineModule(layers, num_stages=2, loss_fn=functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": options.samples,
        "gradient_accumulation_steps": options.micros,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "progress": {"enabled": False},
        "steps_per_print": 10**9,
    }
    engine, *_ = mizzen.initialize(model=model, config=config)
    micros = [batch(options, options.samples)] * options.micros
    return lambda: engine.train_batch(iter(micros)), lambda: bubbles(engine, options, micros)


def theirs(options: argparse.Namespace) -> object:
    """One step of torch's own pipeline as a function."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    rank, half = dist.get_rank(), options.blocks // 2
    module = nn.Sequential(*(Block(options.width) for _ in range(half)))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=options.micros, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, fused=True)
    inputs, labels = batch(options, options.samples * options.micros)

    def step() -> None:
        optimizer.zero_grad()
        losses: list = []
        schedule.step(inputs) if rank == 0 else schedule.step(target=labels, losses=losses)
        optimizer.step()

    return step


def batch(options: argparse.Namespace, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (samples, options.length, options.width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def play(rank: int, options: argparse.Namespace, results: object) -> None:
    """What each of the two ranks does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=2)
    step, measure = ours(options)
    steps = {"mizzen": step, "torch": theirs(options)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 2):
        for name in sorted(steps, reverse=number % 2 == 1):
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            steps[name]()
            dist.barrier()
            if number > 1:
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - used)
    found = measure()
    if rank == 0:
        results.put((seconds, processor, found))


def main() -> None:
    """Run both, print the medians and their quotient."""
    parser = argparse.ArgumentParser(description=__doc__)
    settings = {"width": 256, "blocks": 8, "length": 64, "samples": 4, "micros": 8, "rounds": 15, "port": 29555}
    for name, value in settings.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    multiprocessing.spawn(play, (options, results), nprocs=2, join=True)
    seconds, processor, found = results.get()
    for name, values in seconds.items():
        used = statistics.median(processor[name])
        print(f"{name:8} {1000 * statistics.median(values):8.1f} ms per step, {1000 * used:.1f} ms of the processor")
    measured, planned = (statistics.median(each) for each in zip(*found, strict=True))
    print(f"bubble   {100 * measured:8.1f} % measured, {100 * planned:.1f} % by the table (medians)")
    for what, values in (("time", seconds), ("processor time", processor)):
        pairs = [a / b for a, b in zip(values["mizzen"], values["torch"], strict=True)]
        print(f"mizzen takes {statistics.median(pairs):.3f} of torch's {what} (median of {len(pairs)} paired rounds)")


if __name__ == "__main__":
    main()
