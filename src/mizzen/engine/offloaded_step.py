"""The step over lots of which some rest outside the device.

A thread of the host steps what rests there, lot by lot, with its own number of threads: a fused kernel of the CPU lets
other threads run. At the same time the device steps what rests on it, and lots that pass through it. New values return
to the model as soon as their lot is stepped. What became of a step is decided before it comes here, so a skipped step
touches nothing.

[Note: the host beside the next forward]
Where parameters rest in host memory, too, all who need their values ask their shards for them. There the host may be at
a step still when `step` has returned: the next forward uses one unit after the other, and waits for those that are not
stepped yet. So lots are stepped in the order in which a forward needs them, the first ones on the device. Before such a
lot goes to the thread of the host it has its gradient, and a copy of the settings of the optimizer. It is that thread's
until somebody waits for it (`StepBeside`): at a use of its values, masters or states, before another gradient comes,
before the next step, a save, a load or the optimizer's state dict.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mizzen.accelerator import get_accelerator
from mizzen.accelerator.host import bind_thread
from mizzen.accelerator.protocol import Event
from mizzen.engine.streamed_share import StreamedShare
from mizzen.errors import UsageError
from mizzen.log import get_logger, warn_once
from mizzen.monitor.report import StepReport
from mizzen.offload.rest_host import OnHost
from mizzen.offload.tier import StepBeside
from mizzen.optim.rules import scaled, view_of
from mizzen.plan.parts import Lot

HOST: Final = torch.device("cpu")
LotFactors = Sequence[tuple[Lot, float]]
"""Lots, each with what its gradients are multiplied with beside the factor of all."""
WAITS: Final = ("copies_out", "reads", "writes")
"""What the host may have to wait for in a step."""
EXPOSED_SHARE: Final = 0.2
"""The share of a step that may pass with waiting for the host before that is said."""
STEPPED_BYTES: Final = 16
"""Of an element that passes through the device: its master, two moments and the gradient."""
MEASURED: Final = (3, 5, 7)
"""Steps that show which share should pass through the device: the first ones make memory and compile. Each corrects the
one before it, in which all copies may have hidden behind backward, so that nobody knows how long they take."""


class OffloadedStep:
    """Steps all lots of an engine. Its measures are those of the last step, in milliseconds."""

    may_go_beside: bool = True
    """Whether the host may be at a step while the next forward has begun, where all who use its values can wait."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        threads: int,
        share: StreamedShare | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self.optimizer = optimizer
        self.device = device
        self.threads = threads
        self.share = share
        """What finds out, in one of the first steps, how much passes through the device; None where that is said."""
        self._steps = 0
        self._ratio = 0.0
        self._ended = 0.0
        """When the last step was over."""
        self.cores = tuple(cores)
        """Those that the thread of the host may run on; none leaves that to the system."""
        index = get_accelerator().current_device()
        # The thread's own function does not know the step: each would keep the other, and the states, in memory.
        self._thread = ThreadPoolExecutor(1, "mizzen-host-step", _begin_thread, (index, self.cores, threads))
        self._passing_marks: Sequence[Event] | None = None
        """Before and after the device's part of the last step."""
        self._copies_in = 0.0
        """Milliseconds of the device's part of the step before: copies that nothing hid, and the step itself."""
        self._measures: dict[str, float] = {}
        self._failure: BaseException | None = None
        """What has ended a step half-way, or an update on the host that a step has left to it."""
        self._is_beside = False
        """Whether the host goes on beside the next forward in this engine."""
        self._beside: list[StepBeside] = []
        """What the host was given to do beside the forward that follows the last step."""
        self._beside_seconds = 0.0
        """What the host has taken for that."""
        self._hooks: list[RemovableHandle] = []

    def begin(self, lots: Sequence[Lot], ratio: float | None) -> None:
        """Let a share of what rests in host memory pass through the device: this one, or one that is measured."""
        self._is_beside = self.may_go_beside and any(_beside_of(lot) is not None for lot in lots)
        if self._is_beside:
            wait = partial(_wait_for, self._beside)  # without the step, which has the optimizer
            hooks = self.optimizer.register_state_dict_pre_hook, self.optimizer.register_load_state_dict_pre_hook
            self._hooks = [register(wait) for register in hooks]
        if ratio is None and self.share is not None:
            ratio = self.share.at_start([lot for lot in lots if lot.rest.place == "host"], self._thread)
        self._split(lots, ratio or 0.0)

    def _split(self, lots: Sequence[Lot], ratio: float) -> None:
        """Let those pass through the device that backward completes first: there is most time for their copies.

        Where the host goes on beside the next forward, those that this needs first. A lot that the device has not twice
        the room for stays, unless somebody has said how much is to pass.
        """
        resting = [lot for lot in lots if lot.rest.place == "host"]
        resting = resting[::-1] if self._is_beside else resting
        sizes = [sum(tensor.numel() for tensor in lot.tensors) for lot in resting]
        room = self.share.device_room() // (2 * STEPPED_BYTES) if self.share is not None else max(sizes, default=0)
        passed = 0
        for lot, size in zip(resting, sizes, strict=True):
            is_streamed = size <= room and passed + size / 2 < ratio * sum(sizes)
            lot.rest.pass_through(is_streamed=is_streamed)
            passed += size if is_streamed else 0
        self._ratio = passed / sum(sizes) if passed else 0.0
        streamed = sum(not lot.rest.is_stepped_on_host for lot in resting)
        get_logger().info(
            "offload: %d of %d lots rest in host memory: %d are stepped there by %d threads, %d on the device",
            *(len(resting), len(lots), len(resting) - streamed, self.threads, streamed),
        )

    def wait(self) -> None:
        """Wait until the host has done the last step, however that has ended."""
        for each in self._beside:
            with suppress(Exception):  # which is the failure
                each.wait()

    def check(self, call: str) -> None:
        """Refuse what needs all masters to be of one step, after a step that has failed between two lots."""
        self.wait()
        if self._failure is not None:
            raise UsageError(
                f"{call}() after a step that has failed half-way: some parameters were stepped and others were not. "
                f"Make a new engine, and load a checkpoint. The step failed with: {self._failure}"
            ) from self._failure

    def step(self, lots: LotFactors, factor: float) -> None:
        """Step every lot with its gradients times a factor."""
        try:
            self._step_all(lots, factor)
        except BaseException as error:
            self._failure = error
            raise

    def _step_all(self, lots: LotFactors, factor: float) -> None:
        start = time.perf_counter()
        self._steps += 1
        if (before := self._passing_marks) is not None and before[1].query():
            self._copies_in = before[0].elapsed_time(before[1])
        marks = [get_accelerator().event(timing=True) for _ in range(2)]
        marks[0].record()
        for lot, _ in lots:
            lot.keep_writes()
            lot.rest.trust_values()
        ordered = lots[::-1] if self._is_beside else lots
        waited, beside_seconds = sum(each.waited() for each in self._beside), self._beside_seconds
        on_host = [pair for pair in ordered if pair[0].rest.is_stepped_on_host]
        goes_on = self._is_beside and self._steps > 1 and not self._is_measured  # the first step makes states
        beside = [pair for pair in on_host if goes_on and _beside_of(pair[0]) is not None]
        others = [pair for pair in on_host if not goes_on or _beside_of(pair[0]) is None]
        job = self._thread.submit(self._step_on_host, others, factor)
        try:
            self._begin_beside(beside, factor)
            self._step_on_device([pair for pair in ordered if not pair[0].rest.is_stepped_on_host], factor)
            marks[1].record()
            device_done = time.perf_counter()
        finally:
            seconds = job.result()
        host_done = time.perf_counter()
        waits = [lot.rest.wait() for lot, _ in lots]
        self._measures = {
            "offload_ms": (time.perf_counter() - start + waited) * 1e3,
            "offload_host_step_ms": (seconds + beside_seconds) * 1e3,
            "offload_host_wait_ms": (host_done - device_done + waited) * 1e3,
            **{f"offload_{what}_ms": sum(each.get(what, 0.0) for each in waits) * 1e3 for what in WAITS},
            "offload_copies_in_ms": self._copies_in,
        }
        self._passing_marks = marks
        if self.share is not None and self._is_measured:
            marks[1].synchronize()
            device, between = marks[0].elapsed_time(marks[1]) / 1e3, start - self._ended
            ratio = self.share.after_step(
                self._ratio, host=seconds, device=device, between=between, is_beside=self._is_beside
            )
            self._split([lot for lot, _ in lots], ratio)
        self._ended = time.perf_counter()

    @property
    def _is_measured(self) -> bool:
        return self.share is not None and self._steps in MEASURED

    def _begin_beside(self, lots: LotFactors, factor: float) -> None:
        """Let the host step lots beside the next forward."""
        self._beside[:] = [beside for lot, _ in lots if (beside := _beside_of(lot)) is not None]
        self._beside_seconds = 0.0
        for (lot, rest), beside in zip(lots, self._beside, strict=True):
            view = view_of(self.optimizer, lot.tensors)
            for group in view.param_groups:  # a schedule may change a tensor in place
                group |= {key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)}
            lot.load()
            beside.begin(self._thread, partial(self._step_beside, lot, view, rest, factor))

    def _step_beside(self, lot: Lot, view: Optimizer, rest: float, factor: float) -> None:
        """Step a lot that is loaded, in the thread of the host."""
        if self._failure is not None:
            raise self._failure
        start = time.perf_counter()
        try:
            with scaled(view, factor, HOST) as left, torch.no_grad():
                for tensor in lot.tensors if left * rest != 1 else ():
                    if tensor.grad is not None:
                        tensor.grad.mul_(left * rest)
                self._step_loaded(lot, view)
        except BaseException as error:
            self._failure = error
            raise
        self._beside_seconds += time.perf_counter() - start

    def _step_on_host(self, lots: LotFactors, factor: float) -> float:
        """Step lots in host memory; returns the seconds that it took."""
        start = time.perf_counter()
        for place, (lot, rest) in enumerate(lots):
            for ahead, _ in lots[place : place + 2]:  # one is read while another is stepped
                ahead.rest.fetch()
            self._step_lot(lot, rest, factor, HOST)
        return time.perf_counter() - start

    def _step_on_device(self, lots: LotFactors, factor: float) -> None:
        """Step what rests on the device in one call, then what passes through it one lot after the other."""
        here = [pair for pair in lots if pair[0].rest.place == "device"]
        if here:
            view = view_of(self.optimizer, _tensors(here))
            with scaled(view, factor, self.device) as left:
                for lot, rest in here:
                    lot.load(left * rest)
                view.step()
        passing = [pair for pair in lots if pair[0].rest.place != "device"]
        for place, (lot, rest) in enumerate(passing):
            for ahead, _ in passing[place : place + 2]:  # one comes while another is stepped
                ahead.rest.fetch()
            self._step_lot(lot, rest, factor, self.device)

    def _step_lot(self, lot: Lot, rest: float, factor: float, device: torch.device) -> None:
        view = view_of(self.optimizer, lot.tensors)
        with scaled(view, factor, device) as left, torch.no_grad():
            lot.load(left * rest)
            self._step_loaded(lot, view)

    @staticmethod
    def _step_loaded(lot: Lot, view: Optimizer) -> None:
        lot.rest.bring_states(lot.tensors, view.state)
        view.step()
        lot.rest.rest_states(lot.tensors, view.state)
        lot.write_back()
        lot.send()
        lot.unload()

    def read(self, report: StepReport) -> Mapping[str, float]:
        """The milliseconds of the last step that passed with stepping and waiting; said once where they are many."""
        found = self._measures
        exposed = found.get("offload_ms", 0.0) / 1e3
        if report.step > 2 and report.applied and exposed > EXPOSED_SHARE * report.seconds:
            warn_once(
                f"{exposed / report.seconds:.0%} of a step passes with the optimizer's states outside the device "
                f"({exposed:.2f} of {report.seconds:.2f} s): accumulate over more micro-batches, keep more of them on "
                "the device (offload_optimizer.ratio, offload.device_bytes), or raise offload.threads",
                key="the step outside the device is slow",
            )
        return found if report.applied else {}

    def close(self) -> None:
        """End the thread, once it has done what it was given to do."""
        self._thread.shutdown()
        for each in self._beside:
            each.forget()
        self._beside.clear()
        for hook in self._hooks:
            hook.remove()
        self._failure = None  # its traceback has the step, and so masters and states


def _begin_thread(index: int, cores: Sequence[int], threads: int) -> None:
    """Let this thread have a current device, cores and a number of threads of its own."""
    get_accelerator().set_device(index)
    bind_thread(cores)
    torch.set_num_threads(threads)


def _beside_of(lot: Lot) -> StepBeside | None:
    """A step of this lot that may go on beside the next forward, now or later; None where it cannot."""
    return lot.rest.beside if isinstance(lot.rest, OnHost) else None


def _wait_for(steps: Iterable[StepBeside], *_: Any) -> None:
    """Wait until the host has done the last step; raises what went wrong."""
    for each in steps:
        each.wait()


def _tensors(lots: LotFactors) -> Iterator[torch.Tensor]:
    return (tensor for lot, _ in lots for tensor in lot.tensors)
