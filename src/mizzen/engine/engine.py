"""The engine: forward, backward, step. It decides nothing; what varies was chosen in `build.py`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mizzen.engine.interface import EngineInterface
from mizzen.engine.optimizer import EngineOptimizer
from mizzen.engine.phases import Phases
from mizzen.engine.run_state import RunState
from mizzen.engine.runner import Runner
from mizzen.engine.saving import Saving
from mizzen.engine.states_away import GRADIENTS
from mizzen.engine.status import RunContext
from mizzen.engine.stopping import Stopping
from mizzen.engine.update import Updater
from mizzen.engine.vote import Decision
from mizzen.errors import StepError, UsageError
from mizzen.log import warn_once
from mizzen.monitor.report import ACCUMULATING, Meter, Observer, StepReport
from mizzen.monitor.sinks import monitor_of
from mizzen.optim.guard import ParameterGuard
from mizzen.optim.schedules import Stepper
from mizzen.plan.losses import LossFunction
from mizzen.precision.scaler import LossScaler


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """The parts of an engine that move: how a batch runs, how parameters change, and who is told."""

    run_state: RunState
    runner: Runner
    updater: Updater | None
    phases: Phases
    saving: Saving
    stopping: Stopping
    observers: tuple[Observer, ...] = ()
    meters: tuple[Meter, ...] = ()


class Engine(EngineInterface):
    """One model in training. `backward` and `step` for an open loop, `train_batch` for a whole step."""

    def __init__(self, components: EngineComponents, context: RunContext) -> None:
        super().__init__(components.run_state, context)
        self.runner = components.runner
        self.updater: Updater | None = components.updater
        self.phases = components.phases
        self.saving = components.saving
        self.stopping = components.stopping
        self.observers = components.observers
        self.meters = components.meters
        self.monitor = monitor_of(components.observers)
        if self.updater is not None:
            self.optimizer = EngineOptimizer(
                self.updater.optimizer,
                step=self.step,
                clear=self.zero_grad,
                scaler=self.updater.scaler,
                members=self.run_state.changes.members,
                offload=self.offload_states,
                reload=self.reload_states,
            )
        self._stepper = Stepper()
        self._clock = time.perf_counter()
        self._consecutive_skips = 0

    # An open loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, as it is."""
        self.runner.check_open_loop("forward")
        self.run_state.away.check("forward", ("lp_params",))
        self.stop_if_asked()
        if self.training:
            self.step_in_progress.count_forward((args, kwargs))
        return self.runner.forward(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of one micro-batch; returns the loss divided by the accumulation steps (unless told not to)."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"backward takes a loss of one element; this one is {shape}: reduce it first, with .mean()"
            )
        if not loss.requires_grad:
            raise UsageError("backward takes a loss that depends on trained parameters; this one needs no gradient")
        self._require_updater("backward")
        self.runner.check_open_loop("backward")
        accumulation = self.batch.accumulation
        self.step_in_progress.add_loss(loss, is_share=not scale_wrt_gas)
        weighted = loss / accumulation if scale_wrt_gas and accumulation > 1 else loss
        self.runner.backward(weighted, last=self._is_last(), retain_graph=retain_graph)
        return weighted.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as a `.backward()` of the user's own needs it."""
        if not isinstance(loss, Tensor):
            raise UsageError(f"scale takes a loss, which is a tensor; this one is {type(loss).__name__}")
        scaler = self._require_updater("scale").scaler
        return scaler.scaled(loss) / self.batch.accumulation

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepReport:
        """Count a micro-batch; at the boundary also update the parameters, and then the learning rate."""
        self._require_updater("step")
        self.runner.check_open_loop("step")
        if self.step_in_progress.kept_local_by:
            raise UsageError(f"step() inside {self.step_in_progress.kept_local_by}(): leave the context first")
        if self.managed and not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            self.step_in_progress.steps += 1
            self.step_was_due = False
            return self._report(False, ACCUMULATING)
        calls = self.step_in_progress.steps + 1
        is_counted = self.managed and self.step_in_progress.boundary is None
        return self._end_step(calls if is_counted else max(calls, self.step_in_progress.passes), lr_kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the parameters."""
        if self.step_in_progress.boundary is not None:
            return self.step_in_progress.boundary
        return not self.managed or self.step_in_progress.steps + 1 >= self.batch.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates the parameters, instead of counting; None counts again."""
        if not self.managed:
            raise UsageError(
                "managed_gradient_accumulation is false: every step() updates, there is no boundary to set"
            )
        self.step_in_progress.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on their rank. Stages 0 and 1 only: stage 2 has no room for them."""
        stage = self.settings.zero_optimization.stage
        if stage >= 2:
            raise UsageError(f"no_sync() is for ZeRO stages 0 and 1; stage {stage} keeps no whole gradients on a rank")
        with self.step_in_progress.keep_local("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction at the end of the context."""
        with self.step_in_progress.keep_local("coalesce_grad_reduction"):
            yield
        for store in self.stores:
            store.reduce()

    # A whole step

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> StepReport:
        """Pull the micro-batches of one step, run them, update. Raises StopIteration on all ranks together.

        All of them are pulled before the first runs, and each is moved to the device when it runs.
        """
        self._require_updater("train_batch")
        if self.is_accumulating:
            raise UsageError(
                "train_batch() in the middle of an accumulation: finish it with backward() and step() first"
            )
        self.stop_if_asked()
        micros = self.pull(
            lambda: data_iter if data_iter is not None else self.data_iterator(), self.batch.accumulation
        )
        for micro in micros:
            self.step_in_progress.count_forward(micro)
        self.step_in_progress.tally = self.runner.run(micros, loss_fn)
        return self._end_step(len(micros), None)

    def pull(self, source: Callable[[], Iterator[Any]], count: int) -> list[Any]:
        """So many micro-batches on every rank, or StopIteration on all of them."""
        micros = self.runner.pull(lambda: map(self.run_state.batch_function, source()), count)
        if self.fewest_over_ranks(len(micros)) < count:
            if micros:
                warn_once("the data ended on some rank before a whole batch was there; the rest of it is dropped")
            raise StopIteration
        return micros

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, whatever `set_to_none` says. How many micro-batches make a step does not change."""
        self.run_state.away.check("zero_grad", GRADIENTS)
        self.step_in_progress.drop_losses()
        if self.updater is not None:
            self.updater.clear()

    def restart_step(self) -> None:
        """State was set from outside: nothing of the step under way counts any more."""
        self.zero_grad()
        self.step_in_progress.restart()
        self._stepper.forget()
        self._consecutive_skips = 0
        for observer in self.observers:
            observer.on_load(self.applied_steps)

    def destroy(self) -> None:
        """Give everything back: hooks, buffers, loaders, observers. The module stays usable, with its values."""
        if self.updater is not None and self.updater.offloaded is not None:
            self.updater.offloaded.close()  # a thread that still steps needs what the stores give back
        try:
            super().destroy()
        finally:
            self.updater, self.meters = None, ()
            # Who keeps the engine is not to keep masters and states, which an optimizer has as long as it is there.
            self._stepper.forget()
            changes = self.run_state.changes
            changes.members = ParameterGuard(None, changes.members.model)

    # What both end with

    def _end_step(self, micros: int, lr_kwargs: dict[str, Any] | None) -> StepReport:
        updater = self._require_updater("step")
        self.step_was_due = True
        self._stepper.check(self.lr_scheduler, lr_kwargs or {})
        with self.phases.phase("step"):
            outcome = updater.update(self.step_in_progress.tally, micros, self._factor_of)
        samples = round(outcome.micros * self.batch.micro * self.batch.dp)
        self.micro_steps += micros - self.step_in_progress.steps
        self.global_samples += samples
        if self.optimizer is not None:
            self.optimizer.overflow = not outcome.applied
        rates, momentum = self.get_lr(), self.get_mom()
        if outcome.applied:
            self.applied_steps += 1
            self._consecutive_skips = 0
        else:
            self.skipped_steps += 1
            self._consecutive_skips += not (outcome.has_overflowed and updater.scaler.may_cure(outcome.loss))
        self.phases.at_step(self.applied_steps)
        report = self._report(outcome.applied, outcome.reason, outcome, samples=samples, rates=rates, momentum=momentum)
        measures = {name: value for meter in self.meters for name, value in meter.read(report).items()}
        report = self.last_step = replace(report, measures=measures)
        self.step_in_progress.restart()
        if outcome.applied:
            self._stepper.advance(self.lr_scheduler, lr_kwargs or {})
        for observer in self.observers:
            observer.on_step(report)
        self._after_step(updater.scaler, outcome)
        return report

    def _after_step(self, scaler: LossScaler, outcome: Decision) -> None:
        """Move the loss scale, or stop where neither that nor waiting helps. Everybody has been told of the step."""
        if outcome.applied:
            scaler.taken()
            return
        if outcome.has_overflowed:
            scaler.skipped(outcome.reason)
        limit = self.settings.max_consecutive_skips
        if limit and self._consecutive_skips >= limit:
            raise StepError(
                f"{self._consecutive_skips} steps in a row were skipped, the last at step {self.applied_steps + 1}: "
                f"{outcome.reason}. Lower the learning rate, check the data, or raise max_consecutive_skips"
            )

    def _report(
        self,
        applied: bool,
        reason: str,
        outcome: Decision | None = None,
        *,
        samples: int = 0,
        rates: Sequence[float] = (),
        momentum: Sequence[Any] = (),
    ) -> StepReport:
        now, tokens = time.perf_counter(), self.step_in_progress.tokens
        seconds, self._clock = (now - self._clock, now) if outcome else (0.0, self._clock)
        return StepReport(
            step=self.applied_steps,
            applied=applied,
            reason=reason if applied or reason == ACCUMULATING else f"step {self.applied_steps + 1}: {reason}",
            lr=tuple(rates),
            samples=samples,
            tokens=tokens * self.batch.dp if tokens is not None else None,
            seconds=seconds,
            skipped_steps=self.skipped_steps,
            global_samples=self.global_samples,
            momentum=tuple(momentum),
            loss_scale=self.loss_scale(),
            phases=self.phases.read() if outcome else {},
            read_loss=lambda: outcome.loss if outcome else None,
            read_norm=lambda: outcome.norm if outcome else None,
        )

    def _factor_of(self, has_losses: bool, has_unannounced: bool, has_scaled: bool) -> float:
        """What gradients are still to be multiplied with: those of a bare `loss.backward()` were not divided."""
        if not has_losses and not has_unannounced:
            raise UsageError("step() without a backward() since the last step: there is no gradient to step with")
        if not has_unannounced:
            return 1.0
        if has_losses:
            raise UsageError(
                "engine.backward(loss) and a bare loss.backward() in one step: use one of the two. Gradients that the "
                "backward of another engine has left on these parameters are forgotten by zero_grad(), before backward"
            )
        if has_scaled:
            return 1.0
        scaler = self._require_updater("step").scaler
        if scaler.is_on:
            raise UsageError(
                f"a bare loss.backward() while losses are scaled by {scaler.scale:g}: its gradients are not. Call "
                "engine.scale(loss).backward(), or engine.backward(loss)"
            )
        return 1.0 / self.batch.accumulation

    def _is_last(self) -> bool | None:
        if self.step_in_progress.kept_local_by:
            return None
        return self.managed and self.is_gradient_accumulation_boundary()

    def _require_updater(self, call: str) -> Updater:
        if not self.parts:
            raise UsageError(f"{call}() on an engine that was destroyed: make a new one with initialize()")
        if self.updater is None:
            raise UsageError(f"{call}() needs an optimizer: name one in the configuration, or give one to initialize()")
        if self.owners and not self.owners[0].store.contents.trained:
            raise UsageError(f"{call}() on an engine whose model was given to a later engine: use that one")
        self.run_state.away.check(call)
        return self.updater
