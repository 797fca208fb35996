"""Where the activations between cut layers can be cut along the sequence: a pure function of what was seen of a model.

Inside of a block, norms, dropout and what is added up work on each token by itself, so that a rank may have some of the
tokens. Attention and the layers beside it work on all of them: the modules that have these layers (the readers) are
given whole sequences, and the layers at their end sum up into parts. Blocks that hand what they give straight on to
the next are a stack; whatever else reads it gets whole sequences. A model that does something else is refused, with
the module that does it.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

from mizzen.errors import PlanError
from mizzen.model.blocks import Blocks
from mizzen.model.flow import Argument, CallPath, Flow, ModuleCall, TracedOperation, innermost
from mizzen.model.sketch import Sketch, parent_of
from mizzen.parallel.tensor.cuts import LayerCut, ModuleInput, ParameterCut, SequenceCut
from mizzen.parallel.tensor.sequence_readers import KEY, SequenceReaders, is_in


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
        self.named = sketch.by_name()
        rows = [cut.path for cut in layers.values() if cut.style == "row"]
        order = {path: at for at, path in enumerate(self.flow.calls)}
        units = [unit.path for unit in Blocks.of(sketch).units if any(is_in(row, unit.path) for row in rows)]
        self.blocks = sorted(units, key=lambda path: order.get(path, -1))
        """In the order of their calls."""
        if not self.blocks:
            raise PlanError(f"{KEY}: no module of this model repeats that has layers which are cut; leave it out")
        self.inputs = [ModuleInput(path, self._argument(path, "a block")) for path in self.blocks]
        self.readers = SequenceReaders(self.flow, layers, self.blocks)

    def decide(self) -> tuple[SequenceCut, dict[str, ParameterCut]]:
        is_random = self._check_operations()
        blocks = {entry.path: entry for entry in self.inputs}
        stacks = tuple(tuple(blocks[path] for path in stack) for stack in self._stacks())
        self.readers.check_outputs()
        summed = list(self._met_by_parts())
        self._check_parameters(set(summed))
        entries = tuple(
            ModuleInput(path, self._argument(path, "a module with layers that are cut"))
            for path in self.readers.regions
        )
        rows = frozenset(path for path in self.readers.emitting if path in self.cuts)
        return SequenceCut(stacks, entries, rows, is_random), {name: ParameterCut(name, None) for name in summed}

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

    # What happens where

    def _stacks(self) -> list[list[str]]:
        """The blocks in runs, of which each gives the next one what nobody else reads.

        Refuse what comes into a block beside the activation that it is given, and what leaves it but is not returned.
        """
        read_by: dict[str, set[str | None]] = {}
        for use in (use for use in self.flow.uses if not use.parameter):
            made, used = self.readers.block_at(use.made), self.readers.block_at(use.used)
            if made == used:
                continue
            if made is not None and made not in use.passed:
                raise PlanError(
                    f"{KEY}: {innermost(use.used)} reads what is made in {innermost(use.made)}, where each rank has a "
                    f"part, and '{made}' does not return it; leave the key out"
                )
            is_given = used is not None and used in use.passed
            if made is not None:
                read_by.setdefault(made, set()).add(used if is_given else None)
            reader = self.readers.reader_at(use.used)
            if used is not None and not is_given and (reader is None or reader in use.passed):
                raise PlanError(
                    f"{KEY}: {innermost(use.used)} in the block '{used}' works with parts of sequences, and reads what "
                    f"is made outside, in {innermost(use.made)}, beside what the block is given; leave the key out"
                )
        stacks: list[list[str]] = []
        for block in self.blocks:
            if stacks and read_by.get(stacks[-1][-1]) == {block}:
                stacks[-1].append(block)
            else:
                stacks.append([block])
        return stacks

    def _check_operations(self) -> bool:
        """Refuse what looks at several tokens where each rank has some of them; whether dropout is applied there.

        Random numbers differ by rank there, and have to be alike for whole sequences: there may not be both.
        """
        for each in self.flow.operations:
            if each.mixes and self._works_on(each) == "parts":
                raise PlanError(
                    f"{KEY}: each rank has some of the tokens in '{self.readers.block_at(each.place)}', and there "
                    f"they are not worked on one by one: {each.name} in {innermost(each.place)}; leave the key out"
                )
        drawn = [(self._works_on(each), innermost(each.place)) for each in self.flow.operations if each.draws]
        parts = [module for what, module in drawn if what == "parts"]
        whole = [module for what, module in drawn if what == "whole sequences"]
        if parts and whole:
            raise PlanError(
                f"{KEY}: dropout in {whole[0]} is applied to whole sequences, where ranks have to draw the same, and "
                f"in {parts[0]} to parts of them, where each draws for itself; set one of the two to 0, or leave the "
                "key out"
            )
        return bool(parts)

    def _works_on(self, operation: TracedOperation) -> Literal["outside", "features", "whole sequences", "parts"]:
        """What of a block an operation works on: all tokens and some features, all of both, or some tokens."""
        block, reader = self.readers.block_at(operation.place), self.readers.reader_at(operation.place)
        if block is None:
            return "outside"
        if operation.reads & self._columns:
            return "features"
        is_behind = not operation.reads.isdisjoint(self.readers.ends(block, reader))
        return "parts" if reader is None or is_behind else "whole sequences"

    @cached_property
    def _columns(self) -> frozenset[str]:
        """The layers of regions that give a part of the features."""
        return frozenset(path for path, cut in self.cuts.items() if cut.style.startswith("column") and not cut.gathers)

    # Parameters

    def _met_by_parts(self) -> Iterator[str]:
        """Parameters in blocks that are whole and meet parts of sequences: norms, biases of rows."""
        for name in self.named:
            if self.readers.block_of(name) is not None and name not in self.parameters and self._meets_parts(name):
                yield name

    def _meets_parts(self, name: str) -> bool:
        path = parent_of(name)
        if path in self.cuts:
            return self.cuts[path].style == "row" and not name.endswith(".weight")
        reader = self.readers.reader_of(path)
        if reader is None or path in self.readers.emitting:
            return True
        return path not in self.readers.layers and not self._is_before(name, reader)

    def _is_before(self, name: str, reader: str) -> bool:
        """Whether a parameter of a reader meets what its first layers read, or those beside them that stay whole."""
        first = self.named[name].name  # by which the flow knows it, whatever else it is called
        sources = [cut.path for cut in self.cuts.values() if cut.region in self.readers.regions[reader]]
        sources += [path for path in self.readers.layers if is_in(path, reader) and path not in self.readers.emitting]
        return any(first in self.readers.layers[path].reads for path in sources if path in self.readers.layers)

    def _check_parameters(self, summed: set[str]) -> None:
        """Refuse a parameter that meets parts of sequences in one place and whole ones in another.

        In one place the gradients of the ranks are to be summed, and in the other each rank has all of it.
        """
        places: dict[str, list[CallPath]] = {}
        for use in self.flow.uses:
            places.setdefault(use.parameter, []).append(use.used)
        for parameter in self.sketch.parameters:
            used = [place for name in parameter.names for place in places.get(name, ())]
            parts = [
                innermost(place) for place in used if self.readers.block_at(place) and not self.readers.reader_at(place)
            ]
            if summed.intersection(parameter.names):
                whole = [innermost(place) for place in used if not self.readers.block_at(place)]
                whole += [f"'{parent_of(name)}'" for name in parameter.names if self._is_left_whole(name, summed)]
                if whole:
                    raise PlanError(
                        f"{KEY}: '{parameter.name}' is used in blocks, where each rank has some of the tokens, and in "
                        f"{whole[0]}, where each has all of them; give this one a parameter of its own, or leave the "
                        "key out"
                    )
            elif parts and not any(self._is_cut_otherwise(name) for name in parameter.names):
                raise PlanError(
                    f"{KEY}: '{parameter.name}' is used in {parts[0]}, where each rank has some of the tokens, but "
                    "belongs where each has all of them; put it into the block that uses it, or leave the key out"
                )

    def _is_left_whole(self, name: str, summed: set[str]) -> bool:
        """Whether a name stands in a block and, by this name, gradients of the parameter would not be summed."""
        known = self.parameters.get(name)
        is_summed = name in summed or (known is not None and known.dim is None)
        return self.readers.block_of(name) is not None and not is_summed

    def _is_cut_otherwise(self, name: str) -> bool:
        cut = self.cuts.get(parent_of(name))
        return name in self.parameters or (cut is not None and cut.style == "row")
