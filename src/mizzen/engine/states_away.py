"""`engine.offload_states` and `reload_states`: what of an engine leaves the device for a while."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.accelerator import get_accelerator
from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.offload.away import WAY_OUT, HostCopies
from mizzen.plan.parts import ReplaceValues, Store, StoreMemory

KINDS: Final = ("lp_params", "hp_params", "optim_states", "lp_grads", "contiguous_grad_buffer")
"""What can leave: parameters, masters, states and gradients, for which there are two names."""
GRADIENTS: Final = ("lp_grads", "contiguous_grad_buffer")


class StatesAway:
    """What of one engine is in host memory for a while. There is none of it on a machine without a device."""

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()
        """What has left, of `KINDS`."""
        self._copies: HostCopies | None = None
        self._returned: list[Callable[[], None]] = []
        """What stores want to be called when all of it is back."""
        self._values: list[tuple[ReplaceValues, list[Tensor]]] = []
        """Who takes values again, and their copies. Nobody holds the values: their memory is given up."""
        self._moved: list[tuple[Tensor, Tensor]] = []
        """Tensors that no store holds, with an empty one that has their device."""

    def check(self, call: str, needed: Container[str] = KINDS) -> None:
        """Refuse a call that needs something that is away."""
        found = [kind for kind in self.kinds if kind in needed]
        if found:
            raise UsageError(
                f"{call}() while {', '.join(found)} of this engine {'is' if len(found) == 1 else 'are'} away in host "
                f"memory, after offload_states(): {WAY_OUT}"
            )

    def leave(
        self,
        wanted: Sequence[str],
        stores: Sequence[Store],
        modules: Iterable[nn.Module],
        optimizer: Optimizer | None,
        *,
        pin: bool,
        non_blocking: bool,
    ) -> None:
        """Copy what is asked for to host memory and give its device memory back. What is away already stays there.

        A kind leaves as a whole or not at all: after an error, such as too little host memory, `kinds` has those that
        have left, and `come_back` brings them back.
        """
        accelerator = get_accelerator()
        if accelerator.shares_host_memory:
            warn_once("offload_states() has no effect here: training runs on the cpu, and all states are there already")
            return
        memories = [store.status.memory() for store in stores]  # a store may refuse, and nothing has left then
        if self._copies is None or (self._copies.pin != pin and not self.kinds):
            self.close()
            self._copies = HostCopies(accelerator, pin=pin)
        for lot in (lot for store in stores for lot in store.contents.lots):  # what passes through the device leaves it
            lot.rest.pass_through(is_streamed=lot.rest.place == "host" and not lot.rest.is_stepped_on_host)
        self._returned = [memory.returned for memory in memories]
        gradients = [each for memory in memories for each in memory.gradients]
        others = {  # masters are told from values while these are here
            "hp_params": [each for memory in memories for each in _apart(memory.masters, memory.values)],
            "optim_states": [] if optimizer is None else list(_states_of(optimizer)),
            "lp_grads": gradients,
            "contiguous_grad_buffer": gradients,
        }
        for kind in [kind for kind in KINDS if kind in wanted and kind not in self.kinds]:
            if kind == "lp_params":
                self._take_values(self._copies, memories, _held_by_none(modules, stores), non_blocking=non_blocking)
            else:
                self._copies.take(kind, others[kind], non_blocking=non_blocking)
            self.kinds = tuple(each for each in KINDS if each == kind or each in self.kinds)

    def _take_values(
        self, host: HostCopies, memories: Sequence[StoreMemory], rest: Sequence[Tensor], *, non_blocking: bool
    ) -> None:
        """Move the values of stores, and frozen parameters and buffers that no store holds: others may have these too.

        All that host memory may be too small for comes first.
        """
        moved = [each.data.to("cpu", copy=True) for each in rest]
        replaced = [(memory.replace_values, memory.values) for memory in memories if memory.replace_values is not None]
        given_up = [each for _, values in replaced for each in values]
        copies = iter(host.copy("values", given_up, non_blocking=non_blocking))
        emptied = [each for memory in memories if memory.replace_values is None for each in memory.values]
        host.take("shards", emptied, non_blocking=non_blocking)
        for replace_values, values in replaced:
            own = list(islice(copies, len(values)))
            replace_values(own, True)
            self._values.append((replace_values, own))
        for tensor, copy in zip(rest, moved, strict=True):
            self._moved.append((tensor, tensor.data.new_empty(0)))
            tensor.data = copy

    def come_back(self, *, non_blocking: bool) -> None:
        """Bring everything back to where it was, with its bits."""
        if self._copies is None or not self.kinds:
            return
        while self._values:
            replace_values, copies = self._values[-1]
            replace_values(self._copies.bring(copies, non_blocking=non_blocking), False)
            self._values.pop()
        self._copies.bring_back(non_blocking=non_blocking)
        for returned in self._returned:
            returned()
        for tensor, device in self._moved:
            tensor.data = tensor.data.to(device.device, copy=True)
        self._moved.clear()
        self._returned.clear()
        self.kinds = ()

    def close(self) -> None:
        """Give the host memory back."""
        if self._copies is not None:
            self._copies.close()
        self._copies = None


def kinds_of(include: Any) -> tuple[str, ...]:
    """What a call has named, an enumeration's members or their names; None is everything."""
    if include is None:
        return KINDS
    named = [str(kind) for kind in ([include] if isinstance(include, str) else include)]
    if unknown := [kind for kind in named if kind not in KINDS]:
        raise UsageError(f"offload_states(include=...): there is no '{unknown[0]}'; name some of {', '.join(KINDS)}")
    return tuple(named)


def goes_to_host(device: Any) -> bool:
    """Whether a call names host memory; none asks for nothing, and drives are refused."""
    name = str(device)
    if name == "none":
        warn_once("offload_states(device='none') moves nothing: leave the argument out for host memory")
    elif name != "cpu":
        raise UsageError(
            f"offload_states(device={name!r}): states go to host memory, 'cpu'. What is to rest on drives between all "
            "steps is said by zero_optimization.offload_optimizer"
        )
    return name == "cpu"


def _held_by_none(modules: Iterable[nn.Module], stores: Sequence[Store]) -> list[Tensor]:
    """Frozen parameters and buffers that no store holds, each once although several modules may have it."""
    held = {id(each) for store in stores for each in store.contents.held.values()}
    every = {id(each): each for module in modules for each in chain(module.parameters(), module.buffers())}
    return [
        tensor
        for number, tensor in every.items()
        if number not in held and type(tensor.data) is Tensor and not tensor.is_meta
    ]


def _apart(masters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Masters in memory of their own: those that are the values leave with these."""
    taken = {each.untyped_storage().data_ptr() for each in values}
    return [each for each in masters if each.is_meta or each.untyped_storage().data_ptr() not in taken]


def _states_of(optimizer: Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if type(value) is Tensor and not value.is_meta)
