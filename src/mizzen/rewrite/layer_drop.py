"""Progressive layer drop: the model is told in each training step how likely it shall keep a layer.

theta(t) = (1 - theta) exp(-gamma t) + theta after t steps. What the model does with it is the model's business.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Drafts, ModuleSketch
from mizzen.monitor.report import Observer, StepReport
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.rewrite.forward import ReplacedForward, restore

KEYWORDS: Final = ("progressive_layer_drop", "pld_theta")
"""The arguments that a model's forward gets: True, and the probability."""


@dataclass(frozen=True, slots=True)
class LayerDropChoice:
    """Where the probability of keeping a layer goes, and how fast."""

    theta: float
    gamma: float

    def __str__(self) -> str:
        return f"layers are kept with a probability that goes from 1 to {self.theta:g} at the rate {self.gamma:g}"

    def at(self, step: int) -> float:
        """The probability after so many steps."""
        return (1 - self.theta) * math.exp(-self.gamma * step) + self.theta


class Dropping(ReplacedForward, Observer):
    """Stands in the place of a model's forward and adds the two arguments; as an observer it follows the steps."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], choice: LayerDropChoice) -> None:
        super().__init__(forward)
        self.module = module
        self.choice = choice
        self.theta = choice.at(0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        told = dict(zip(KEYWORDS, (True, self.theta), strict=True)) if self.module.training else {}
        return self.__wrapped__(*args, **{**told, **kwargs})

    def on_step(self, report: StepReport) -> None:
        """Go on with the next probability."""
        self.on_load(report.step)

    def on_load(self, step: int) -> None:
        """Go on with the probability after this step."""
        self.theta = self.choice.at(step)

    def close(self) -> None:
        """Nothing is open: `restore` gives the model its forward back."""


class LayerDrop(Transform):
    """For models whose forward takes `progressive_layer_drop` and `pld_theta`, or any keyword."""

    name = "layer drop"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> LayerDropChoice | None:
        """As configured."""
        section = config.progressive_layer_drop
        if section.enabled and layout.pp > 1:
            raise PlanError(
                f"progressive_layer_drop.enabled over pp={layout.pp}: stages are not told how likely they shall keep "
                "a layer; leave the section out, or use other kinds of parallelism"
            )
        for draft in drafts if section.enabled else ():
            _check(draft.modules[0] if draft.modules else ModuleSketch("", ""))
        return LayerDropChoice(section.theta, section.gamma) if section.enabled else None

    def apply(self, parts: Parts, choice: LayerDropChoice, mesh: Mesh) -> Parts:
        """Put `Dropping` in the place of the forward of every part."""
        changed = []
        for part in parts:
            restore(part.module, Dropping)
            standing = Dropping(part.module, part.module.forward, choice)
            vars(part.module)["forward"] = standing
            changed.append(replace(part, observers=(*part.observers, standing)))
        return tuple(changed)


def theta_of(observers: Iterable[Observer]) -> float | None:
    """The probability that the model is told of in this step; None without progressive layer drop."""
    return next((observer.theta for observer in observers if isinstance(observer, Dropping)), None)


def _check(model: ModuleSketch) -> None:
    if model.type is None or "forward" in model.own:
        return  # nobody knows its forward yet, or nobody but who has given it one
    parameters = inspect.signature(model.type.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    missing = set(KEYWORDS) - {parameter.name for parameter in parameters}
    if missing and not takes_any:
        raise PlanError(
            f"progressive_layer_drop.enabled: {model.kind}.forward does not take "
            f"{' and '.join(sorted(missing))}; add the argument and skip layers by it, or leave the section out"
        )
