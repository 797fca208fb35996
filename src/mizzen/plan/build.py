"""From a configuration, a number of ranks and a sketch to a `Plan`. Pure: the same arguments give the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mizzen.config.resolve import Resolved, resolve
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.plan.cost import Cost, replicated
from mizzen.plan.transform import MakeRunner, Transform
from mizzen.plan.unbuilt import refusals
from mizzen.precision.policy import FLOATING, Policy, wider

if TYPE_CHECKING:
    from mizzen.comm.mesh import Mesh
    from mizzen.plan.parts import Parts


@dataclass(frozen=True, slots=True)
class Step:
    """One transform that will run, with what it decided and what that costs."""

    transform: Transform
    choice: Any
    cost: Cost

    def __str__(self) -> str:
        return f"{self.transform.name}: {self.choice}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided. `apply` does it."""

    resolved: Resolved
    sketch: Sketch
    steps: tuple[Step, ...]
    cost: Cost

    @property
    def late(self) -> frozenset[str]:
        """The parameters that some transform itself brings to the device, part by part, because they may not fit."""
        return frozenset(name for step in self.steps for name in step.transform.late(step.choice))

    @property
    def runner(self) -> MakeRunner | None:
        """What makes the runner of the parts: that of the last transform that names one."""
        named = [made for step in self.steps if (made := step.transform.runner(step.choice)) is not None]
        return named[-1] if named else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was asked for and cannot be had of this model."""
        policy, asked = Policy.of(self.resolved.config), self.resolved.config.data_types.grad_accum_dtype
        trained = {policy.held(parameter.dtype) for parameter in self.sketch.parameters if parameter.is_trained}
        sums = {dtype: wider(policy.accumulation, dtype) for dtype in sorted(trained & {*FLOATING})}
        return tuple(
            f"data_types.grad_accum_dtype: {asked} is too narrow for parameters in {dtype}: their sums are in {wide}"
            for dtype, wide in sums.items()
            if asked and wide != policy.accumulation
        )

    def apply(self, parts: "Parts", mesh: "Mesh") -> "Parts":
        """Change the parts, one transform after the other, in the order that `ORDER` gives."""
        for step in self.steps:
            parts = step.transform.apply(parts, step.choice, mesh)
        return parts


def build(config: Config, world: int, sketch: Sketch, order: Sequence[Transform]) -> Plan:
    """Decide everything, or raise a `PlanError` that lists every reason at once."""
    resolved = resolve(config, world)
    reasons = [str(refusal) for refusal in refusals(config)]
    wanted: list[tuple[Transform, Any]] = []
    for transform in order:
        try:
            choice = transform.wants(resolved.config, resolved.layout, sketch)
        except PlanError as refusal:
            reasons.append(str(refusal))
            continue
        if choice is not None:
            wanted.append((transform, choice))
    if reasons:
        raise PlanError("\n".join(reasons))
    steps = tuple(Step(transform, choice, transform.price(choice, sketch)) for transform, choice in wanted)
    return Plan(resolved, sketch, steps, sum((step.cost for step in steps), replicated(resolved.config, sketch)))
