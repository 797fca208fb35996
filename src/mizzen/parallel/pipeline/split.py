"""Backward in two halves: the gradients of a chunk's inputs first, those of its weights later.

[Note: where the halves part]
Going back from the outputs, some nodes of the graph lead to the inputs; call these the trunk. A weight hangs on the
trunk by a branch: nodes that lead to weights alone. The first half runs the trunk, and notes what arrives at each of
its nodes that has a branch. The second half runs these nodes again for their branches only: autograd computes of a node
what somebody has asked for, so the product for the input is not computed a second time.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

WHOLE: Final = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Nodes of torch, and of others with its re-entrant way to recompute, that compute all that is behind them at once."""


class Halves:
    """Whether the halves of a chunk's backward take no more than the whole; see [Note: what is not halved]."""

    def __init__(self, *, are_worth_it: bool) -> None:
        self.are_worth_it = are_worth_it
        self._is_known = not are_worth_it

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a backward: the first one shows whether modules are called in it, to compute activations again."""
        if self._is_known:
            yield
            return
        called: list[nn.Module] = []
        handle = register_module_forward_pre_hook(lambda module, _: called.append(module))
        try:
            yield
        finally:
            handle.remove()
        self._is_known = True
        self.are_worth_it = self.are_worth_it and not called


class SplitBackward:
    """The backward of one micro-batch on one chunk. `inputs()` once, then `weights()` once."""

    def __init__(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> None:
        self._outputs = outputs
        self._gradients = gradients
        self._inputs = inputs
        self._leaves: dict[Node, list[Tensor]] = {}
        """The weights that hang on each node of the trunk."""
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        """What came to each of these nodes, by the place of its outputs."""

    def inputs(self) -> bool:
        """Put the gradients of the inputs on them; says whether it can, and does nothing otherwise."""
        ends = {get_gradient_edge(each).node for each in self._inputs}
        trunk, branches = _sort([get_gradient_edge(each).node for each in self._outputs], ends)
        if any(type(node).__name__ in WHOLE for node in trunk):
            return False
        self._leaves = {node: leaves for node in trunk if (leaves := _leaves_of(node, branches))}
        handles = [node.register_prehook(_note(self._arrived, node)) for node in self._leaves]
        try:
            self._run(self._inputs, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        return True

    def _run(self, targets: Sequence[Tensor], *, retain_graph: bool) -> None:
        torch.autograd.backward(
            list(self._outputs), list(self._gradients), retain_graph=retain_graph, inputs=list(targets)
        )

    def weights(self, *, at_once: bool = False) -> None:
        """Add to the gradients of the weights, node by node or at once, which computes what is between them again.

        At once also where a weight is used at several places: from one of them the trunk leads to the other, which
        would count twice.
        """
        found = {id(leaf): leaf for leaves in self._leaves.values() for leaf in leaves}
        if at_once or len(found) < sum(map(len, self._leaves.values())):
            if found:
                self._run(list(found.values()), retain_graph=False)
        else:
            for node, leaves in self._leaves.items():
                came = [(place, each) for place, each in enumerate(self._arrived.get(node, ())) if each is not None]
                if came:
                    edges = [GradientEdge(node, place) for place, _ in came]
                    torch.autograd.backward(edges, [each for _, each in came], inputs=leaves)
        self._arrived, self._leaves, self._outputs, self._inputs = {}, {}, (), ()


def _note(arrived: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Any:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    return hook


def _sort(roots: Iterable[Node], ends: set[Node]) -> tuple[list[Node], set[Node]]:
    """The nodes that lead to an input, from the outputs on; and those that do not."""
    order, leads = _children_first(roots), set[Node]()
    for node in order:
        if node in ends or any(child in leads for child, _ in node.next_functions):
            leads.add(node)
    return [node for node in reversed(order) if node in leads], {node for node in order if node not in leads}


def _children_first(roots: Iterable[Node]) -> list[Node]:
    found: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return found


def _leaves_of(fork: Node, branches: set[Node]) -> list[Tensor]:
    """The weights at the ends of a node's branches."""
    starts = [child for child, _ in fork.next_functions if child in branches]
    found = (getattr(node, "variable", None) for node in _children_first(starts))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]
