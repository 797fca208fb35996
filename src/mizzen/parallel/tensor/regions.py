"""Which layers are cut together, found by what reads what: columns, then something between, then rows.

A region is a set of layers whose outputs reach some other layers and nothing else: queries, keys and values, and the
projection behind attention; gate and up, and down. The first are cut by their outputs, the second by their inputs, and
what lies between works on a part of the features. That is right where nothing between looks at all features at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    def is_random(self) -> bool:
        """Whether dropout is applied to what is cut."""
        return any(way.is_random for way in self.ways.values())


@dataclass(frozen=True, slots=True)
class RegionParts:
    """What each rank has of a region."""

    runs: Mapping[str, Runs]
    """The parts of each source and table."""
    inputs: tuple[int, ...]
    """The parts of the features that arrive at the sinks."""
    sizes: Mapping[int, tuple[int, ...]]
    """Numbers of features, by what they are of all, and what each rank has in their place."""
    heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of heads, likewise."""
    ratio: tuple[int, tuple[int, ...]] | None = None
    """How many queries share a key, where that is another number on a rank."""


def find_regions(flow: Flow) -> list[Region]:
    """All regions of a model, without those that would cut a layer twice."""
    layers = flow.by_path()
    found: list[Region] = []
    for sources, sinks in _components(flow):
        known = [layers[path] for path in sources if path in layers]
        region = Region(
            tuple(layer for layer in known if layer.kind != "embedding"),
            tuple(layers[path] for path in sinks if path != OUTPUT),
            tuple(layer for layer in known if layer.kind == "embedding"),
            tuple(path for path in sources if path not in layers),
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


def parts_of(region: Region, ranks: int) -> RegionParts:
    """What each rank gets of a region; refused where heads cannot be shared out."""
    return _heads(region, ranks) if region.head else _features(region, ranks)


def _components(flow: Flow) -> Iterable[tuple[list[str], list[str]]]:
    """Layers and parameters, and the layers that read them, such that nothing else reads or is read."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for reader, reads in (*((layer.path, layer.reads) for layer in flow.layers), (OUTPUT, flow.result)):
        for source in reads:
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
        if not head and set(layer.runs or (layer.outputs,)) != {region.features}:
            return False
    return True


def _features(region: Region, ranks: int) -> RegionParts:
    size = region.features
    if size < ranks or region.tables:
        raise PlanError(f"'{region.name}' has {size} features, too few for {ranks} tensor-parallel ranks")
    parts = balanced(size, ranks)
    runs = {layer.path: (parts,) * max(1, len(layer.runs)) for layer in region.sources}
    totals = {
        layer.outputs: tuple(part * max(1, len(layer.runs)) for part in parts) for layer in region.sources if layer.runs
    }
    return RegionParts(runs, parts, {**totals, size: parts})


@dataclass(frozen=True, slots=True)
class _HeadRun:
    """A run of the outputs of a layer, as heads."""

    size: int
    heads: int


def _heads(region: Region, ranks: int) -> RegionParts:
    """By heads, and by keys and values that several queries share."""
    runs = {layer.path: _head_runs(layer, region) for layer in region.sources}
    every = [run.heads for each in runs.values() for run in each]
    fewest, most = min(every), max(*every, region.features // region.head if not region.features % region.head else 0)
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
        scaled(queries, region.features // most),
        {size: parts for size, parts in sizes.items() if size != region.head},
        {most: queries, **({fewest: keys} if fewest != most else {})},
        ratio if set(ratio[1]) != {ratio[0]} else None,
    )


def _can_share(fewest: int, most: int, ranks: int) -> bool:
    return fewest >= ranks or (ranks % fewest == 0 and most % ranks == 0)


def _head_runs(layer: Layer, region: Region) -> tuple[_HeadRun, ...]:
    """The runs of a layer's outputs, and how many heads each has."""
    head = region.ways[layer.path].head or region.head
    most = region.features // head if region.features % head == 0 else 0
    if layer.runs:
        return tuple(_HeadRun(size, size // head) for size in layer.runs)
    if layer.outputs % head == 0 and (not most or layer.outputs // head <= most):
        return (_HeadRun(layer.outputs, layer.outputs // head),)
    factors = layer.factors
    if len(factors) == 3 and factors[2] == head and factors[1] in (most, 0) and factors[0] != factors[1]:
        return tuple(_HeadRun(factors[1] * head, factors[1]) for _ in range(factors[0]))  # Q, then K, then V
    if factors and most and most % factors[0] == 0 and layer.outputs % factors[0] == 0:
        return (_HeadRun(layer.outputs, factors[0]),)  # for each head, or each group of heads, its own Q, K and V
    raise PlanError(
        f"'{layer.path}' gives {layer.outputs} features for heads of {head}, and how they belong to heads cannot be "
        "seen; say it in tensor_parallel.partition_config"
    )
