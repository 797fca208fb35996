"""Where a run stands: what a save writes down, a load sets and a stop looks at. How a step is taken is not here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.comm.mesh import Mesh
from mizzen.config.resolve import Batch
from mizzen.config.schema import Config
from mizzen.engine.model_changes import ModelChanges
from mizzen.engine.randomness import RandomStream
from mizzen.engine.runner import tokens_in
from mizzen.engine.states_away import StatesAway
from mizzen.errors import UsageError
from mizzen.model.tree import joined_module
from mizzen.plan.losses import Tally
from mizzen.plan.parts import Parts, Store
from mizzen.precision.scaler import LossScaler


class StepInProgress:
    """What adds up over the micro-batches since the last step, and who keeps gradients on their rank meanwhile."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.tokens: int | None = None
        """What this rank's inputs showed; None while they showed no tokens."""
        self.steps = 0
        """Calls of `step` that did not update."""
        self._forwards = self._backwards = 0
        self.boundary: bool | None = None
        """The user's word on whether the next step updates; None leaves it to counting."""
        self.kept_local_by: str | None = None
        """The context that keeps gradients on their rank."""

    def add_loss(self, loss: Tensor, *, is_share: bool) -> None:
        """Count one micro-batch of an open loop. Shares of a loss add up to one, however many there are."""
        self._backwards += 1
        is_counted = not is_share or self.tally.loss is None
        self.tally = self.tally.plus(loss.reshape(()), float(is_counted))

    def count_forward(self, batch: Any) -> None:
        """Count a forward, and the tokens of its inputs."""
        self._forwards += 1
        count = tokens_in(batch)
        if count is not None:
            self.tokens = (self.tokens or 0) + count

    @property
    def is_empty(self) -> bool:
        """Whether nothing has happened that belongs to the next step."""
        return not self.steps and self.tally.loss is None

    @property
    def passes(self) -> int:
        """The micro-batches that were seen. One may need several forwards, or several backwards, but not both.

        A bare backward is not seen here, and neither is a forward of the module itself.
        """
        return min(filter(None, (self._forwards, self._backwards)), default=1)

    def drop_losses(self) -> None:
        """Forget losses whose gradients were dropped. How far the step is does not change."""
        self.tally, self.tokens, self._forwards, self._backwards = Tally(), None, 0, 0

    def restart(self) -> None:
        """Start again: a step was taken or skipped."""
        self.drop_losses()
        self.steps = 0

    @contextmanager
    def keep_local(self, name: str) -> Iterator[None]:
        """Inside, gradients stay on their rank."""
        if self.kept_local_by:
            raise UsageError(f"{name}() inside {self.kept_local_by}(): the two do not nest")
        self.kept_local_by = name
        try:
            yield
        finally:
            self.kept_local_by = None


@dataclass(slots=True)
class RunState:
    """The state of one engine, shared by those who step, save, load and stop. Only the engine's thread changes it."""

    settings: Config
    mesh: Mesh
    batch: Batch
    parts: Parts
    """What of the model runs on this rank; none once the engine is destroyed."""
    changes: ModelChanges
    stream: RandomStream
    """The random numbers of the model."""
    scaler: LossScaler
    seed: int = 0
    """What all random numbers of the run derive from."""
    groups: tuple[tuple[str, ...], ...] = ()
    """The names of the trained parameters of all ranks, by optimizer group."""
    optimizer: Optimizer | None = None
    """The one that does the arithmetic, on this rank's share of the masters."""
    scheduler: Any = None
    loader: Any = None
    """Where `train_batch()` without an iterator takes its data from."""
    iterator: Any = None
    """What is under way of the loader."""
    batch_function: Callable[[Any], Any] = lambda batch: batch
    """What makes of a batch of the data the one that the model is given."""
    step_in_progress: StepInProgress = field(default_factory=StepInProgress)
    """The micro-batches since the last step."""
    applied_steps: int = 0
    """Optimizer steps that were taken."""
    global_samples: int = 0
    """Samples of all ranks, those of skipped steps included: the data has moved on."""
    away: StatesAway = field(default_factory=StatesAway)
    """What is in host memory between `offload_states` and `reload_states`."""
    micro_steps: int = 0
    """Forward and backward passes on this rank."""
    skipped_steps: int = 0
    """Optimizer steps that were due and not taken."""

    @property
    def stores(self) -> list[Store]:
        """What holds the trained parameters of this rank."""
        return [store for part in self.parts for store in part.stores]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that run on this rank. Names in them are those of the whole model, and no two have the same."""
        return tuple(part.module for part in self.parts)

    @property
    def module(self) -> nn.Module:
        """All that runs on this rank, as one module."""
        return joined_module(self.modules)

    @property
    def is_accumulating(self) -> bool:
        """Whether micro-batches wait for a step. Where boundaries are set from outside, counting would not tell."""
        if self.step_in_progress.boundary is None and self.settings.managed_gradient_accumulation:
            return self.step_in_progress.steps > 0
        return self.step_in_progress.tally.loss is not None

    @property
    def is_between_steps(self) -> bool:
        """Whether this run trains, and nothing of a next step has begun."""
        return self.optimizer is not None and self.step_in_progress.tally.loss is None and not self.is_accumulating

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps in an epoch of the loader, if there is one and its length is known."""
        try:
            return max(1, len(self.loader) // self.batch.accumulation)
        except TypeError:
            return None

    def set_loader(self, loader: Any) -> None:
        """Take data from a loader, from where that stands."""
        self.loader, self.iterator = loader, None
