"""Which modules of a model's blocks work with whole sequences, where each rank has a part of them between the layers.

Attention and what stands beside it (the readers) have the layers that are cut by their outputs. The layers at their
end, which are cut by inputs, sum up into parts. A layer that is whole works with one or the other, or is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from mizzen.errors import PlanError
from mizzen.model.flow import OUTPUT, CallPath, Flow, Layer, ModuleCall
from mizzen.model.sketch import ancestors_of
from mizzen.parallel.tensor.cuts import LayerCut

KEY: Final = "tensor_parallel.sequence_parallel"


class SequenceReaders:
    """The readers of all blocks, and the layers that give parts of sequences; refused where a block does not fit."""

    def __init__(self, flow: Flow, cuts: Mapping[str, LayerCut], blocks: Sequence[str]) -> None:
        self.flow, self.cuts, self.blocks = flow, cuts, blocks
        self.layers: dict[str, Layer] = flow.by_path()
        self.regions: dict[str, set[str]] = {}
        """For each reader, the regions that begin in it."""
        self.emitting: list[str] = []
        """The layers in blocks that give parts of sequences."""
        for block in blocks:
            self._find(block)
        for path in self.layers:
            if (around := self.block_of(path)) is not None:
                self._check_layer(path, around)

    def _find(self, block: str) -> None:
        """The modules around the first layers of the regions of a block."""
        regions: dict[str, list[str]] = {}
        for path, cut in self.cuts.items():
            if not is_in(path, block):
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
            reader = _around([self._adapted(path, sources) for path in sources])
            if not is_in(reader, block) or reader == block:
                raise PlanError(
                    f"{KEY}: '{sources[0]}' stands in the block '{block}' itself, whose forward works with parts of "
                    "sequences; put the layers of attention into a module of their own, or leave the key out"
                )
            self.regions.setdefault(reader, set()).add(name)
        for reader in list(self.regions):
            if around := next((other for other in self.regions if other in ancestors_of(reader)), None):
                raise PlanError(f"{KEY}: '{reader}' lies in '{around}', and both work with whole sequences")

    def _adapted(self, path: str, sources: list[str]) -> str:
        """The module that stands in the place of a first layer and has an adapter beside it; else the layer itself."""
        seconds = {each: first for each in sources if (first := self._first_halves(each))}
        for second, first in seconds.items():
            module = _around([second, *first])
            here = [each for each in sources if is_in(each, module)]
            alone = [each for each in here if each not in seconds]
            is_end = any(cut.style == "row" and is_in(cut.path, module) for cut in self.cuts.values())
            if is_in(path, module) and len(alone) == 1 and not is_end and self._gives_sum(module, here):
                return module
        return path

    def _first_halves(self, path: str) -> list[str]:
        """The layers that a layer reads, if these stay whole and it reads nothing else, as in an adapter."""
        reads = list(self.layers[path].reads) if path in self.layers else []
        return reads if all(each in self.layers and each not in self.cuts for each in reads) else []

    def _gives_sum(self, module: str, layers: list[str]) -> bool:
        """Whether a module returns what these layers give, and no attention or norm is in between."""
        sources = self.flow.calls.get(module, ModuleCall(module)).sources
        return sources.keys() == set(layers) and not any(way.head or way.reduced for way in sources.values())

    def _check_layer(self, path: str, block: str) -> None:
        """Refuse a layer of a block that is whole, unless it works on whole sequences or on parts alone."""
        if path in self.cuts and self.cuts[path].style != "partly summed":
            return
        reader, reads = self.reader_of(path), {each for each in self.layers[path].reads if each in self.layers}
        if reads and reads <= self.ends(block, reader):
            self.emitting.append(path)  # behind the last layer of a region, as the second half of an adapter
            return
        if reader is None:
            raise PlanError(
                f"{KEY}: no rule cuts '{path}', which stands in the block '{block}' beside the layers that are cut; "
                "leave the key out"
            )
        others = [each for each in self._read_by(path) if not self._is_of(each, reader)]
        if others:
            raise PlanError(
                f"{KEY}: '{path}', which no rule cuts, works with whole sequences in '{reader}', and {others[0]} reads "
                "what it gives, where sequences are cut; leave the key out"
            )

    def ends(self, block: str, reader: str | None) -> set[str]:
        """The layers that give parts of sequences: of a reader those at its end, else all of a block."""
        here = {path for path in self.emitting if is_in(path, block)}
        if reader is None:
            return here
        own = {path for path, cut in self.cuts.items() if cut.style == "row" and cut.region in self.regions[reader]}
        return {path for path in here if path in own or (path not in self.cuts and is_in(path, reader))}

    def _read_by(self, path: str) -> Iterator[str]:
        for other in self.layers.values():
            if path in other.reads:
                yield f"'{other.path}'"
        if path in self.flow.result:
            yield "the result"

    def _is_of(self, quoted: str, reader: str) -> bool:
        cut = self.cuts.get(quoted.strip("'"))
        return cut is not None and cut.region in self.regions[reader]

    def check_outputs(self) -> None:
        """Refuse a reader that gives more than what comes out of its layers."""
        for reader in self.regions:
            around = [name for name in self.flow.calls[reader].sources if name != OUTPUT and not is_in(name, reader)]
            if around:
                raise PlanError(
                    f"{KEY}: '{reader}' gives more than what its layers make of whole sequences: what it is given "
                    f"itself, which comes from '{min(around)}', goes by them; leave the key out"
                )

    def block_of(self, name: str) -> str | None:
        """The block that has a layer or a parameter of this name."""
        return next((path for path in ancestors_of(name) if path in self.blocks), None)

    def reader_of(self, path: str) -> str | None:
        """The reader that has a module."""
        return next((each for each in (path, *ancestors_of(path)) if each in self.regions), None)

    def block_at(self, place: CallPath) -> str | None:
        """The block in whose forward something happens."""
        return next((path for path in place if path in self.blocks), None)

    def reader_at(self, place: CallPath) -> str | None:
        """The reader in whose forward something happens."""
        return next((path for path in place if path in self.regions), None)


def is_in(path: str, around: str) -> bool:
    """Whether a path is that of a module, or of something inside of it."""
    return path == around or path.startswith(f"{around}.")


def _around(paths: list[str]) -> str:
    """The innermost module that has all of these layers."""
    found = set(ancestors_of(paths[0])).intersection(*(ancestors_of(path) for path in paths[1:]))
    return max(found, key=len)
