"""Tensor parallelism as a transform: unmodified models whose matrices are cut over ranks."""

from dataclasses import replace
from functools import partial
from typing import Any, Final

from torch import nn
from torch.distributed import ProcessGroup

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.kernels.head_loss import VocabularyPart
from mizzen.model.home import Home
from mizzen.model.sketch import Drafts, ParameterSketch, joined
from mizzen.model.tree import Elsewhere
from mizzen.parallel.tensor.batches import compare_first_batch
from mizzen.parallel.tensor.cuts import LayerCut, TensorChoice
from mizzen.parallel.tensor.exchange import copy_in, largest, sum_out
from mizzen.parallel.tensor.forwards import (
    ColumnForward,
    CutRegion,
    RowForward,
    TableColumnsForward,
    TableRowsForward,
    TailForward,
    close_regions,
    set_sizes,
)
from mizzen.parallel.tensor.rules import decide
from mizzen.parallel.tensor.sequence import follow_blocks
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform

AXIS: Final = "tp"
MARK: Final = "cut_over_ranks"
"""Under this name a layer that was cut says how."""


class TensorSplit(Transform):
    """Cuts the matrices of a model that was built whole. The rules are in `rules.py`."""

    name = "tensor"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> TensorChoice | None:
        """Decide what is cut; None where the ranks do not share matrices, or where the model comes split."""
        section = config.tensor_parallel
        if section.sequence_parallel and config.tensor_parallel_size > 1:
            raise PlanError(
                "tensor_parallel.sequence_parallel is for models that are split by autotp_size; one that comes split "
                "says it of its own layers (sequence_parallel=True): leave the key out"
            )
        if section.sequence_parallel and section.tp_overlap_comm:
            raise PlanError(
                "tensor_parallel: tp_overlap_comm sums whole sequences, and with sequence_parallel each rank gets a "
                "part of the sum; leave one of the two out"
            )
        if layout.tp == 1 or config.tensor_parallel_size > 1:
            return None
        sketch = joined(drafts)
        if not sketch.modules:
            return TensorChoice(layout.tp, ())
        already = [module.path for module in sketch.modules if MARK in module.own]
        if already := [*already, *(p.name for p in sketch.parameters if p.split is not None)]:
            raise PlanError(
                f"tensor_parallel asks to split a model that is split already: '{already[0]}' says so. Build the model "
                "again, or, if its own layers are split, say tensor_parallel_size instead"
            )
        return decide(sketch, layout.tp, section)

    def details(self, choice: TensorChoice) -> list[str]:
        """How every module of the model is cut, and what a rank has of it."""
        return choice.details()

    def redraw(self, choice: TensorChoice, drafts: Drafts) -> Drafts:
        """These pieces with the homes of what is cut."""
        draw = _Homes(choice)
        return tuple(
            replace(draft, parameters=tuple(replace(p, home=draw.home_of(p)) for p in draft.parameters))
            for draft in drafts
        )

    def apply(self, parts: Parts, choice: TensorChoice, mesh: Mesh) -> Parts:
        """Let layers exchange what they need. What this rank keeps of their weights it has by now, by their homes."""
        rank, group = mesh.coordinate(AXIS), mesh.group(AXIS)
        compare_first_batch(parts, mesh)
        for part in parts:
            modules = dict(part.module.named_modules())
            modules = {path: module for path, module in modules.items() if not isinstance(module, Elsewhere)}
            regions: dict[str, CutRegion] = {}
            sequence = follow_blocks(choice.sequence, modules, group) if choice.sequence is not None else None
            in_blocks = choice.regions_in_blocks()
            for cut in choice.layers:
                layer: Any = modules.get(cut.path)
                if layer is None:
                    continue
                name = cut.region or cut.path
                parts_of = sequence if name in in_blocks else None
                region = regions.setdefault(name, CutRegion(group, is_random=name in choice.random, sequence=parts_of))
                layer.__dict__["forward"] = _forward(layer, cut, region, choice, rank)
                set_sizes(layer, cut, layer.weight.shape)
                layer.__dict__[MARK] = cut
                if cut.gathers and cut.style == "column" and len(cut.runs) == 1:
                    layer.__dict__["vocabulary_part"] = _vocabulary_part(cut, group, rank)
            if random := [region for name, region in regions.items() if name in choice.random]:
                close_regions(part.module, random)
            for change in choice.sizes:
                if change.path in modules:
                    setattr(modules[change.path], change.name, change.values[rank])
        return parts


def _forward(layer: nn.Module, cut: LayerCut, region: CutRegion, choice: TensorChoice, rank: int) -> Any:
    if cut.style == "rows of a table":
        return TableRowsForward(layer, cut, region, rank)
    if cut.style == "columns of a table":
        return TableColumnsForward(layer, cut, region)
    if cut.style == "row":
        return RowForward(layer, cut, region, overlaps=choice.overlaps)
    return (ColumnForward if cut.style == "column" else TailForward)(layer, cut, region)


def _vocabulary_part(cut: LayerCut, group: ProcessGroup, rank: int) -> VocabularyPart:
    """What a loss has to know that is computed without gathering the logits."""
    sizes = cut.runs[0]
    start = sum(sizes[:rank])
    return VocabularyPart(
        start,
        start + sizes[rank],
        sum(sizes),
        max(sizes),
        enter=partial(copy_in, group=group),
        largest=partial(largest, group=group),
        total=partial(sum_out, group=group),
    )


class _Homes:
    """The homes of parameters that a choice cuts."""

    def __init__(self, choice: TensorChoice) -> None:
        self.layers = {cut.path: cut for cut in choice.layers}
        self.parameters = {cut.name: cut for cut in choice.parameters}

    def home_of(self, parameter: ParameterSketch) -> Home:
        """Where it lives, by any of its names."""
        for name in parameter.names:
            path, _, last = name.rpartition(".")
            cut, beside = self.layers.get(path), self.parameters.get(name)
            if cut is not None and cut.runs and last == "weight":
                return parameter.home.cut(AXIS, cut.dim, *cut.runs)
            if cut is not None and cut.style == "column" and last == "bias":
                return parameter.home.cut(AXIS, 0, *cut.runs)
            if beside is not None and beside.dim is not None:
                return parameter.home.cut(AXIS, beside.dim, *beside.runs)
            if beside is not None:
                return replace(parameter.home, sums=(*parameter.home.sums, AXIS))
        return parameter.home
