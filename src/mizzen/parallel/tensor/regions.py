"""Which layers are cut together, found by what reads what: columns, then something between, then rows.

A region is a set of layers whose outputs reach some other layers and nothing else: queries, keys and values, and the
projection behind attention; gate and up, and down. The first are cut by their outputs, the second by their inputs, and
what lies between works on a part of the features. That is right where nothing between looks at all features at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mizzen.errors import PlanError
from mizzen.model.flow import OUTPUT, Flow, Layer, Way
from mizzen.parallel.tensor.cuts import Runs, balanced, scaled


@dataclass(frozen=True, slots=True)
class Region:
    """Layers that are cut together."""

    sources: tuple[Layer, ...]
    """Cut by their outputs."""
    sinks: tuple[Layer, ...]
    """Cut by their inputs."""
    tables: tuple[Layer, ...] = ()
    """Embeddings with a number for each head, which is added to the scores of attention."""
    parameters: tuple[str, ...] = ()
    """Parameters of other modules, such as the norm of a head."""
    runs: tuple[int, ...] = ()
    """The runs in which features arrive at the sinks, where somebody says so; else they are one."""
    tails: Mapping[str, int] = field(default_factory=dict)
    """Layers that stay whole, of which the last outputs, so many, meet what is cut: keys that all heads share."""
    ways: Mapping[str, Way] = field(default_factory=dict)
    """What happens to each of these on its way to the sinks."""

    @property
    def name(self) -> str:
        """The path of its first layer, by which it is told apart."""
        return self.sources[0].path

    @property
    def features(self) -> int:
        """How many features arrive at its sinks."""
        return self.sinks[0].inputs

    @property
    def head(self) -> int:
        """The size of a head; 0 where there is no attention in it."""
        return next((self.ways[layer.path].head for layer in self.sources if self.ways[layer.path].head), 0)

    @property
    def head_sizes(self) -> frozenset[int]:
        """The sizes of heads of queries, keys and values, which may differ; none where there is no attention in it."""
        ways = [self.ways[layer.path] for layer in self.sources]
        return frozenset(size for way in ways for size in (way.head, way.value) if size)

    @property
    def queries(self) -> int:
        """How many heads arrive at its sinks, by the size of their values; 0 where that cannot be seen."""
        size = next((self.ways[layer.path].value for layer in self.sources if self.ways[layer.path].value), self.head)
        return 0 if self.features % size else self.features // size

    @property
    def is_random(self) -> bool:
        """Whether dropout is applied to what is cut."""
        return any(way.is_random for way in self.ways.values())


@dataclass(frozen=True, slots=True)
class RegionParts:
    """What each rank has of a region."""

    runs: Mapping[str, Runs]
    """The parts of each source and table."""
    inputs: Runs
    """The parts of the features that arrive at the sinks."""
    sizes: Mapping[int, tuple[int, ...]]
    """Numbers of features, by what they are of all, and what each rank has in their place."""
    heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of heads, likewise."""
    ratio: tuple[int, tuple[int, ...]] | None = None
    """How many queries share a key, where that is another number on a rank."""
    in_runs: Mapping[int, Runs] = field(default_factory=dict)
    """Numbers of features that lie in several runs, and the parts of these."""


@dataclass(frozen=True, slots=True)
class RunsSaid:
    """The runs of fused layers that somebody says, by path."""

    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def find_regions(flow: Flow, said: RunsSaid | None = None) -> list[Region]:
    """All regions of a model, without those that would cut a layer twice."""
    said = said or RunsSaid()
    layers = {path: replace(each, runs=said.outputs.get(path, each.runs)) for path, each in flow.by_path().items()}
    tails = {path: tail for path in layers if (tail := _tail_of(path, flow)) is not None}
    found: list[Region] = []
    for sources, sinks in _components(flow, {(path, tail.reader) for path, tail in tails.items()}):
        known = [layers[path] for path in sources if path in layers]
        region = Region(
            tuple(layer for layer in known if layer.kind != "embedding"),
            tuple(layers[path] for path in sinks if path != OUTPUT),
            tuple(layer for layer in known if layer.kind == "embedding"),
            tuple(path for path in sources if path not in layers),
            _arriving([said.inputs.get(path, ()) for path in sinks]),
            {path: tail.size for path, tail in tails.items() if tail.reader in sinks},
            _ways(sources, [layers[path] for path in sinks if path != OUTPUT]),
        )
        if OUTPUT not in sinks and region.sources and _is_apart(region):
            found.append(region)
    found.sort(key=lambda region: -sum(layer.inputs * layer.outputs for layer in region.sources))
    taken: set[str] = set()
    chosen: list[Region] = []
    for region in found:
        here = {layer.path for layer in (*region.sources, *region.sinks)}
        if not here & taken:
            taken |= here
            chosen.append(region)
    order = {layer.path: at for at, layer in enumerate(flow.layers)}
    return sorted(chosen, key=lambda region: order[region.name])


def _arriving(runs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The runs in which all sinks are said to read features; none where some are said to read others."""
    return runs[0] if len(set(runs)) == 1 else ()


def parts_of(region: Region, ranks: int) -> RegionParts:
    """What each rank gets of a region; refused where heads cannot be shared out."""
    return _heads(region, ranks) if region.head else _features(region, ranks)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The last outputs of a layer, which go by the layers that read its other outputs."""

    reader: str
    """The layer that they reach."""
    size: int


def _tail_of(path: str, flow: Flow) -> _Tail | None:
    """Whether a layer compresses keys and values for another one and has keys for all heads behind them.

    Its last outputs reach, through attention, a layer that reads what those others give; nothing else does.
    """
    layers = flow.by_path()
    readers = [layer for layer in flow.layers if path in layer.reads]
    if path in flow.result or len(readers) < 2:
        return None
    for last in readers:
        way, others = last.reads[path], [layer for layer in readers if layer is not last]
        start = min((start for start, _ in way.features), default=0)
        before = [stop for layer in others for _, stop in layer.reads[path].features]
        is_between = all(layer.path in last.reads for layer in others)
        if way.head and is_between and before and max(before) <= start and layers[path].kind != "embedding":
            return _Tail(last.path, layers[path].outputs - start)
    return None


def _components(flow: Flow, without: Collection[tuple[str, str]]) -> Iterable[tuple[list[str], list[str]]]:
    """Layers and parameters, and the layers that read them, such that nothing else reads or is read.

    Some do not count: (who gives, who reads).
    """
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for reader, reads in (*((layer.path, layer.reads) for layer in flow.layers), (OUTPUT, flow.result)):
        for source in reads:
            if (source, reader) not in without:
                parent[root(("gives", source))] = root(("reads", reader))
    groups: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for node in list(parent):
        given, reading = groups.setdefault(root(node), ([], []))
        (given if node[0] == "gives" else reading).append(node[1])
    return groups.values()


def _ways(sources: Sequence[str], sinks: Sequence[Layer]) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for sink in sinks:
        for source in sources:
            if source in sink.reads:
                found[source] = found.get(source, Way()) | sink.reads[source]
    return found


def _is_apart(region: Region) -> bool:
    """Whether each part of the features can be worked on without the others."""
    if any(sink.kind == "embedding" or sink.inputs != region.features for sink in region.sinks):
        return False
    head = region.head
    for layer in region.sources:
        whole = {layer.outputs, *layer.runs, region.features} - ({head} if head else set())
        reduced = region.ways[layer.path].reduced
        if reduced & whole or any(
            head and size > head and size % head == 0 and size < layer.outputs for size in reduced
        ):
            return False
        given = layer.runs or (layer.outputs,)
        if not head and set(given) != {region.features} and given != region.runs:
            return False
    return True


def _features(region: Region, ranks: int) -> RegionParts:
    """By features: what a source gives arrives as it is, or each of its runs does, as gate and up do."""
    size = region.features
    if size < ranks or region.tables:
        raise PlanError(f"'{region.name}' has {size} features, too few for {ranks} tensor-parallel ranks")
    inputs = tuple(balanced(run, ranks) for run in region.runs or (size,))
    runs: dict[str, Runs] = {}
    for layer in region.sources:
        given = layer.runs or (layer.outputs,)
        if given == (region.runs or (size,)):
            runs[layer.path] = inputs
        elif set(given) == {size} and not region.runs:
            runs[layer.path] = inputs * len(given)
        else:
            raise PlanError(
                f"'{layer.path}' gives {_in_runs(given)} features and '{region.sinks[0].path}' reads "
                f"{_in_runs(region.runs or (size,))}: which of them belong together cannot be seen; say the same of "
                "both in tensor_parallel.partition_config (shape), or 'skip'"
            )
    cuts = {layer.outputs: runs[layer.path] for layer in region.sources} | {size: inputs}
    totals = {each: tuple(map(sum, zip(*cut, strict=True))) for each, cut in cuts.items()}
    return RegionParts(runs, inputs, totals, in_runs={each: cut for each, cut in cuts.items() if len(cut) > 1})


def _in_runs(runs: Sequence[int]) -> str:
    return " + ".join(map(str, runs))


@dataclass(frozen=True, slots=True)
class _HeadRun:
    """A run of the outputs of a layer, as heads."""

    size: int
    heads: int


def _heads(region: Region, ranks: int) -> RegionParts:
    """By heads, and by keys and values that several queries share."""
    if region.runs:
        raise PlanError(
            f"'{region.sinks[0].path}' is said to read {_in_runs(region.runs)} features, but they come in heads, which "
            "are not cut in two; leave its shape out of tensor_parallel.partition_config"
        )
    runs = {layer.path: _head_runs(layer, region) for layer in region.sources}
    every = [run.heads for each in runs.values() for run in each]
    fewest, most = min(every), max(*every, region.queries)
    if region.features % most or any(run.heads not in (fewest, most) for each in runs.values() for run in each):
        raise PlanError(f"'{region.name}': its {fewest} to {most} heads do not fit {region.features} features")
    if not _can_share(fewest, most, ranks):
        works = [size for size in range(1, most + 1) if _can_share(fewest, most, size)]
        near = [*[size for size in works if size < ranks][-1:], *[size for size in works if size > ranks][:1]]
        heads = f"{most} heads" + (f", {fewest} of them with keys and values," if fewest < most else "")
        raise PlanError(
            f"'{region.name}': {heads} cannot be shared out among {ranks} tensor-parallel ranks; "
            f"take {' or '.join(map(str, near))}"
        )
    if fewest >= ranks:
        shares = balanced(fewest, ranks)
        queries = scaled(shares, most // fewest)
        keys = shares
        cut = {path: tuple(scaled(shares, run.size // fewest) for run in each) for path, each in runs.items()}
    else:
        queries, keys = (most // ranks,) * ranks, (1,) * ranks
        cut = {
            path: tuple(
                (run.size // ranks,) * ranks if run.heads == most else (run.size // fewest,) * fewest for run in each
            )
            for path, each in runs.items()
        }
    tables = {layer.path: (queries,) for layer in region.tables}
    sizes = {region.features: scaled(queries, region.features // most)}
    for path, each in runs.items():
        for run, parts in zip(each, cut[path], strict=True):
            sizes.setdefault(run.size, tuple(parts[rank * len(parts) // ranks] for rank in range(ranks)))
    ratio = (most // fewest, tuple(q // k for q, k in zip(queries, keys, strict=True)))
    return RegionParts(
        {**cut, **tables},
        (scaled(queries, region.features // most),),
        {size: parts for size, parts in sizes.items() if size not in region.head_sizes},
        {most: queries, **({fewest: keys} if fewest != most else {})},
        ratio if set(ratio[1]) != {ratio[0]} else None,
    )


def _can_share(fewest: int, most: int, ranks: int) -> bool:
    return fewest >= ranks or (ranks % fewest == 0 and most % ranks == 0)


def _head_runs(layer: Layer, region: Region) -> tuple[_HeadRun, ...]:
    """The runs of a layer's outputs, and how many heads each has."""
    way, most, factors = region.ways[layer.path], region.queries, layer.factors
    head = way.head or region.head
    if way.value in (0, head):  # else it gives keys and values, in heads of different sizes
        if layer.runs:
            return tuple(_HeadRun(size, size // head) for size in layer.runs)
        if layer.outputs % head == 0 and (not most or layer.outputs // head <= most):
            return (_HeadRun(layer.outputs, layer.outputs // head),)
    if len(factors) == 3 and factors[2] == head and factors[1] in (most, 0) and factors[0] != factors[1]:
        return tuple(_HeadRun(factors[1] * head, factors[1]) for _ in range(factors[0]))  # Q, then K, then V
    if factors and most and most % factors[0] == 0 and layer.outputs % factors[0] == 0:
        return (_HeadRun(layer.outputs, factors[0]),)  # for each head, or each group of heads, its own Q, K and V
    sizes, sinks = sorted({head, way.value or head}), ", ".join(f"'{sink.path}'" for sink in region.sinks)
    raise PlanError(
        f"'{layer.path}' gives {layer.outputs} features for heads of {' and '.join(map(str, sizes))}, and how they "
        "belong to heads cannot be seen; say it in tensor_parallel.partition_config, or 'skip' of all that "
        f"{sinks} reads"
    )
