"""Backward in two halves: the gradients of a chunk's inputs first, those of its weights later.

[Note: where the halves part]
Going back from the outputs, some nodes of the graph lead to the inputs; call these the trunk. A weight hangs on the
trunk by a branch: nodes that lead to weights alone. The first half runs the trunk, and notes what arrives at each of
its nodes that has a branch. The second half runs these nodes again for their branches only: autograd computes of a node
what somebody has asked for, so the product for the input is not computed a second time. Hooks of an activation are
called in both halves; what they make of its gradient in the first one counts.

[Note: what stays whole]
Blocks that compute their activations again would do so in both halves, and in the second for each of their nodes. So
the first backward of a chunk is a whole one, in which `Halves` watches whether its modules are called. A node that
computes all its gradients at once, whoever asks, would do so twice: compiled blocks, torch's re-entrant recomputation,
and functions written in Python that have weights. And an output that does not depend on the inputs has no trunk. Where
the graph has any of these, all backwards of the chunk stay whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

WHOLE: Final = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Nodes of torch, and of others with its re-entrant way to recompute, that compute all that is behind them at once."""


class Halves:
    """Whether backwards of a chunk may be in halves; see [Note: what stays whole]."""

    def __init__(self, module: nn.Module, *, are_wanted: bool) -> None:
        self.are_right = False
        """Not before a whole backward was watched."""
        self._module = module
        self._is_known = not are_wanted

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a whole backward: the first one shows whether modules are called in it."""
        if self._is_known:
            yield
            return
        own, called = set(self._module.modules()), set[nn.Module]()
        handle = register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            yield
        finally:
            handle.remove()
        self._is_known, self.are_right = True, own.isdisjoint(called)


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
        """Put the gradients of the inputs on them; does nothing, and says so, where the backward has to stay whole."""
        ends = {get_gradient_edge(each).node for each in self._inputs}
        roots = [get_gradient_edge(each).node for each in self._outputs]
        trunk, branches = _sort(roots, ends)
        self._leaves = {node: leaves for node in trunk if (leaves := _leaves_of(node, branches))}
        if not branches.isdisjoint(roots) or any(self._computes_at_once(node) for node in trunk):
            return False
        handles = [node.register_prehook(_note(self._arrived, node)) for node in self._leaves]
        try:
            self._run(self._inputs, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        return True

    def _computes_at_once(self, node: Node) -> bool:
        return type(node).__name__ in WHOLE or (isinstance(node, BackwardCFunction) and node in self._leaves)

    def _run(self, targets: Sequence[Tensor], *, retain_graph: bool) -> None:
        torch.autograd.backward(
            list(self._outputs), list(self._gradients), retain_graph=retain_graph, inputs=list(targets)
        )

    def weights(self) -> None:
        """Add to the gradients of the weights."""
        found = [id(leaf) for leaves in self._leaves.values() for leaf in leaves]
        if len(set(found)) < len(found):
            # A weight that is used at several places: from one of them the trunk leads to the other, which would count
            # twice. So all is computed once more.
            self._run(
                list({id(leaf): leaf for each in self._leaves.values() for leaf in each}.values()), retain_graph=False
            )
        else:
            for node, leaves in self._leaves.items():
                self._run_again(node, self._arrived.get(node, ()), leaves)
        self._arrived, self._leaves, self._outputs, self._inputs = {}, {}, (), ()

    @staticmethod
    def _run_again(node: Node, came: tuple[Tensor | None, ...], leaves: Sequence[Tensor]) -> None:
        given = [(place, each) for place, each in enumerate(came) if each is not None]
        if not given:
            return
        handle = node.register_prehook(lambda _: came)  # not what hooks of an activation make of it once more
        try:
            edges = [GradientEdge(node, place) for place, _ in given]
            torch.autograd.backward(edges, [each for _, each in given], inputs=leaves)
        finally:
            handle.remove()


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
