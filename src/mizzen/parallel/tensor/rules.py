"""How the layers of a model are cut over tensor-parallel ranks: a pure function of its sketch.

Who says it, in this order: the user (`partition_config`), the model itself (the plan that transformers has
for it), and what reads what (`regions.py`). What nobody says stays whole on every rank.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from mizzen.config.parallel import LayerSpecConfig, TensorParallelConfig
from mizzen.errors import PlanError
from mizzen.model.flow import Flow, Layer, Way, innermost
from mizzen.model.sketch import ModuleSketch, Sketch, ancestors_of, parent_of
from mizzen.parallel.tensor.cuts import LayerCut, ParameterCut, Runs, SizeChange, Style, TensorChoice, balanced, runs_in
from mizzen.parallel.tensor.regions import Region, RegionParts, RunsSaid, find_regions, parts_of
from mizzen.parallel.tensor.sequence_rules import cut_sequences
from mizzen.wording import and_more

HEADS: Final = re.compile(r"heads|n_head$|num_kv$")
"""Attributes that say how many heads there are."""
FEATURES: Final = re.compile(r"dim|size|embed|hidden|inner|width|features|channels|d_model|d_attn")
"""Attributes that say how many features there are, if their number is right too."""
NOT_FEATURES: Final = re.compile(r"window|vocab|max|position|patch|image|head_dim|attention_head_size|layer")


@dataclass(frozen=True, slots=True)
class Said:
    """What somebody says of a layer."""

    style: Style
    runs: tuple[int, ...] = ()
    """Its runs, where it is a fused one."""
    gathers: bool = False
    splits: bool = False
    is_summed: bool = False
    """Of a parameter that stays whole: gradients are added up over the ranks."""
    is_users: bool = False
    """Whether the user says so, and not the model."""

    def runs_of(self, size: int) -> tuple[int, ...]:
        """The runs of so many features, of which transformers says how they compare and the user what they are."""
        return tuple(size * run // sum(self.runs) for run in self.runs)


STYLES: Final[Mapping[str, Said]] = {
    "colwise": Said("column"),
    "colwise_gather_output": Said("column", gathers=True),
    "colwise_rep": Said("column", gathers=True),
    "packed_colwise": Said("column", runs=(1, 1)),
    "rowwise": Said("row"),
    "rowwise_rep": Said("row"),
    "rowwise_split_input": Said("row", splits=True),
    "packed_rowwise": Said("row", runs=(1, 1)),
    "embedding_rowwise": Said("rows of a table"),
    "vocab_parallel_rowwise": Said("rows of a table"),
    "embedding_colwise": Said("columns of a table", gathers=True),
    "replicated_with_grad_allreduce": Said("whole", is_summed=True),
    "mla_kv_a_proj": Said("partly summed"),
}
"""The styles of transformers. Those of experts are not here: experts stay whole."""


def decide(sketch: Sketch, ranks: int, section: TensorParallelConfig) -> TensorChoice:
    """What is cut of a model; refused where nobody says how, or where it cannot be."""
    return _Decider(sketch, ranks, section).decide()


@dataclass(slots=True)
class _Taken:
    layers: dict[str, LayerCut] = field(default_factory=dict)
    parameters: dict[str, ParameterCut] = field(default_factory=dict)
    sizes: dict[tuple[str, str], SizeChange] = field(default_factory=dict)
    random: set[str] = field(default_factory=set)


class _Decider:
    """Goes through the layers of one model."""

    def __init__(self, sketch: Sketch, ranks: int, section: TensorParallelConfig) -> None:
        self.sketch, self.ranks, self.section = sketch, ranks, section
        self.flow = sketch.flow or Flow(trouble="nobody has looked")
        self.modules = {module.path: module for module in sketch.modules if module.same_as is None}
        self.shapes = {name: p.shape for name, p in sketch.by_name().items()}
        self.layers = self._layers()
        self.called = {layer.path: at for at, layer in enumerate(self.flow.layers)}
        config = section.partition_config
        self.is_users_alone = config is not None and not config.use_default_specs
        self.found = _Taken()

    def decide(self) -> TensorChoice:
        said = self._said()
        runs = _runs_said(said, self.layers)
        regions = find_regions(self.flow, runs)
        if self.flow.trouble:
            regions = list(_regions_of(said, runs, self.layers, self.modules))
        for region in regions:
            self._take(region, said)
        for path, words in said.items():
            if path in self.layers and path not in self.found.layers:
                self._take_alone(self.layers[path], words)
        if not self.is_users_alone:
            self._take_tables_and_head(said)
        self._agree_on_ties()
        for path in (path for path, words in said.items() if words.is_summed):
            for name in self.modules[path].parameters if path in self.modules else (path,):
                self.found.parameters[name] = ParameterCut(name, None)
        left = tuple(path for path, layer in self.layers.items() if path not in self.found.layers and _is_large(layer))
        users = {path for path, words in said.items() if words.is_users}
        self._check([path for path in left if path not in users], users)
        _check_draws(self.found, self.flow, self.called)
        order = {path: at for at, path in enumerate(self.layers)}
        sequence = None
        if self.section.sequence_parallel:
            sequence, summed = cut_sequences(self.sketch, self.found.layers, self.found.parameters)
            self.found.parameters |= summed
        return TensorChoice(
            self.ranks,
            tuple(sorted(self.found.layers.values(), key=lambda cut: order[cut.path])),
            tuple(self.found.parameters.values()),
            tuple(self.found.sizes.values()),
            frozenset(self.found.random),
            left,
            self.section.tp_overlap_comm,
            tuple(path for path, module in self.modules.items() if self._is_whole(path, module)),
            sequence,
            _share(self.found, self.sketch),
        )

    def _is_whole(self, path: str, module: ModuleSketch) -> bool:
        """Whether a module has parameters, of which nothing is cut."""
        is_cut = path in self.found.layers or any(name in self.found.parameters for name in module.parameters)
        return bool(module.parameters) and not is_cut

    # Who says what

    def _layers(self) -> dict[str, Layer]:
        """Every layer with a matrix or a table, called or not."""
        called = self.flow.by_path()
        found: dict[str, Layer] = {}
        for path, module in self.modules.items():
            shape = self.shapes.get(f"{path}.weight" if path else "weight", ())
            if path in called:
                found[path] = called[path]
            elif module.layer:
                inputs, outputs = reversed(shape) if module.layer == "linear" else shape
                found[path] = Layer(path, module.layer, inputs, outputs, {})
        return found

    def _said(self) -> dict[str, Said]:
        """What the user says of layers and then what the model says, by path."""
        found: dict[str, Said] = {}
        config = self.section.partition_config
        for spec in config.layer_specs if config else ():
            self._check_pattern(spec)
            for path in self.layers:
                if path not in found and any(re.search(pattern, f"{path}.weight") for pattern in spec.patterns):
                    found[path] = _said_by(spec, self.layers[path])
        if self.is_users_alone:
            return found
        for pattern, style in self.sketch.split_plan:
            if (words := STYLES.get(style)) is None:
                continue
            fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            for path in (*self.modules, *self.shapes):
                if fits.fullmatch(path):
                    found.setdefault(path, words)
        return found

    def _check_pattern(self, spec: LayerSpecConfig) -> None:
        for pattern in spec.patterns:
            if not any(re.search(pattern, f"{path}.weight") for path in self.layers):
                raise PlanError(
                    f"tensor_parallel.partition_config: the pattern '{pattern}' fits no layer; layers are "
                    f"{and_more((f'{path}.weight' for path in self.layers), 4)}"
                )

    # Taking

    def _take(self, region: Region, said: Mapping[str, Said]) -> None:
        """Cut a region, where nobody says otherwise of its layers."""
        columns = [said.get(layer.path) for layer in region.sources]
        rows = [said.get(layer.path) for layer in region.sinks]
        if self.is_users_alone and not any((*columns, *rows)):
            return
        fits = [words is None or (words.style == "column" and not words.gathers) for words in columns]
        fits += [words is None or (words.style == "row" and not words.splits) for words in rows]
        if not all(fits):
            if any(fits) and any(words is not None and words.style in ("column", "row") for words in (*columns, *rows)):
                self._check_apart(region, said)
            return
        if not region.head and region.features < self.ranks:
            return
        parts = parts_of(region, self.ranks)
        summed = list(self._parameter_cuts(region, parts))
        name, last = region.name, {_last_called(each, self.called) for each in (region.sources, region.sinks)}
        for layer in region.sources:
            cut = LayerCut(layer.path, "column", parts.runs[layer.path], layer.kind == "transposed", name)
            self._add(replace(cut, is_last=layer.path in last))
        for layer in region.tables:
            self._add(LayerCut(layer.path, "columns of a table", parts.runs[layer.path], region=name))
        for layer in region.sinks:
            row = LayerCut(layer.path, "row", parts.inputs, layer.kind == "transposed", name)
            self._add(replace(row, is_last=layer.path in last))
        for path, size in region.tails.items():
            self._add(self._with_tail(self.layers[path], size, said.get(path)))
        self.found.parameters |= {each.name: each for each in summed}
        if region.is_random:
            self.found.random.add(name)
        self._change_sizes(region, parts)

    def _add(self, cut: LayerCut) -> None:
        self.found.layers[cut.path] = cut

    def _parameter_cuts(self, region: Region, parts: RegionParts) -> Iterator[ParameterCut]:
        """What becomes of parameters between the layers: cut with the features, or whole and their gradients summed."""
        for name in region.parameters:
            shape = self.shapes[name]
            dims = [dim for dim, size in enumerate(shape) if size in parts.sizes]
            heads = [dim for dim, size in enumerate(shape) if size in parts.heads and size > 1]
            if dims:
                size = shape[dims[-1]]
                yield ParameterCut(name, dims[-1], parts.in_runs.get(size, (parts.sizes[size],)))
            elif all(size == 1 or size in region.head_sizes for size in shape):
                yield ParameterCut(name, None)
            elif heads:
                yield ParameterCut(name, heads[0], (parts.heads[shape[heads[0]]],))
            else:
                raise PlanError(
                    f"'{name}' of shape {list(shape)} meets features of '{region.name}' that would be cut, and it "
                    "cannot be seen how; say 'skip' of these layers in tensor_parallel.partition_config"
                )

    def _take_alone(self, layer: Layer, words: Said) -> None:
        """Cut one layer as somebody says, without its neighbours."""
        if words.style in ("whole", "partly summed"):
            return
        transposed = layer.kind == "transposed"
        size = layer.outputs if words.style in ("column", "columns of a table") else layer.inputs
        if size < self.ranks:
            raise PlanError(f"'{layer.path}' has {size} features to cut over {self.ranks} tensor-parallel ranks")
        if layer.kind == "embedding":
            rows = words.style in ("rows of a table", "row")
            size = layer.inputs if rows else layer.outputs
            style: Style = "rows of a table" if rows else "columns of a table"
            self._add(LayerCut(layer.path, style, (balanced(size, self.ranks),), gathers=not rows))
            return
        cut: Runs = tuple(balanced(run, self.ranks) for run in words.runs_of(size) or (size,))
        is_apart = self.flow.trouble != "" or words.gathers or words.splits
        if words.style in ("column", "row") and not is_apart:
            by = "partition_config" if words.is_users else "the model's own plan"
            raise PlanError(
                f"'{layer.path}' is to be cut by {'outputs' if words.style == 'column' else 'inputs'}, as {by} says, "
                f"but {self._neighbours(layer)}; set gather_output, or say of these layers what fits"
            )
        self._add(
            LayerCut(layer.path, words.style, cut, transposed, layer.path, gathers=words.gathers, splits=words.splits)
        )

    def _neighbours(self, layer: Layer) -> str:
        readers = [each.path for each in self.flow.layers if layer.path in each.reads]
        return f"it reads {and_more(layer.reads, 3) or 'nothing'} and {and_more(readers, 3) or 'the result'} reads it"

    def _check_apart(self, region: Region, said: Mapping[str, Said]) -> None:
        """Refuse a region of which some layers are to be cut and others not, unless exchanges make them whole."""
        for layer in (*region.sources, *region.sinks):
            words = said.get(layer.path)
            whole = words is None or words.style == "whole" or words.gathers or words.splits
            if not whole:
                others = [each.path for each in (*region.sources, *region.sinks) if each.path != layer.path]
                raise PlanError(
                    f"'{layer.path}' is to be cut ({words.style if words else ''}), but not all of the layers that "
                    f"belong to it are: {and_more(others, 4)}. Say the same of all of them, or 'skip'"
                )

    def _with_tail(self, layer: Layer, size: int, words: Said | None) -> LayerCut:
        """A layer that stays whole; the last of its outputs meet what is cut."""
        if words is not None and words.style not in ("whole", "partly summed"):
            raise PlanError(
                f"'{layer.path}' is to be cut ({words.style}), but its last {size} outputs are keys that all heads "
                "share: it stays whole; say nothing of it, or 'skip'"
            )
        return LayerCut(layer.path, "partly summed", is_transposed=layer.kind == "transposed", summed_tail=size)

    def _take_tables_and_head(self, said: Mapping[str, Said]) -> None:
        """Vocabularies: rows of the table of tokens, and outputs of the layer that makes logits."""
        head = self._head()
        if head is not None and head.path not in said and head.path not in self.found.layers:
            runs = (balanced(head.outputs, self.ranks),)
            self._add(LayerCut(head.path, "column", runs, head.kind == "transposed", head.path, gathers=True))
        tables = [layer for layer in self.layers.values() if layer.kind == "embedding"]
        largest = max((layer.inputs for layer in tables), default=0)
        enough = min(head.outputs, largest) if head is not None else largest
        for layer in tables:
            if (
                layer.inputs >= max(enough, self.ranks)
                and layer.path not in said
                and layer.path not in self.found.layers
            ):
                self._add(LayerCut(layer.path, "rows of a table", (balanced(layer.inputs, self.ranks),)))

    def _head(self) -> Layer | None:
        if self.sketch.head is not None:
            return self.layers.get(self.sketch.head.path)
        last = [self.layers[path] for path in self.flow.result if path in self.layers]
        large = [layer for layer in last if layer.kind != "embedding" and layer.outputs > layer.inputs]
        return large[-1] if large else None

    def _agree_on_ties(self) -> None:
        """A weight that several layers have is cut one way, or by none of them."""
        for parameter in self.sketch.parameters:
            owners = [parent_of(name) for name in parameter.names if parent_of(name) in self.layers]
            cuts = {self._cut_of(path) for path in owners}
            if len(cuts) > 1:
                for path in owners:
                    self.found.layers.pop(path, None)

    def _cut_of(self, path: str) -> tuple[int, Runs] | None:
        cut = self.found.layers.get(path)
        return None if cut is None or not cut.runs else (cut.dim, cut.runs)

    # Numbers that modules compute with

    def _change_sizes(self, region: Region, parts: RegionParts) -> None:
        """Heads and features as modules count them for themselves."""
        paths = [layer.path for layer in (*region.sources, *region.tables, *region.sinks)]
        around = _common(paths)
        holders = {parent_of(layer.path) for layer in (*region.sources, *region.tables)}
        holders |= {path for each in holders for path in ancestors_of(each) if around and path.startswith(around)}
        holders |= {around} if region.head else set()
        outputs = {layer.outputs for layer in region.sinks}
        for path in sorted(holders & set(self.modules)):
            for name, value in self.modules[path].sizes:
                if (there := _value_on_ranks(name, value, region, parts, outputs)) is not None:
                    self.found.sizes[path, name] = SizeChange(path, name, there)

    # Refusals

    def _check(self, left: Sequence[str], users: Collection[str]) -> None:
        """Refuse a model of which nothing is cut but what stands at its ends; in strict mode any that nobody cuts."""
        cuts = [cut for cut in self.found.layers.values() if cut.style in ("column", "row")]
        config = self.section.partition_config
        is_covered = any(cut.path in users or not cut.gathers for cut in cuts)
        if is_covered and not (left and config and config.strict_mode):
            return
        missing = left or tuple(self.layers)
        if not missing:
            raise PlanError(
                f"tensor_parallel over {self.ranks} ranks: the model has no layer with a matrix that could be cut; "
                "leave the section out"
            )
        why = f" (its forward could not be followed: {self.flow.trouble})" if self.flow.trouble else ""
        raise PlanError(
            f"tensor_parallel: no rule says how to cut {and_more(missing, 6)}{why}. This partition_config cuts each by "
            "its outputs and gathers these, which is right whoever reads them; where a layer reads what another one "
            'gives and nothing looks at all features in between, say "row" of it and leave gather_output out of the '
            f"other: {self._suggestion(missing)}"
        )

    def _suggestion(self, paths: Sequence[str]) -> str:
        """A partition_config that covers these layers too, as JSON: one pattern for those that differ by numbers."""
        config = self.section.partition_config
        known = config.model_dump(mode="json", exclude_unset=True) if config else {}
        kinds: dict[str, bool] = {}
        for path in paths:
            pattern = r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in f"{path}.weight".split("."))
            pattern = f"^{pattern}$"
            kinds[pattern] = kinds.get(pattern, True) and self.layers[path].outputs >= self.ranks
        specs = [
            {"patterns": [pattern], "partition_type": "column", "gather_output": True}
            if is_large
            else {"patterns": [pattern], "partition_type": "skip"}
            for pattern, is_large in kinds.items()
        ]
        return json.dumps(known | {"layer_specs": [*specs, *known.get("layer_specs", ())]})


def _last_called(layers: Sequence[Layer], called: Mapping[str, int]) -> str:
    return max(reversed(layers), key=lambda layer: called.get(layer.path, -1)).path


def _check_draws(found: _Taken, flow: Flow, called: Mapping[str, int]) -> None:
    """Refuse what is drawn for something that ranks have alike, while random numbers differ by rank."""
    inside = [cut for cut in found.layers.values() if cut.is_last and cut.region in found.random]
    opens = {cut.region: called.get(cut.path, -1) for cut in inside if cut.style == "column"}
    closes = {cut.region: called.get(cut.path, -1) for cut in inside if cut.style == "row"}
    cut = {path for path, each in found.layers.items() if each.style.startswith("column") and not each.gathers}
    for draw in (each for each in flow.operations if each.draws and not each.reads & cut):
        at = called.get(draw.after, -1)
        for region, start in opens.items():
            if start <= at < closes.get(region, -1):
                raise PlanError(
                    f"tensor_parallel: dropout in {innermost(draw.place)} is applied to what all ranks have alike, "
                    f"while they work on parts of what '{region}' gives, where random numbers differ by rank; set this "
                    "dropout to 0, or say 'skip' of these layers in tensor_parallel.partition_config"
                )


def _value_on_ranks(
    name: str, value: int, region: Region, parts: RegionParts, outputs: set[int]
) -> tuple[int, ...] | None:
    """What stands in the place of a module's number on each rank; None where it stays."""
    if region.head and HEADS.search(name):
        return parts.heads.get(value)
    if parts.ratio is not None and value == parts.ratio[0] and re.search(r"group|rep|per_k", name):
        return parts.ratio[1]
    if value in parts.sizes and FEATURES.search(name) and not NOT_FEATURES.search(name):
        is_sure = region.head or value not in outputs or re.search(r"inter|inner|ff", name)
        return parts.sizes[value] if is_sure else None
    return None


def _said_by(spec: LayerSpecConfig, layer: Layer) -> Said:
    if spec.partition_type == "skip":
        return Said("whole", is_summed=spec.grad_allreduce, is_users=True)
    style: Style = "column" if spec.partition_type == "column" else "row"
    return Said(style, _runs_of(spec, layer), gathers=spec.gather_output, is_users=True)


def _runs_said(said: Mapping[str, Said], layers: Mapping[str, Layer]) -> RunsSaid:
    """The runs of layers of which somebody says that they are several in one."""
    fused = {path: words for path, words in said.items() if path in layers and words.runs}
    return RunsSaid(
        {path: words.runs_of(layers[path].outputs) for path, words in fused.items() if words.style == "column"},
        {path: words.runs_of(layers[path].inputs) for path, words in fused.items() if words.style == "row"},
    )


def _runs_of(spec: LayerSpecConfig, layer: Layer) -> tuple[int, ...]:
    """The runs of a fused layer: `[3, -1]` are three of the same size, `[[q, k, v], -1]` are those."""
    if spec.shape is None:
        return ()
    by_inputs = spec.partition_type == "row"
    size, others = (layer.inputs, layer.outputs) if by_inputs else (layer.outputs, layer.inputs)
    try:
        return runs_in(spec.shape, size, others, spec.partition_dim, by_inputs=by_inputs)
    except ValueError as error:
        raise PlanError(
            f"tensor_parallel.partition_config: the shape {json.dumps(spec.shape)} does not fit '{layer.path}', which "
            f"has {layer.outputs} outputs and {layer.inputs} inputs: {error}"
        ) from None


def _regions_of(
    said: Mapping[str, Said], runs: RunsSaid, layers: Mapping[str, Layer], modules: Mapping[str, ModuleSketch]
) -> Iterator[Region]:
    """Regions of a model whose forward could not be followed: columns up to the next rows, in order of definition."""
    sources: list[Layer] = []
    for path, layer in layers.items():
        words = said.get(path)
        if words is None or words.gathers or words.splits:
            continue
        if words.style == "column":
            sources.append(replace(layer, runs=runs.outputs.get(path, layer.runs)))
        elif words.style == "row" and sources:
            sizes = dict(modules[parent_of(sources[0].path)].sizes)
            head = sizes.get("head_dim", 0)
            ways = {each.path: Way(head=head) for each in sources}
            yield Region(tuple(sources), (layer,), runs=runs.inputs.get(path, ()), ways=ways)
            sources = []


def _share(found: _Taken, sketch: Sketch) -> float:
    """How much of all parameters is cut."""
    cut = {f"{path}.weight" for path, each in found.layers.items() if each.runs}
    cut |= {f"{path}.bias" for path, each in found.layers.items() if each.style == "column"}
    cut |= {name for name, each in found.parameters.items() if each.dim is not None}
    sizes = [(prod(each.shape), bool(cut & {*each.names})) for each in sketch.parameters]
    return sum(size for size, is_cut in sizes if is_cut) / max(1, sum(size for size, _ in sizes))


def _common(paths: Iterable[str]) -> str:
    """The path of the innermost module that has all of these."""
    found = [path.split(".")[:-1] for path in paths]
    shared = []
    for names in zip(*found, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _is_large(layer: Layer) -> bool:
    return layer.kind != "embedding" and min(layer.inputs, layer.outputs) > 8
