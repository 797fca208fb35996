"""Two stages on two CPU ranks of one thread each: mizzen beside torch.distributed.pipelining, with 1F1B.

All train the same blocks with SGD. They take turns of one step, in another order each round. torch is not asked for
the outputs of the last stage, which nobody looks at. Its step knows nothing of what it does: `torch, told` takes the
norm of the gradients of both stages, as every step of mizzen does, and leaves a step out that would break the weights.
mizzen takes the last backward of the last stage in two halves, so that the first stage has its gradient sooner.
`mizzen, whole` does not (pipeline.split_last_backward is false): it does what torch's table says, in that order.

Then mizzen alone takes as many steps again, of which each forward and backward is timed on both ranks, with all that
belongs to it but waiting. The share of time in which ranks wait is the bubble; beside it stands what the table says for
these times, and for their means. The table is given one time for all messages: the median, over all of these steps, of
those for which somebody stood waiting, from the call that sent one to the call that had it.

Medians of one pair of ranks differ by some percent from those of the next, on a machine whose speed changes by the
minute. So there are several pairs, one after the other, and the medians are those over the rounds of all of them.

One thread is OMP_NUM_THREADS=1: `torch.set_num_threads` does not reach the products of oneDNN on an ARM processor, and
the ranks would compute on each other's cores.

    python -m bench.pipeline
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn import functional

TOLD = "torch, told"
WHOLE = "mizzen, whole"


class Block(nn.Module):
    """A block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Recorder:
    """Notes what each forward and backward of a stage takes, waiting left out, and when messages are sent and there.

    It stands in the place of the runner's link, and around the runner's actions. To ask for a message counts for the
    forward or backward that comes next.
    """

    def __init__(self, link: Any) -> None:
        self.link = link
        self.clear()

    def clear(self) -> None:
        self.work: dict[Any, float] = {}
        self.began = self.ended = 0.0
        self.sent: dict[str, float] = {}
        self.taken: dict[str, tuple[float, float]] = {}
        self.waited = self.asked = 0.0

    def around(self, do: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """The runner's way to carry out an action, timed."""
        from mizzen.parallel.pipeline.schedule import Instruction

        def timed(batch: Any, action: Any) -> None:
            started, self.waited = time.perf_counter(), 0.0
            do(batch, action)
            self.ended = time.perf_counter()
            self.began = self.began or started
            work = self.ended - started - self.waited
            if isinstance(action, Instruction):
                self.work[action] = work + self.asked
                work = -self.asked
            self.asked += work

        return timed

    def send(self, transfer: Any, *rest: Any) -> None:
        self.sent[str(transfer)] = time.perf_counter()
        self.link.send(transfer, *rest)

    def send_gradients(self, transfer: Any, gradients: Any) -> None:
        self.sent[str(transfer)] = time.perf_counter()
        self.link.send_gradients(transfer, gradients)

    def receive(self, transfer: Any) -> Any:
        return self._received(transfer, self.link.receive, transfer)

    def receive_gradients(self, transfer: Any, facts: Any) -> Any:
        return self._received(transfer, self.link.receive_gradients, transfer, facts)

    def _received(self, transfer: Any, receive: Callable[..., Any], *given: Any) -> Any:
        started = time.perf_counter()
        found = receive(*given)
        ended = time.perf_counter()
        self.taken[str(transfer)] = started, ended
        self.waited += ended - started
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


class AsMeasured:
    """The times of a step, each instruction with its own; stands in the place of `Times`."""

    forward = backward = 0.0
    backward_input = None

    def __init__(self, seconds: dict[Any, float], transfer: float) -> None:
        self.seconds = seconds
        self.transfer = transfer

    def of(self, one: Any) -> float:
        """How long an instruction took; nothing, if it was not in the step."""
        return self.seconds.get(one, 0.0)


def bubbles(engine: Any, options: argparse.Namespace, micros: list) -> tuple[list[tuple[float, ...]], float]:
    """For some steps the bubble as it was, by the table for the times as they were, and for the mean times.

    Beside these what a message takes, on whose ends the clock of one machine is read.
    """
    from mizzen.parallel.pipeline.runner import BatchRun
    from mizzen.parallel.pipeline.tables import split_last
    from mizzen.parallel.pipeline.timeline import timeline
    from mizzen.pipe import make_schedule

    recorder = engine.runner.link = Recorder(engine.runner.link)
    BatchRun.do = recorder.around(BatchRun.do)
    table, steps, waits = split_last(make_schedule("1f1b", 2, options.micros)), [], []
    for _ in range(options.rounds):
        recorder.clear()
        dist.barrier()
        engine.train_batch(iter(micros))
        stages: list = [None, None]
        dist.all_gather_object(stages, (recorder.work, recorder.began, recorder.ended, recorder.sent, recorder.taken))
        work, began, ended, sent, taken = zip(*stages, strict=True)
        steps.append((work, max(ended) - min(began)))
        when = sent[0] | sent[1]
        waits += [there - when[name] for name, (asked, there) in (taken[0] | taken[1]).items() if asked < when[name]]
    transfer = statistics.median(waits)
    found = []
    for work, length in steps:
        seconds = work[0] | work[1]
        busy = sum(seconds.values())
        kinds = {(one.kind, one.chunk) for one in seconds}
        mean = {
            kind: statistics.fmean(took for one, took in seconds.items() if (one.kind, one.chunk) == kind)
            for kind in kinds
        }
        means = {one: mean[one.kind, one.chunk] for one in seconds}
        found.append(
            (
                1 - busy / (2 * length),
                timeline(table, AsMeasured(seconds, transfer)).bubble,
                timeline(table, AsMeasured(means, transfer)).bubble,
            )
        )
    return found, transfer


def ours(options: argparse.Namespace, *, is_whole: bool = False) -> tuple[Callable[[], object], Callable[[], tuple]]:
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
        "pipeline": {"split_last_backward": not is_whole},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "progress": {"enabled": False},
        "steps_per_print": 10**9,
    }
    engine, *_ = mizzen.initialize(model=model, config=config)
    whole = batch(options, options.samples * options.micros)
    micros = list(zip(*(each.chunk(options.micros) for each in whole), strict=True))
    return lambda: engine.train_batch(iter(micros)), lambda: bubbles(engine, options, micros)


def theirs(options: argparse.Namespace, *, is_told: bool = False) -> Callable[[], object]:
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
        if is_told:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            square = nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(square)
            if not square.isfinite():
                return
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
    whole, _ = ours(options, is_whole=True)
    steps = {"mizzen": step, WHOLE: whole, "torch": theirs(options), TOLD: theirs(options, is_told=True)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    orders = list(permutations(steps))
    random.Random(0).shuffle(orders)
    for number in range(options.rounds + 2):
        for name in orders[number % len(orders)]:
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
    settings = {"width": 256, "blocks": 8, "length": 64, "samples": 4, "micros": 8}
    settings |= {"rounds": 10, "processes": 5, "port": 29555}
    for name, value in settings.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default: {value})")
    options = parser.parse_args()
    os.putenv("OMP_NUM_THREADS", "1")  # for the ranks, which load torch themselves
    seconds, processor = ({name: [] for name in ("mizzen", WHOLE, "torch", TOLD)} for _ in range(2))
    found, messages = [], []
    for _ in range(options.processes):
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        multiprocessing.spawn(play, (options, results), nprocs=2, join=True)
        took, used, (steps, message) = results.get()
        for name in seconds:
            seconds[name] += took[name]
            processor[name] += used[name]
        found += steps
        messages.append(message)
        print(f"a pair of ranks: {quotient(took):.3f} of torch's time, {quotient(used):.3f} of its processor time")
    for name, values in seconds.items():
        used = statistics.median(processor[name])
        print(f"{name:13} {1000 * statistics.median(values):8.1f} ms per step, {1000 * used:.1f} ms of the processor")
    measured, by_table, even = (100 * statistics.median(each) for each in zip(*found, strict=True))
    apart = statistics.median(was / said for was, said, _ in found)
    print(f"bubble   {measured:8.1f} % measured, {by_table:.1f} % by the table, {even:.1f} % for even times (medians)")
    print(f"measured bubble over the table's of the same step: {apart:.3f} (median of {len(found)} steps)")
    message = 1000 * statistics.median(messages)
    print(f"message  {message:8.2f} ms from a stage to the other, where somebody waits for it (median)")
    for what, values in (("time", seconds), ("processor time", processor)):
        for name in ("mizzen", WHOLE):
            told = f"{quotient(values, name, TOLD):.3f} where it is told"
            print(f"{name:13} takes {quotient(values, name):.3f} of torch's {what}, {told}")
    print(f"(medians of {len(seconds['torch'])} paired rounds)")


def quotient(values: dict[str, list[float]], name: str = "mizzen", peer: str = "torch") -> float:
    """The median over rounds of what one took, of what a peer took in the same round."""
    return statistics.median(a / b for a, b in zip(values[name], values[peer], strict=True))


if __name__ == "__main__":
    main()
