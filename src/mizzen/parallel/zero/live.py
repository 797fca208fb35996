"""A bucket with its tensors on this rank. What is done with them is the business of `gradients.py` and `store.py`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from mizzen.offload.away import check_here
from mizzen.offload.rest import OnDevice
from mizzen.parallel.zero.slots import Bucket
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.plan.parts import Rest


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that the optimizer steps, and its place in the owned chunk."""

    tensor: Tensor
    """A part of the master itself, or a wider copy of one that is empty between steps."""
    start: int
    stop: int
    shape: tuple[int, ...]

    def place(self, owned: Tensor) -> Tensor:
        """The range of this tensor in a tensor that holds the owned chunk."""
        return owned[self.start : self.stop].view(self.shape)


@dataclass(slots=True, eq=False)
class LiveBucket:
    """Parameters that travel together, and this rank's share of what belongs to them: a `plan.parts.Lot`."""

    plan: Bucket
    group: int
    """The optimizer group that trains them."""
    parameters: tuple[nn.Parameter, ...]
    """In the order of the slots."""
    values: Tensor
    """The values of all of them, padding included."""
    start: int
    """Where the owned chunk begins."""
    master: Tensor
    """The owned chunk as the optimizer left it: a part of `values` where these are as wide."""
    targets: tuple[Target, ...]
    """What the optimizer steps: the owned chunk, or the parameters in it one by one where it needs them whole."""
    accumulation: torch.dtype
    """In which gradients add up."""
    is_shared: bool
    """Whether other ranks own chunks too."""
    stock: Stock
    """Where the memory of gradients comes from."""
    rest: Rest = field(default_factory=OnDevice)
    """Where the master and the optimizer's states rest."""
    cuts: list[int] = field(init=False)
    """The sizes of a gap, a slot, a gap, and so on to the last gap, of which most have no elements."""
    gaps: list[int] = field(init=False)
    """Which of them are gaps that have."""
    adds_in_place: bool = field(init=False)
    """Whether autograd can add gradients to their places itself."""
    sums: Sums = field(init=False)
    """Over the ranks, for the owned chunk, where it is shared."""
    whole: Tensor | None = None
    """The gradient of all of the bucket as it gathers on this rank, from the first that comes."""
    views: list[Tensor] = field(default_factory=list)
    """The place of each parameter in it."""
    empty: set[int] = field(default_factory=set)
    """The slots to which nothing has come yet."""
    shown: set[int] = field(default_factory=set)
    """The slots whose place is at present the `grad` of its parameter."""
    seen: int = 0
    """The version of `whole` when it was complete: another one means that somebody has written to it."""
    finite: Tensor | None = None
    """For each slot, whether this rank's own gradient was finite before it was summed; None before it was."""
    missing: set[int] = field(default_factory=set)
    """The slots whose gradient has not come yet in this backward."""
    has_left: bool = False
    is_complete: bool = False
    """Whether its gradient is summed and nothing more comes before the step."""

    def __post_init__(self) -> None:
        edges = [0, *(edge for slot in self.plan.slots for edge in (slot.start, slot.stop)), self.plan.numel]
        self.cuts = [high - low for low, high in pairwise(edges)]
        self.gaps = [number for number, size in enumerate(self.cuts) if size and number % 2 == 0]
        self.adds_in_place = self.values.dtype == self.accumulation and not self.plan.is_sparse
        self.sums = Sums(self.stock, self.master.numel(), self.accumulation)

    @property
    def is_stepped_apart(self) -> bool:
        """Whether the optimizer steps copies of the masters, wider ones or such as were read from files."""
        if not self.targets:
            return False
        return self.master.is_meta or self.targets[0].tensor.dtype != self.master.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the optimizer steps."""
        return tuple(target.tensor for target in self.targets)

    def load(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        self.keep_writes()
        if not self.targets:
            return
        dtype, gradient = self.targets[0].tensor.dtype, self.rest.gradient(self.gradient)
        gradient = gradient.to(dtype) if factor == 1 else gradient.to(dtype).mul_(factor)
        values = self.rest.values(self.master).to(dtype)
        for target in self.targets:
            target.tensor.data = target.place(values)
            target.tensor.grad = target.place(gradient)

    def write_back(self) -> None:
        """Bring what was stepped to the master, unless it is the master itself, or at rest."""
        places = ((target.place(self.master), target.tensor) for target in self.targets if target.tensor.numel())
        apart = [(place, tensor) for place, tensor in places if place.data_ptr() != tensor.data_ptr()]
        self.rest.put(apart)

    def send(self) -> None:
        """Start to bring what was stepped to the values."""
        mine = self.mine(self.values)
        if not self.targets:
            return
        self.rest.send(mine, self.master, [(target.place(mine), target.tensor) for target in self.targets])

    def unload(self) -> None:
        """Let go of what only a step needs."""
        for target in self.targets:
            target.tensor.grad = None
            target.tensor.data = target.tensor.new_empty(0) if self.is_stepped_apart else target.place(self.master)

    def keep_writes(self) -> None:
        """Let a master that lies apart have what somebody has written to the parameters."""
        self.rest.keep_writes(self.mine(self.values), self.master)

    def complete(self) -> None:
        """The gradient is summed, and nothing more comes before the step."""
        self.is_complete = True
        if self.targets:
            self.rest.leave(lambda: self.gradient)
            self.rest.step_in_backward()

    @property
    def gradient(self) -> Tensor:
        """The gradient of the owned chunk, complete after `reduce`; zeros where none has come."""
        return self.sums.read() if self.is_shared else self.filled()

    def put(self, gradients: Mapping[int, Tensor], factor: float = 1.0) -> None:
        """Add gradients to their places, and multiply all that is in the bucket by a factor."""
        whole = self.open() if self.whole is None else self.whole
        check_here(whole, "the gradient of this step so far")
        is_first = factor == 1 and gradients.keys() <= self.empty
        if not is_first and len(self.empty) < len(self.views):
            gradients = self._add(gradients, factor)
        self._fill(gradients, factor)
        self.empty.difference_update(gradients)

    def _add(self, gradients: Mapping[int, Tensor], factor: float) -> Mapping[int, Tensor]:
        """Add gradients to those that are there, and multiply these; returns the others."""
        first = self.empty & gradients.keys()
        for position in gradients.keys() - first:
            self.views[position].add_(gradients[position])
        for position in set(range(len(self.views))) - self.empty if factor != 1 else ():
            self.views[position].mul_(factor)
        return {position: gradients[position] for position in first}

    def _fill(self, gradients: Mapping[int, Tensor], factor: float) -> None:
        places = [self.views[position] for position in gradients]
        values = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients.values()]
        if factor == 1 and places:
            copy_all(places, values)
            return
        for place, gradient in zip(places, values, strict=True):
            torch.mul(gradient, factor, out=place)

    def filled(self) -> Tensor:
        """The gradient of all of the bucket on this rank, with zeros where none has come."""
        whole = self.open() if self.whole is None else self.whole
        check_here(whole, "the gradient of this step so far")
        for position in self.empty:
            self.views[position].zero_()
        self.empty.clear()
        return whole

    def open(self) -> Tensor:
        """Make room for gradients, of which none has come to its place yet."""
        self.whole = self.stock.take(self.plan.numel, self.accumulation)
        parts = self.whole.split_with_sizes(self.cuts)
        for number in self.gaps:
            parts[number].zero_()
        self.views = [part.view(slot.shape) for part, slot in zip(parts[1::2], self.plan.slots, strict=True)]
        self.empty = set(range(len(self.parameters)))
        return self.whole

    def hand_over(self) -> Tensor:
        """The gradient of all of the bucket, which is no longer kept here."""
        whole = self.filled()
        self.whole = None
        self.views, self.empty, self.shown = [], set(), set()
        return whole

    def forget(self) -> None:
        """No gradient has ever come."""
        if self.whole is not None:
            self.stock.give(self.whole)
        self.sums.forget()
        self.rest.forget()
        self.whole = self.finite = None
        self.is_complete = False
        self.views, self.empty, self.shown = [], set(), set()

    def places(self, flat: Tensor) -> list[Tensor]:
        """The place of each parameter in a tensor that holds the whole bucket."""
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.plan.slots]

    def mine(self, flat: Tensor) -> Tensor:
        """The owned chunk of a tensor that holds the whole bucket."""
        return flat[self.start : self.start + self.master.numel()]

    def owned_slots(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(slot, begin, end) for what lies between two places of the owned chunk, counted from its begin."""
        for number, slot in enumerate(self.plan.slots):
            low, high = max(slot.start - self.start, start), min(slot.stop - self.start, stop)
            is_here = low < high or start <= slot.start - self.start == slot.stop - self.start <= stop
            if is_here:  # a slot without elements still has a name
                yield number, low, high


def show(bucket: LiveBucket, positions: Iterable[int]) -> None:
    """Let the `grad` of parameters be their places."""
    for position in positions:
        bucket.parameters[position].grad = bucket.views[position]
    bucket.shown.update(positions)


def copy_all(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors of one dtype to their places, on a GPU in few kernels."""
    torch._foreach_copy_(places, tensors)


def alone(view: Tensor) -> Tensor:
    """The memory of a view under a storage that ends where the view ends: saving a tensor writes all of its storage."""
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda", "xpu"):
        return view  # without memory of its own, as in a simulation, or without addresses to share
    return from_dlpack(view)


def stepped_of(master: Tensor, dtype: torch.dtype) -> Tensor:
    """A master itself, or a wider copy of it; one that is not in memory has but its shape, until it is unloaded."""
    return torch.zeros(1, dtype=dtype).expand(master.shape).data if master.is_meta else master.to(dtype).data
