"""Operations and time by module, counted where torch dispatches them. Nothing of torch or of the model is replaced.

torch's own counter sees each operation, in backward too. Whose it is, is asked here: hooks of the modules say which one
is open in forward, and hooks of the autograd graph which one a part of backward belongs to. Products that torch's
registry has no formula for have one here; a user adds another with `register_flop_formula`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mizzen.accelerator import Accelerator, Timer
from mizzen.model.inputs import tensors_in

Shape = Sequence[int]


def attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products: scores, and what they weigh. A causal mask takes nothing off, as everywhere in torch's registry."""
    *batch, length, width = query
    return 2 * prod(batch) * length * key[-2] * (width + value[-1])


def attention_backward(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Five: the scores once more, and the gradients of scores, query, key and value."""
    *batch, length, width = query
    return 2 * prod(batch) * length * key[-2] * (3 * width + 2 * value[-1])


def grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Every row, or column, is in one group; where both sides are matrices, the groups cut what is summed over."""
    if len(left) == len(right) == 3:
        return 2 * prod(left) * right[-1]
    return 2 * left[-2] * left[-1] * right[-1]


def more_formulas() -> Mapping[Any, Callable[..., int]]:
    """By operator, those that this torch has."""
    wanted: Mapping[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
        "_grouped_mm": grouped_product,
        "_scaled_grouped_mm": grouped_product,
    }
    operators = torch.ops.aten
    return {getattr(operators, name): formula for name, formula in wanted.items() if name in dir(operators)}


CLAIMED: Final = "mizzen.profiler"
"""The entry in the metadata of a node of the graph that says that it has a hook."""


@dataclass(slots=True)
class ModuleCost:
    """What was counted of one module itself, without the modules inside of it; its time is with them."""

    forward: int = 0
    backward: int = 0
    """With what is computed again."""
    recomputed: int = 0
    calls: int = 0
    timer: Timer | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class Count:
    """Counts what runs inside of `open()`, any number of times. Compiled parts of the model run uncompiled there.

    open()     around a forward, a backward, or both; not nested
    read()     once, at the end: waits for the device and fills in the times
    """

    model: nn.Module
    accelerator: Accelerator
    costs: dict[str, ModuleCost] = field(default_factory=dict)
    """By the path of the module; the model as a whole has the empty one."""
    _counter: FlopCounterMode | None = None
    _booked: int = 0
    _open: list[str] = field(default_factory=list)
    """The modules whose forward runs, the innermost last."""
    _behind: str = ""
    """The module that the running part of backward belongs to."""
    _was_backward: bool = False
    """Whether backward ran when something was last booked: it ends without a word."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count what happens inside."""
        hooks = [hook for path, module in self.model.named_modules() for hook in self._follow(path, module)]
        self._booked = 0
        self._counter = FlopCounterMode(display=False, custom_mapping=dict(more_formulas()))
        try:
            # What a compiler has made of a block is one operation, or none, to whoever counts.
            with torch.compiler.set_stance("force_eager"), self._counter:
                yield
                self._book()
        finally:
            self._counter, self._behind, self._was_backward = None, "", False
            self._open.clear()
            for hook in hooks:
                hook.remove()

    def read(self) -> dict[str, ModuleCost]:
        """All costs, with the times."""
        for cost in self.costs.values():
            if cost.timer is not None:
                cost.seconds += cost.timer.read()
        return self.costs

    def _follow(self, path: str, module: nn.Module) -> Sequence[Any]:
        self.costs.setdefault(path, ModuleCost())
        return (
            module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=True),
            module.register_forward_hook(partial(self._leave, path), always_call=True),
        )

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._book()
        self._claim((args, kwargs), self._open[-1] if self._open else "")
        self._open.append(path)
        if not self._is_backward and self._open.count(path) == 1:
            cost = self.costs[path]
            cost.calls += 1
            cost.timer = cost.timer or Timer(self.accelerator)
            cost.timer.start()

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._book()
        self._claim(output, path)
        if path not in self._open:
            return
        while self._open.pop() != path:  # one that has ended by an error before it was hooked
            pass
        if (timer := self.costs[path].timer) is not None and path not in self._open and not self._is_backward:
            timer.stop()

    @property
    def _is_backward(self) -> bool:
        return self._counter is not None and self._counter.mod_tracker.is_bw

    def _book(self) -> None:
        """What was counted since the last time goes to the module that is open, or behind this part of backward."""
        if self._counter is None:
            return
        total = self._counter.get_total_flops()
        counted, self._booked = total - self._booked, total
        was_backward, self._was_backward = self._was_backward, self._is_backward
        cost = self.costs[self._open[-1] if self._open else self._behind]
        if not (was_backward or self._was_backward):
            cost.forward += counted
            return
        cost.backward += counted
        if self._open:  # a forward inside of a backward
            cost.recomputed += counted

    def _claim(self, found: Any, path: str) -> None:
        """What is new in the graph behind these tensors has come from this module."""
        nodes = [tensor.grad_fn for tensor in tensors_in(found) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            # A node without a way on belongs to a parameter, and lives as long as that.
            metadata: Any = node.metadata  # a property, which torch's own types take for a method
            if not node.next_functions or CLAIMED in metadata:
                continue
            metadata[CLAIMED] = path
            node.register_prehook(partial(self._go_behind, path))
            nodes += [before for before, _ in node.next_functions if before is not None]

    def _go_behind(self, path: str, gradients: tuple[Tensor | None, ...]) -> None:
        if self._counter is not None:
            self._book()
            self._behind = path
