"""Two stages on two CPU ranks of one thread each: mizzen beside torch.distributed.pipelining, with the same 1F1B table.

Both train the same blocks with SGD. They take turns of one step, in another order each round. torch is not asked for
the outputs of the last stage, which nobody looks at. Then mizzen alone takes as many steps again, of which each forward
and backward is timed on both ranks: the share of time in which they wait, which is the bubble, beside what the table
says for these times, and for their means. What a message takes is measured before that, with nothing else going on:
half the time of one to the other stage and back, by the very calls of a step.

One thread is OMP_NUM_THREADS=1: `torch.set_num_threads` does not reach the products of oneDNN on an ARM processor, and
the ranks would compute on each other's cores.

    python -m bench.pipeline
"""

import argparse
import os
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


class AsMeasured:
    """The times of a step, each instruction with its own; stands in the place of `Times`."""

    forward = backward = 0.0
    backward_input = None

    def __init__(self, seconds: dict[str, list[list[float]]], transfer: float) -> None:
        self.seconds = seconds
        self.transfer = transfer

    def of(self, one: Any) -> float:
        """How long an instruction took: each stage takes its micro-batches in order; weights alone are not in 1F1B."""
        work = self.seconds.get(one.kind.name.lower())
        return work[one.chunk][one.micro] if work else 0.0


def message_seconds(link: Any, options: argparse.Namespace) -> float:
    """What a message takes from one stage to the other, as the median of some that go there and back."""
    from mizzen.parallel.pipeline.schedule import StageMessage
    from mizzen.parallel.pipeline.wire import describe

    shape = (options.samples, options.length, options.width)
    description, tensors = describe(torch.randn(shape).requires_grad_())
    seconds = []
    for number in range(40):
        there, back = StageMessage("activation", 1, number, 0, 1), StageMessage("gradient", 0, number, 1, 0)
        if dist.get_rank() == 0:
            link.post_gradients(back, description.gradients)
        else:
            link.post(there)
        dist.barrier()
        started = time.perf_counter()
        if dist.get_rank() == 0:
            link.send(there, description, tensors)
            link.receive_gradients(back, description.gradients)
        else:
            link.send_gradients(back, link.receive(there)[1])
        seconds.append((time.perf_counter() - started) / 2)
        link.finish()
    found = torch.tensor(statistics.median(seconds))
    dist.broadcast(found, 0)  # the second stage is not there for all of the way
    return found.item()


def bubbles(engine: Any, options: argparse.Namespace, micros: list) -> list[tuple[float, ...]]:
    """For some steps the bubble as it was, by the table for the times as they were, and for the mean times.

    Beside these what a message takes.
    """
    from mizzen.parallel.pipeline.timeline import Times, timeline
    from mizzen.pipe import make_schedule

    transfer = message_seconds(engine.runner.link, options)
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
        seconds = {
            name: [[end - start for each, start, end in stage if each == name] for stage in stages]
            for name in ("forward", "backward")
        }
        busy = sum(sum(stage) for work in seconds.values() for stage in work)
        means = {name: [statistics.fmean(stage) for stage in work] for name, work in seconds.items()}
        by_table = (
            timeline(table, AsMeasured(seconds, transfer)).bubble,
            timeline(table, Times(**means, transfer=transfer)).bubble,
        )
        found.append((1 - busy / (2 * length), *by_table, transfer))
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
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
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
    os.putenv("OMP_NUM_THREADS", "1")  # for the ranks, which load torch themselves
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    multiprocessing.spawn(play, (options, results), nprocs=2, join=True)
    seconds, processor, found = results.get()
    for name, values in seconds.items():
        used = statistics.median(processor[name])
        print(f"{name:8} {1000 * statistics.median(values):8.1f} ms per step, {1000 * used:.1f} ms of the processor")
    measured, by_table, even, message = (100 * statistics.median(each) for each in zip(*found, strict=True))
    print(f"bubble   {measured:8.1f} % measured, {by_table:.1f} % by the table, {even:.1f} % for even times (medians)")
    print(f"message  {10 * message:8.2f} ms from a stage to the other")
    for what, values in (("time", seconds), ("processor time", processor)):
        pairs = [a / b for a, b in zip(values["mizzen"], values["torch"], strict=True)]
        print(f"mizzen takes {statistics.median(pairs):.3f} of torch's {what} (median of {len(pairs)} paired rounds)")


if __name__ == "__main__":
    main()
