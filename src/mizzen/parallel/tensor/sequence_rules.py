"""Where the activations between cut layers can be cut along the sequence: a pure function of what was seen of a model.

Inside of a block, norms, dropout and what is added up work on each token by itself, so that a rank may have some of the
tokens. Attention and the layers beside it work on all of them: the modules that have these layers (the readers) are
given whole sequences, and the layers at their end sum up into parts. A model that does something else is refused, with
the module that does it.
"""

from collections.abc import Iterator, Mapping

from mizzen.errors import PlanError
from mizzen.model.blocks import Blocks
from mizzen.model.flow import OUTPUT, Argument, Flow, Layer, ModuleCall
from mizzen.model.sketch import ModuleSketch, Sketch, ancestors_of, parent_of
from mizzen.parallel.tensor.cuts import LayerCut, ModuleInput, ParameterCut, SequenceCut

KEY = "tensor_parallel.sequence_parallel"


def cut_sequences(
    sketch: Sketch, layers: Mapping[str, LayerCut], parameters: Mapping[str, ParameterCut]
) -> tuple[SequenceCut, dict[str, ParameterCut]]:
    """Where sequences are cut, given what else is cut; and the parameters that meet parts of them."""
    return _SequenceRules(sketch, layers, parameters).decide()


class _SequenceRules:
    """Goes through the blocks of one model."""

    def __init__(self, sketch: Sketch, layers: Mapping[str, LayerCut], parameters: Mapping[str, ParameterCut]) -> None:
        self.sketch, self.cuts, self.parameters = sketch, layers, parameters
        self.flow = sketch.flow or Flow(trouble="nobody has looked")
        if self.flow.trouble:
            raise PlanError(f"{KEY}: the forward of this model could not be followed: {self.flow.trouble}")
        self.layers: dict[str, Layer] = self.flow.by_path()
        self.modules: dict[str, ModuleSketch] = {m.path: m for m in sketch.modules if m.same_as is None}
        rows = [cut.path for cut in layers.values() if cut.style == "row"]
        units = [unit.path for unit in Blocks.of(sketch).units]
        self.blocks = [path for path in units if any(_is_in(row, path) for row in rows)]
        if not self.blocks:
            raise PlanError(f"{KEY}: no module of this model repeats that has layers which are cut; leave it out")
        self.readers: dict[str, set[str]] = {}
        """For each module that is given whole sequences, the regions that begin in it."""
        self.emitting: list[str] = []
        """The layers in blocks that give parts of sequences."""

    def decide(self) -> tuple[SequenceCut, dict[str, ParameterCut]]:
        stacks: dict[str, list[ModuleInput]] = {}
        order = {path: at for at, path in enumerate(self.flow.calls)}
        for path in sorted(self.blocks, key=lambda path: order.get(path, -1)):
            stacks.setdefault(parent_of(path), []).append(ModuleInput(path, self._argument(path, "a block")))
        for block in self.blocks:
            self._find_readers(block)
        for path in self.layers:
            if (around := self._block_of(path)) is not None:
                self._check_layer(path, around)
        self._check_between()
        ways = [way for layer in self.layers.values() for source, way in layer.reads.items() if source in self.emitting]
        entries = tuple(
            ModuleInput(path, self._argument(path, "a module with layers that are cut")) for path in self.readers
        )
        found = SequenceCut(
            tuple(map(tuple, stacks.values())),
            entries,
            frozenset(path for path in self.emitting if path in self.cuts),
            any(way.is_random for way in ways),
        )
        return found, {name: ParameterCut(name, None) for name in self._met_by_parts()}

    def _argument(self, path: str, what: str) -> Argument:
        """The one activation that a module is given."""
        call = self.flow.calls.get(path, ModuleCall(path))
        if call.times != 1:
            raise PlanError(f"{KEY}: '{path}', {what}, is called {call.times} times in a forward, and not once")
        if len(call.takes) != 1 or call.takes[0] is None:
            raise PlanError(
                f"{KEY}: '{path}', {what}, is given {len(call.takes)} activations of (samples, tokens, features) as "
                "arguments, and not one: leave the key out for this model"
            )
        if path in self.blocks and call.gives != 1:
            raise PlanError(f"{KEY}: '{path}', {what}, does not give one activation alone; leave the key out")
        return call.takes[0]

    def _find_readers(self, block: str) -> None:
        """The modules around the first layers of the regions of a block."""
        regions: dict[str, list[str]] = {}
        for path, cut in self.cuts.items():
            if not _is_in(path, block):
                continue
            if cut.style == "partly summed":
                continue  # it reads whole sequences, and gives them to the region
            if cut.style not in ("column", "row") or cut.gathers or cut.splits:
                raise PlanError(f"{KEY}: '{path}' in a block is cut in another way ({cut}); leave the key out")
            if cut.style == "column":
                regions.setdefault(cut.region, []).append(path)
            else:
                self.emitting.append(path)
        for name, sources in regions.items():
            reader = _around(sources)
            if not _is_in(reader, block) or reader == block:
                raise PlanError(
                    f"{KEY}: '{sources[0]}' stands in the block '{block}' itself, whose forward works with parts of "
                    "sequences; put the layers of attention into a module of their own, or leave the key out"
                )
            self.readers.setdefault(reader, set()).add(name)
        for reader in list(self.readers):
            if around := next((other for other in self.readers if other in ancestors_of(reader)), None):
                raise PlanError(f"{KEY}: '{reader}' lies in '{around}', and both work with whole sequences")

    def _check_layer(self, path: str, block: str) -> None:
        """Refuse a layer of a block that is whole, unless it works on whole sequences or on parts alone."""
        if path in self.cuts and self.cuts[path].style != "partly summed":
            return
        reader, layer = self._reader_of(path), self.layers[path]
        if reader is None:
            raise PlanError(
                f"{KEY}: no rule cuts '{path}', which stands in the block '{block}' beside the layers that are cut; "
                "leave the key out"
            )
        own = {cut.path for cut in self.cuts.values() if cut.style == "row" and cut.region in self.readers[reader]}
        if own & set(layer.reads):
            self.emitting.append(path)  # behind the last layer of a region, as the second half of an adapter
            return
        others = [each for each in self._read_by(path) if not self._is_of(each, reader)]
        if others:
            raise PlanError(
                f"{KEY}: '{path}', which no rule cuts, works with whole sequences in '{reader}', and {others[0]} reads "
                "what it gives, where sequences are cut; leave the key out"
            )

    def _read_by(self, path: str) -> Iterator[str]:
        for other in self.layers.values():
            if path in other.reads:
                yield f"'{other.path}'"
        if path in self.flow.result:
            yield "the result"

    def _is_of(self, quoted: str, reader: str) -> bool:
        cut = self.cuts.get(quoted.strip("'"))
        return cut is not None and cut.region in self.readers[reader]

    def _check_between(self) -> None:
        """Refuse what looks at several tokens where each rank has some of them."""
        inside = [layer for path, layer in self.layers.items() if self._block_of(path) is not None]
        readers = [(f"'{layer.path}'", layer.reads) for layer in inside]
        readers += [(f"what '{block}' gives", self.flow.calls[block].sources) for block in self.blocks]
        for who, reads in readers:
            for source in self.emitting:
                if source in reads and reads[source].mixed:
                    raise PlanError(
                        f"{KEY}: between '{source}' and {who} tokens are not worked on one by one: "
                        f"{reads[source].mixed}; leave the key out"
                    )
        for reader in self.readers:
            around = [name for name in self.flow.calls[reader].sources if name != OUTPUT and not _is_in(name, reader)]
            if around:
                raise PlanError(
                    f"{KEY}: '{reader}' gives more than what its layers make of whole sequences: what it is given "
                    f"itself, which comes from '{min(around)}', goes by them; leave the key out"
                )

    def _met_by_parts(self) -> Iterator[str]:
        """Parameters in blocks that are whole and meet parts of sequences: norms, biases of rows."""
        for name in self.sketch.by_name():
            if self._block_of(name) is not None and name not in self.parameters and self._meets_parts(name):
                yield name

    def _meets_parts(self, name: str) -> bool:
        path = parent_of(name)
        if path in self.cuts:
            return self.cuts[path].style == "row" and not name.endswith(".weight")
        reader = self._reader_of(path)
        if reader is None or path in self.emitting:
            return True
        return path not in self.layers and not self._is_before(name, reader)

    def _is_before(self, name: str, reader: str) -> bool:
        """Whether a parameter of a reader meets what its first layers read."""
        sources = (cut.path for cut in self.cuts.values() if cut.region in self.readers[reader])
        return any(name in self.layers[path].reads for path in sources if path in self.layers)

    def _block_of(self, name: str) -> str | None:
        return next((path for path in ancestors_of(name) if path in self.blocks), None)

    def _reader_of(self, path: str) -> str | None:
        return next((each for each in (path, *ancestors_of(path)) if each in self.readers), None)


def _is_in(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _around(paths: list[str]) -> str:
    """The innermost module that has all of these layers."""
    found = set(ancestors_of(paths[0])).intersection(*(ancestors_of(path) for path in paths[1:]))
    return max(found, key=len)
