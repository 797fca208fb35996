"""From a configuration, a number of ranks and a sketch to a `Plan`. Pure: the same arguments give the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mizzen.config.layout import Partition
from mizzen.config.resolve import Resolved, resolve
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.home import Home, classes, pieces_at
from mizzen.model.sketch import Drafts, ParameterSketch, Sketch
from mizzen.plan.cost import Cost, replicated
from mizzen.plan.transform import MakeRunner, Transform
from mizzen.plan.unbuilt import refusals
from mizzen.precision.policy import FLOATING, Policy, wider

if TYPE_CHECKING:
    from torch import nn

    from mizzen.comm.mesh import Mesh
    from mizzen.plan.parts import Parts


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One transform that will run, with what it decided and what that costs."""

    transform: Transform
    choice: Any
    cost: Cost

    def __str__(self) -> str:
        return f"{self.transform.name}: {self.choice}"


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that hold as much, and the bytes of each."""

    title: str
    """The places that they have in common; empty where all ranks are alike."""
    ranks: tuple[int, ...]
    cost: Cost

    def __str__(self) -> str:
        where = f" on each of the {len(self.ranks)} ranks with {self.title}" if self.title else " per rank"
        return f"{self.cost}{where}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided. `apply` does it."""

    resolved: Resolved
    sketch: Sketch
    """The model as it was given, whole."""
    steps: tuple[PlannedStep, ...]
    classes: tuple[RankClass, ...]
    drafts: Drafts
    """What the last transform leaves of it: its pieces, with the homes of their parameters."""

    @property
    def cost(self) -> Cost:
        """The bytes of the rank that holds most."""
        return max((each.cost for each in self.classes), key=lambda cost: cost.total)

    @property
    def moved_by_apply(self) -> frozenset[str]:
        """The parameters that some transform itself brings to the device, part by part, because they may not fit."""
        return frozenset(name for step in self.steps for name in step.transform.moved_by_apply(step.choice))

    @property
    def cut_here(self) -> dict[str, ParameterSketch]:
        """The parameters that come whole and of which each rank keeps a part, by every name that a stage may know."""
        every = (p for draft in self.drafts for p in draft.parameters)
        return {name: p for p in every if p.home.cuts and p.split is None for name in p.names}

    @property
    def not_data_parallel(self) -> frozenset[str]:
        """Every name of parameters whose gradients are not summed over the data ranks alone, and all of these."""
        usual = Home.data_parallel(self.resolved.layout).sums
        others = (p for draft in self.drafts for p in draft.parameters if p.home.sums != usual)
        return frozenset(name for p in others for name in p.names)

    @property
    def groups(self) -> tuple[Partition, ...]:
        """The groups of ranks that this plan needs beside those of the axes, in one order for all ranks."""
        found = (partition for step in self.steps for partition in step.transform.groups(step.choice))
        return tuple(dict.fromkeys(found))

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

    def take(self, model: "nn.Module", mesh: "Mesh") -> None:
        """Leave of the model what this rank runs of it."""
        for step in self.steps:
            step.transform.take(model, step.choice, mesh)

    def apply(self, parts: "Parts", mesh: "Mesh") -> "Parts":
        """Change the parts, one transform after the other, in the order that `ORDER` gives."""
        for step in self.steps:
            parts = step.transform.apply(parts, step.choice, mesh)
        return parts


def build(config: Config, world: int, sketch: Sketch, order: Sequence[Transform]) -> Plan:
    """Decide everything, or raise a `PlanError` that lists every reason at once."""
    resolved = resolve(config, world)
    layout = resolved.layout
    reasons = [str(refusal) for refusal in refusals(config)]
    drafts: Drafts = (sketch.with_home(Home.data_parallel(layout)),)
    wanted: list[tuple[Transform, Any]] = []
    for transform in order:
        try:
            choice = transform.wants(resolved.config, layout, drafts)
        except PlanError as refusal:
            reasons.append(str(refusal))
            continue
        if choice is not None:
            wanted.append((transform, choice))
            drafts = transform.redraw(choice, drafts)
    if reasons:
        raise PlanError("\n".join(reasons))
    alike = classes((p.home for draft in drafts for p in draft.parameters), layout)
    first = next(iter(alike.values()))[0]
    steps = tuple(PlannedStep(transform, choice, transform.price(choice, first)) for transform, choice in wanted)
    found = []
    for title, ranks in alike.items():
        changes = (step.transform.price(step.choice, ranks[0]) for step in steps)
        found.append(RankClass(title, ranks, sum(changes, _cost_of_rank(resolved, drafts, ranks[0]))))
    return Plan(resolved, sketch, steps, tuple(found), drafts)


def _cost_of_rank(resolved: Resolved, drafts: Drafts, rank: int) -> Cost:
    """The cost of training what a rank has of the pieces that it runs, with everything that belongs to that."""
    layout = resolved.layout
    mine = (drafts[piece].local(layout, rank) for piece in pieces_at(rank, layout, len(drafts)))
    return sum((replicated(resolved.config, draft) for draft in mine), Cost())
