"""A model that was not written for pipelines, cut between its repeated blocks.

On a stage the model keeps its own forward. What other stages have is replaced by modules without parameters, so that
every name stays: a block of another stage passes its input on, and what comes before the blocks (embeddings) gives NaN.
The stand-in just before the stage's own blocks gives what came from the stage before instead; the one just after them
ends the forward. Whatever the model makes of its inputs beside that (positions, rotary angles, masks), each stage makes
itself. A number that should have come from another stage and did not is a NaN or an error, never a zero.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from mizzen.errors import PlanError, UsageError
from mizzen.model.blocks import Blocks
from mizzen.model.sketch import Sketch, ancestors_of, parent_of
from mizzen.model.tree import Elsewhere, InnerForward, children_of, with_children
from mizzen.parallel.pipeline.partition import partition
from mizzen.wording import and_more

LATER: Final = re.compile(
    r"(^|[._])(final|ln_f|lnf|norm_f|norm|head|project_out|pooler|score|classifier|cls|qa_outputs)"
)
"""Parts of names that say of a module defined before the blocks that it comes after them."""
EARLIER: Final = re.compile(r"embed|wte|wpe|project_in")
"""Parts of names that say of a module that it comes before the blocks, whatever else its name says."""
PLAIN: Final = (str, int, float, bool)
PROFILE: Final = "profile"
"""The method of partition for which blocks are measured."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """The blocks of a model, in their order, and what is beside them: largest modules that hold none of them."""

    container: str
    paths: tuple[str, ...]
    before: tuple[str, ...]
    """What is computed before the blocks."""
    after: tuple[str, ...]
    """What is computed after them."""

    @classmethod
    def find(cls, sketch: Sketch) -> "BlockList":
        """The blocks of a model, or a refusal that says why it cannot be cut."""
        kind = sketch.modules[0].kind
        lists: dict[str, int] = {}
        for unit in Blocks.of(sketch).units:
            lists[parent_of(unit.path)] = lists.get(parent_of(unit.path), 0) + 1
        found = [path for path, count in lists.items() if count > 1]
        if len(found) > 1:
            raise PlanError(
                f"pipeline_parallel_size: {kind} has several lists of blocks ({and_more(found)}), as encoder-decoder "
                "models have; only a model with one such list is cut: use other kinds of parallelism, or write it as a "
                "mizzen.pipe.PipelineModule"
            )
        if not found:
            raise PlanError(
                f"pipeline_parallel_size: no module of {kind} repeats in a list, so there is nothing to cut between: "
                "write the model as a mizzen.pipe.PipelineModule"
            )
        (container,) = found
        paths = tuple(each.path for each in sketch.modules if each.path and parent_of(each.path) == container)
        around = {"", *ancestors_of(f"{container}.0")}
        beside = [each.path for each in sketch.modules if parent_of(each.path) in around and each.path not in around]
        holding = {path for p in sketch.parameters for name in p.names for path in (name, *ancestors_of(name))}
        outside = [path for path in beside if path in holding and path not in paths]
        places = [each.path for each in sketch.modules]
        is_early = {
            path: (places.index(path) < places.index(container) and not LATER.search(path))
            or bool(EARLIER.search(path))
            for path in outside
        }
        before = tuple(path for path in outside if is_early[path] and not _is_head(path, sketch))
        return cls(container, paths, before, tuple(path for path in outside if path not in before))

    def cut(self, sketch: Sketch, parts: int, method: str) -> list[int]:
        """Where each of so many chunks begins, by a method of partition; the last chunk also has the head."""
        if parts > len(self.paths):
            raise PlanError(
                f"pipeline_parallel_size: {len(self.paths)} blocks ({self.container}) do not make {parts} chunks: "
                "use fewer stages, or fewer pipeline.virtual_stages"
            )
        if method.lower().startswith("type:"):
            kinds = {each.path: each.kind for each in sketch.modules}
            return list(partition([kinds[path] for path in self.paths], method, parts))
        measured = self.seconds(sketch) if method.lower() == PROFILE else ()
        if measured or method.lower() == "uniform":
            return list(partition(measured or [0.0] * len(self.paths), method, parts))
        weights = [_weight(sketch, path) for path in self.paths]
        weights[-1] += sum(_weight(sketch, path) for path in self.after)
        is_default = method.lower() in ("best", PROFILE)
        return list(partition(weights, "parameters" if is_default else method, parts))

    def seconds(self, sketch: Sketch) -> tuple[float, ...]:
        """What each block takes, with what comes before the first and after the last; nothing if none was measured."""
        measured = dict(sketch.seconds)
        found = [measured.get(path) for path in self.paths]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return ()
        known[0] += sum(measured.get(path, 0.0) for path in self.before)
        known[-1] += sum(measured.get(path, 0.0) for path in self.after)
        return tuple(known)

    def names(self, sketch: Sketch, chunks: Sequence[range]) -> tuple[frozenset[str], ...]:
        """The parameters of each chunk, by the first of their names."""
        owners = {self.paths[number]: chunk for chunk, numbers in enumerate(chunks) for number in numbers}
        owners |= dict.fromkeys(self.before, 0) | dict.fromkeys(self.after, len(chunks) - 1)
        found: list[set[str]] = [set() for _ in chunks]
        for parameter in sketch.parameters:
            for name in parameter.names:
                owner = next((owners[path] for path in ancestors_of(name) if path in owners), None)
                if owner is None:
                    raise PlanError(
                        f"'{name}' belongs to a module that holds the blocks, so it is not known which stage needs it: "
                        "put it into a module of its own, or write the model as a mizzen.pipe.PipelineModule"
                    )
                found[owner].add(parameter.name)
        return tuple(map(frozenset, found))


def _is_head(path: str, sketch: Sketch) -> bool:
    return sketch.head is not None and sketch.head.path == path


def _weight(sketch: Sketch, path: str) -> int:
    inside = (p for p in sketch.parameters if any(name.startswith(f"{path}.") for name in p.names))
    return sum(p.numel for p in inside)


class StageEnd(Exception):  # noqa: N818  it is no error
    """Ends the forward of a stage, with what goes to the next one."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a stage of a pipeline is through")
        self.hidden = hidden


@dataclass(slots=True, eq=False)
class Gate:
    """What the stand-ins of one chunk share during a call."""

    received: Tensor | None = None
    """What came from the stage before; None on the first."""
    has_entered: bool = False
    """Whether the chunk's own blocks are next, or have been."""


class BlockStandIn(Elsewhere):
    """In the place of a block that is elsewhere. It has what its users may look at, and no parameters."""

    def __init__(self, block: nn.Module, gate: Gate, role: str = "") -> None:
        super().__init__()
        for name, value in vars(block).items():
            if isinstance(value, PLAIN) and not name.startswith("_"):
                setattr(self, name, value)
        self.gate = gate
        self.role = role
        """`enter` just before the chunk's own blocks, `leave` just after them."""
        self.in_tuple: bool = block.in_tuple if isinstance(block, BlockStandIn) else _gives_tuple(block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the hidden states on."""
        hidden = args[0] if args else next(iter(kwargs.values()))
        if self.role == "leave":
            raise StageEnd(hidden)
        if self.role == "enter":
            hidden, self.gate.has_entered = self.gate.received, True
        return (hidden,) if self.in_tuple else hidden


def _gives_tuple(block: nn.Module) -> bool:
    said = str(inspect.signature(type(block).forward).return_annotation).lower()
    return "tuple[" in said and not said.startswith(("torch.tensor", "<class 'torch.tensor"))


class StandIn(Elsewhere):
    """In the place of something beside the blocks that is on the first stage, or on the last."""

    def __init__(self, path: str, gate: Gate, *, is_before: bool) -> None:
        super().__init__()
        self.path = path
        self.gate = gate
        self.is_before = is_before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A NaN of the right shape before the blocks; there is nothing to give after them."""
        received = self.gate.received
        if not self.is_before or self.gate.has_entered or received is None:
            there, here = ("before", "after") if self.is_before else ("after", "before")
            raise UsageError(
                f"'{self.path}' was taken for something that comes {there} the blocks, and this model uses it {here} "
                "them: write the model as a mizzen.pipe.PipelineModule"
            )
        return received.new_full((), torch.nan).expand_as(received)


class StageForward(InnerForward):
    """The forward of a model on one chunk: between what came and what goes on."""

    def __init__(self, forward: Any, gate: Gate) -> None:
        super().__init__(forward)
        self.gate = gate
        self.is_checked = False

    def takes(self, name: str) -> bool:
        """Whether the model's own forward has an argument of this name."""
        return name in inspect.signature(self.forward).parameters

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], received: Tensor | None) -> Any:
        """What goes to the next stage, or on the last one what the model returns."""
        self.gate.received, self.gate.has_entered = received, False
        try:
            return self.forward(*args, **kwargs)
        except StageEnd as end:
            self._check(end.hidden)
            return end.hidden
        finally:
            self.gate.received = None

    def _check(self, hidden: Tensor) -> None:
        """Look once whether a stand-in's NaN has found a way around the blocks."""
        if self.is_checked or self.gate.received is None or not bool(self.gate.received.isfinite().all()):
            return
        self.is_checked = True
        if not bool(hidden.isfinite().all()):
            raise UsageError(
                "the blocks of this model use something beside their input that was computed before the first of them "
                "from parameters, and that does not go from stage to stage: write it as a mizzen.pipe.PipelineModule"
            )


def leave(model: nn.Module, blocks: BlockList, chunks: Sequence[range], *, is_first: bool, is_last: bool) -> None:
    """Leave of a model, in place, what the chunks of one stage have."""
    gate = Gate()
    own = {number for numbers in chunks for number in numbers}
    replaced: dict[str, nn.Module] = {
        path: BlockStandIn(model.get_submodule(path), gate) for at, path in enumerate(blocks.paths) if at not in own
    }
    replaced |= {path: StandIn(path, gate, is_before=True) for path in blocks.before if not is_first}
    replaced |= {path: StandIn(path, gate, is_before=False) for path in blocks.after if not is_last}
    for path, module in replaced.items():
        model.set_submodule(path, module)


def chunk_of(model: nn.Module, blocks: BlockList, numbers: range, *, is_alone: bool) -> nn.Module:
    """One chunk of what a stage has of a model: the model itself where it has one chunk, else a tree of its own."""
    gate, last = Gate(), len(blocks.paths)
    is_first, is_last = numbers.start == 0, numbers.stop == last
    roles = {numbers.start - 1: "enter", numbers.stop: "leave"}
    replaced: dict[str, nn.Module] = {
        path: BlockStandIn(model.get_submodule(path), gate, roles.get(number, ""))
        for number, path in enumerate(blocks.paths)
        if number not in numbers
    }
    replaced |= {path: StandIn(path, gate, is_before=True) for path in blocks.before if not is_first}
    replaced |= {path: StandIn(path, gate, is_before=False) for path in blocks.after if not is_last}
    found = model if is_alone else _copied(model, "", {each for path in replaced for each in ancestors_of(path)})
    for path, module in replaced.items():
        found.set_submodule(path, module)
    vars(found)["forward"] = StageForward(found.forward, gate)
    return found


def _copied(module: nn.Module, path: str, around: Iterable[str]) -> nn.Module:
    """A tree of its own down to what is replaced in it, with everything else shared."""
    children = children_of(module)
    for name, child in children.items():
        each = f"{path}.{name}" if path else name
        if child is not None and each in around:
            children[name] = _copied(child, each, around)
    return with_children(module, children)
