"""A plan in words, for people: layout, batch, the transforms in their order, and the bytes of one rank."""

from dataclasses import asdict
from typing import Any

from mizzen.comm.mesh import groups_of_rank
from mizzen.config.layout import SAMPLE_AXES
from mizzen.config.resolve import OPEN_BATCH, TRIAD, is_batch_open
from mizzen.model.sketch import count_of
from mizzen.plan.build import Plan
from mizzen.plan.cost import Cost
from mizzen.wording import and_more


def explain(plan: Plan) -> str:
    """The whole plan as text."""
    layout, batch = plan.resolved.layout, plan.resolved.batch
    samples = (
        f"{batch.train} samples per step = {batch.micro} micro x {batch.accumulation} accumulation x {batch.dp} dp"
    )
    lines = [
        f"world   {layout.world} ranks: pp={layout.pp} dp={layout.dp} sp={layout.sp} tp={layout.tp} ep={layout.ep}",
        f"batch   {OPEN_BATCH if is_batch_open(plan.resolved.config) else samples}",
    ]
    if layout.pp * layout.tp > 1:
        lines += _placement(plan)
    if plan.sketch.parameters:
        lines.append(
            f"model   {count_of(plan.sketch.numel)} parameters, {count_of(plan.sketch.trainable_numel)} trainable"
        )
        first, *others = plan.classes
        lines.append(f"memory  {first}, without activations")
        lines += [f"        {other}" for other in others]
    if (offload := plan.resolved.config.offload) is not None and offload.has_budgets:
        late = ' ("auto": from what is free, when training starts; printed as if none stayed on the device)'
        lines.append(f"offload {offload.budget_words()}{late if 'auto' in offload.budgets.values() else ''}")
    rates = ("optimizer.params.", "scheduler.params.", "offload.")  # others decide, or nothing of a plan changes
    autos = [path for path in plan.resolved.config.autos() if not path.startswith(rates)]
    if open_keys := [path for path in autos if path not in TRIAD]:
        lines.append(f'open    "auto" means the default until a client fills it in: {", ".join(open_keys)}')
    lines += [f"note    {note}" for note in plan.notes]
    lines.append("changes" if plan.steps else "changes none: the model runs as it is")
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"  {number}. {step}")
        lines += [f"     {line}" for line in step.transform.details(step.choice)]
        if step.cost != Cost() and plan.sketch.parameters:
            lines.append(f"     memory {step.cost}")
    return "\n".join(lines)


def _placement(plan: Plan) -> list[str]:
    """Which ranks are neighbours, and how many groups of them each rank belongs to."""
    layout = plan.resolved.layout
    axes = {"share matrices": ("tp",), "have other data": SAMPLE_AXES, "are other stages": ("pp",)}
    found = {what: layout.ranks_along(names, 0) for what, names in axes.items() if layout.size(*names) > 1}
    words = [f"{and_more(ranks, 3)} {what}" for what, ranks in found.items()]
    if layout.tp > 1:
        words.append(f"nodes with a multiple of {layout.tp} GPUs keep what shares a matrix inside")
    joined = groups_of_rank(layout, 0, plan.groups)
    groups = ", ".join(f"{title} ({len(ranks)})" for ranks, title in joined.items())
    return [f"places  ranks {'; '.join(words)}", f"groups  {len(joined)} for each rank: {groups}"]


def facts_of(plan: Plan) -> dict[str, Any]:
    """The whole plan as text, and the numbers that a picture of it is drawn from."""
    layout = plan.resolved.layout
    degrees = {"pp": layout.pp, "dp": layout.dp, "sp": layout.sp, "tp": layout.tp}
    cost = asdict(plan.cost) if plan.sketch.parameters else {}
    return {"text": explain(plan), "layout": degrees, "cost": cost}
