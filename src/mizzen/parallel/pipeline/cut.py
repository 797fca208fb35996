"""A pipeline as a transform: which part of a model is on which stage, and how micro-batches go through them.

A model that is written as a list of layers is cut between layers, any other between its repeated blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import nn

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import DATA_AXES, Layout
from mizzen.config.parallel import PipelineConfig
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Drafts, Sketch
from mizzen.parallel.pipeline.blocks import PROFILE, BlockList, chunk_of, leave
from mizzen.parallel.pipeline.module import LayeredModule, cut_layers
from mizzen.parallel.pipeline.runner import Pipelined
from mizzen.parallel.pipeline.schedule import Schedule, peak_activations
from mizzen.parallel.pipeline.tables import make_schedule, split_last
from mizzen.plan.parts import Parts
from mizzen.plan.transform import MakeRunner, Transform
from mizzen.wording import counted


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Which table is run: one by name, for any number of micro-batches, or one that the user has written."""

    name: str
    stages: int
    virtual_stages: int | None
    written: Schedule | None = None
    splits_last: bool = False
    """Whether the last backward of each stage is in two halves."""

    @classmethod
    def of(cls, config: Config, stages: int) -> "ScheduleChoice":
        """Read it out of a configuration; a table that cannot be run is refused."""
        section = config.pipeline
        if isinstance(section.schedule, str):
            halves = section.schedule == "1f1b" and section.split_last_backward and not _goes_back_as_a_whole(config)
            return cls(section.schedule, stages, section.virtual_stages, splits_last=halves)
        written = Schedule.of(section.schedule)
        if written.stages != stages:
            raise PlanError(
                f"pipeline.schedule has {counted(written.stages, 'row')} for pipeline_parallel_size {stages}: give one "
                "for each stage"
            )
        return cls("custom", stages, section.virtual_stages, written)

    @property
    def example(self) -> Schedule:
        """A table for twice as many micro-batches as stages, or the one that was written."""
        return self.table(self.written.micro_batches if self.written is not None else 2 * self.stages)

    def table(self, micro_batches: int, *, forward_only: bool = False) -> Schedule:
        """The table for so many micro-batches."""
        if self.written is None:
            made = make_schedule(self.name, self.stages, micro_batches, self.virtual_stages, forward_only=forward_only)
            return split_last(made) if self.splits_last else made
        if forward_only:
            return make_schedule(
                "looped_bfs", self.stages, micro_batches, self.written.chunks_per_stage, forward_only=True
            )
        if self.written.micro_batches != micro_batches:
            raise PlanError(
                f"pipeline.schedule is a table for {self.written.micro_batches} micro-batches, and a step has "
                f"{micro_batches}: gradient_accumulation_steps has to be that number"
            )
        return self.written


@dataclass(frozen=True, slots=True)
class CutChoice:
    """The chunks of a model, and the stage of each."""

    layout: Layout
    schedule: ScheduleChoice
    placement: tuple[int, ...]
    chunks: tuple[range, ...]
    """The layers, or blocks, of each chunk, by number."""
    names: tuple[frozenset[str], ...]
    """The parameters of each chunk, by the name that the whole model has for them."""
    interval: int = 0
    """Layers between recomputed activations; 0 leaves that to the model."""
    blocks: BlockList | None = None
    """The blocks of a model; None for one that is written as a list of layers."""
    balance: str = ""
    """What the chunks take, where that was to be measured."""

    def chunks_at(self, stage: int) -> tuple[int, ...]:
        """The chunks of a stage, in the order of their parts."""
        return tuple(chunk for chunk, place in enumerate(self.placement) if place == stage)

    @property
    def order(self) -> tuple[int, ...]:
        """The chunks in the order of drafts: the first of every stage, then the second of every stage, and so on."""
        per_stage = len(self.placement) // self.layout.pp
        return tuple(self.chunks_at(stage)[turn] for turn in range(per_stage) for stage in range(self.layout.pp))

    def __str__(self) -> str:
        sizes = "+".join(str(len(numbers)) for numbers in self.chunks)
        what = "blocks" if self.blocks is not None else "layers"
        table = self.schedule.example
        kept = max(peak_activations(table))
        micros = f"{kept} micro-batch{'es' if kept > 1 else ''}"
        chunks = f" in {len(self.chunks)} chunks" if len(self.chunks) > self.layout.pp else ""
        cut = f" of {sizes} {what}" if any(self.chunks) else ""
        return (
            f"{counted(self.layout.pp, 'stage')}{chunks}{cut}, schedule {self.schedule.name}, which keeps activations "
            f"of at most {micros} out of {table.micro_batches}{self.balance}"
        )


class PipelineCut(Transform):
    """Stages over pp; a model that is written as a list of layers is run by its batch convention on one stage, too."""

    name = "pipeline"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> CutChoice | None:
        """Cut a model into chunks; None where there is one stage and no list of layers, or something has cut it."""
        sketch, *others = drafts
        if others:
            return None
        if layout.pp == 1 and sketch.layer_list is None:
            _refuse_alone(config.pipeline)
            return None
        choice = self._cut(config, layout, sketch)
        zero = config.zero_optimization
        if zero.stage == 3 and (layout.size(*DATA_AXES) > 1 or zero.offload_param is not None):
            _refuse_shared(choice)
        return choice

    def _cut(self, config: Config, layout: Layout, sketch: Sketch) -> CutChoice:
        layers, schedule = sketch.layer_list, ScheduleChoice.of(config, layout.pp)
        placement = schedule.example.placement
        if layers is not None:
            weights = [_weight(sketch, layer.path) for layer in layers.layers]
            chunks = _ranges(cut_layers(layers, weights, len(placement)))
            paths = [{layers.layers[number].path for number in numbers} - {""} for numbers in chunks]
            names = tuple(_names_under(sketch, each) for each in paths)
            interval = config.pipeline.activation_checkpoint_interval
            weighed = _balance(layers.partition, layers.weights, "layers", chunks) if layout.pp > 1 else ""
            return CutChoice(layout, schedule, placement, chunks, names, interval, balance=weighed)
        if not sketch.modules:
            return CutChoice(layout, schedule, placement, (range(0),) * len(placement), (frozenset(),) * len(placement))
        blocks = BlockList.find(sketch)
        method = config.pipeline.partition
        chunks = _ranges(blocks.cut(sketch, len(placement), method))
        names, weighed = blocks.names(sketch, chunks), _balance(method, blocks.seconds(sketch), "blocks", chunks)
        return CutChoice(layout, schedule, placement, chunks, names, blocks=blocks, balance=weighed)

    def redraw(self, choice: CutChoice, drafts: Drafts) -> Drafts:
        """One piece for each chunk. What several stages use lives on all of them, and on each in one piece."""
        (whole,) = drafts
        if not choice.names:
            return drafts
        places: dict[str, list[int]] = {}
        for held, stage in zip(choice.names, choice.placement, strict=True):
            for name in held:
                places.setdefault(name, []).append(stage)
        found, seen = [], set[tuple[str, int]]()
        for chunk in choice.order:
            stage = choice.placement[chunk]
            names = {name for name in choice.names[chunk] if (name, stage) not in seen}
            seen |= {(name, stage) for name in names}
            found.append(_placed(whole.having(names), places))
        return tuple(found) if len(found) > 1 else (_placed(whole, places),)

    def runner(self, choice: CutChoice) -> MakeRunner:
        """Micro-batches by the table."""
        return partial(Pipelined, placement=choice.placement, table=choice.schedule.table)

    def take(self, model: nn.Module, choice: CutChoice, mesh: Mesh) -> None:
        """Build this rank's layers, and let go of all others."""
        own = choice.chunks_at(mesh.coordinate("pp"))
        if isinstance(model, LayeredModule):
            numbers = sorted(number for chunk in own for number in choice.chunks[chunk])
            model.build(numbers)
            model.keep(numbers)
            firsts = [numbers.start for numbers in choice.chunks]
            model.bounds = (*firsts, choice.chunks[-1].stop) if len(firsts) == choice.layout.pp else ()
            model.activation_checkpoint_interval = choice.interval or model.activation_checkpoint_interval
        elif choice.blocks is not None:
            own_blocks, last = [choice.chunks[chunk] for chunk in own], len(choice.chunks) - 1
            leave(model, choice.blocks, own_blocks, is_first=0 in own, is_last=last in own)

    def apply(self, parts: Parts, choice: CutChoice, mesh: Mesh) -> Parts:
        """One part for each chunk."""
        (part,) = parts
        own = choice.chunks_at(mesh.coordinate("pp"))
        return tuple(replace(part, module=_module(part.module, choice, chunk, len(own) == 1)) for chunk in own)


def _module(model: nn.Module, choice: CutChoice, chunk: int, is_alone: bool) -> nn.Module:
    numbers = choice.chunks[chunk]
    if choice.blocks is not None:
        return chunk_of(model, choice.blocks, numbers, is_alone=is_alone)
    if isinstance(model, LayeredModule) and not is_alone:
        return model.chunk(numbers)
    return model


def _placed(draft: Sketch, places: Mapping[str, Collection[int]]) -> Sketch:
    """A piece whose parameters live on the stages that use them."""
    homes = (p.home.at("pp", *sorted(set(places[p.name]))) if p.name in places else p.home for p in draft.parameters)
    return replace(
        draft, parameters=tuple(replace(p, home=home) for p, home in zip(draft.parameters, homes, strict=True))
    )


def _balance(method: str, seconds: Sequence[float], what: str, chunks: Sequence[range]) -> str:
    """What a plan says of chunks that are to be cut by what they take."""
    if method.lower() != PROFILE:
        return ""
    if not seconds:
        return f"; cut by parameters until {what} are measured"
    sums = (sum(seconds[number] for number in numbers) for numbers in chunks)
    return f"; measured for a micro-batch: {'+'.join(f'{1e3 * each:.3g}' for each in sums)} ms"


def _ranges(bounds: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def _names_under(sketch: Sketch, paths: Collection[str]) -> frozenset[str]:
    """The parameters that have a name below one of these modules."""
    prefixes = tuple(f"{path}." for path in paths)
    return frozenset(p.name for p in sketch.parameters if any(name.startswith(prefixes) for name in p.names))


def _weight(sketch: Sketch, path: str) -> int:
    names = _names_under(sketch, {path}) if path else frozenset[str]()
    return sum(p.numel for p in sketch.parameters if p.name in names and p.requires_grad)


def _refuse_shared(choice: CutChoice) -> None:
    """Refuse a weight of which two chunks of one stage would have to gather the same shards."""
    seen: set[tuple[str, int]] = set()
    for names, stage in zip(choice.names, choice.placement, strict=True):
        if twice := sorted(name for name in names if (name, stage) in seen):
            raise PlanError(
                f"zero_optimization.stage 3 with pipeline.schedule {choice.schedule.name}: '{twice[0]}' is used by two "
                f"chunks of stage {stage}, and its shards belong to one: use another schedule, such as interleaved, or "
                "ZeRO stage 2"
            )
        seen |= {(name, stage) for name in names}


def _goes_back_as_a_whole(config: Config) -> bool:
    """Whether it is known that halves of a backward would compute more than the whole, or gather parameters twice."""
    recomputes = config.activation_checkpointing.mode != "off" or config.pipeline.activation_checkpoint_interval > 0
    return recomputes or config.compile.enabled or config.zero_optimization.stage == 3


def _refuse_alone(config: PipelineConfig) -> None:
    default = PipelineConfig.model_construct()
    for key in ("schedule", "virtual_stages"):
        if getattr(config, key) != getattr(default, key):
            raise PlanError(f"pipeline.{key} is set, but there is one stage: set pipeline_parallel_size, too")
