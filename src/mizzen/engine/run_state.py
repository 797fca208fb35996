"""Where a run stands: what a save writes down, a load sets and a stop looks at. How a step is taken is not here."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mizzen.comm.mesh import Mesh
from mizzen.config.batch import Batch
from mizzen.config.schema import Config
from mizzen.engine.changes import Changes
from mizzen.engine.randomness import RandomStream
from mizzen.engine.window import Window
from mizzen.model.tree import joined
from mizzen.plan.parts import Parts, Store
from mizzen.precision.scaler import LossScaler


@dataclass(slots=True)
class RunState:
    """The state of one engine, shared by those who step, save, load and stop. Only the engine's thread changes it."""

    settings: Config
    mesh: Mesh
    batch: Batch
    parts: Parts
    """What of the model runs on this rank; none once the engine is destroyed."""
    changes: Changes
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
    window: Window = field(default_factory=Window)
    """The micro-batches since the last step."""
    applied_steps: int = 0
    """Optimizer steps that were taken."""
    global_samples: int = 0
    """Samples of all ranks, those of skipped steps included: the data has moved on."""
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
        return joined(self.modules)

    @property
    def is_accumulating(self) -> bool:
        """Whether micro-batches wait for a step. Where boundaries are set from outside, counting would not tell."""
        if self.window.boundary is None and self.settings.managed_gradient_accumulation:
            return self.window.steps > 0
        return self.window.tally.loss is not None

    @property
    def is_between_steps(self) -> bool:
        """Whether this run trains, and nothing of a next step has begun."""
        return self.optimizer is not None and self.window.tally.loss is None and not self.is_accumulating

    def set_loader(self, loader: Any) -> None:
        """Take data from a loader, from where that stands."""
        self.loader, self.iterator = loader, None
