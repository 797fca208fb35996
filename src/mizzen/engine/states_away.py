"""`engine.offload_states` and `reload_states`: what of an engine leaves the device for a while."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from mizzen.accelerator import get_accelerator
from mizzen.errors import UsageError
from mizzen.log import warn_once
from mizzen.offload.away import WAY_OUT, HostCopies
from mizzen.plan.parts import ReplaceValues, Store

KINDS: Final = ("lp_params", "hp_params", "optim_states", "lp_grads", "contiguous_grad_buffer")
"""What can leave: parameters, masters, states and gradients, for which there are two names."""
GRADIENTS: Final = ("lp_grads", "contiguous_grad_buffer")


class StatesAway:
    """What of one engine is in host memory for a while. There is none of it on a machine without a device."""

    def __init__(self) -> None:
        self.kinds: tuple[str, ...] = ()
        """What was asked to leave, of `KINDS`."""
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
        """Copy what is asked for to host memory and give its device memory back. What is away already stays there."""
        accelerator = get_accelerator()
        if accelerator.shares_host_memory:
            warn_once("offload_states() has no effect here: training runs on the cpu, and all states are there already")
            return
        if self._copies is None or (self._copies.pin != pin and not self.kinds):
            self.close()
            self._copies = HostCopies(accelerator, pin=pin)
        take = partial(self._copies.take, non_blocking=non_blocking)
        before, self.kinds = self.kinds, tuple(kind for kind in KINDS if kind in self.kinds or kind in wanted)
        new = [kind for kind in self.kinds if kind not in before]
        for lot in (lot for store in stores for lot in store.contents.lots):  # what passes through the device leaves it
            lot.rest.pass_through(is_streamed=lot.rest.place == "host" and not lot.rest.is_stepped_on_host)
        self._returned.clear()
        for number, store in enumerate(stores):
            memory = store.status.memory()
            self._returned.append(memory.returned)
            masters = _apart(memory.masters, memory.values)
            if "lp_params" in new and memory.replace_values is not None:
                copies = self._copies.copy(f"values {number}", memory.values, non_blocking=non_blocking)
                memory.replace_values(copies, True)
                self._values.append((memory.replace_values, copies))
            elif "lp_params" in new:
                take(f"values {number}", memory.values)
            if "hp_params" in new:
                take(f"masters {number}", masters)
            if not set(GRADIENTS).isdisjoint(new):
                take(f"gradients {number}", memory.gradients)
        if "optim_states" in new and optimizer is not None:
            take("states", list(_states_of(optimizer)))
        if "lp_params" in new:
            self._move_rest(modules, stores)

    def _move_rest(self, modules: Iterable[nn.Module], stores: Sequence[Store]) -> None:
        """Move frozen parameters and buffers that no store holds; others may have them too, and keep them."""
        trained = {id(each) for store in stores for each in store.contents.held.values()}
        for module in modules:
            for tensor in chain(module.parameters(), module.buffers()):
                if id(tensor) not in trained and type(tensor.data) is Tensor and not tensor.is_meta:
                    self._moved.append((tensor, tensor.data.new_empty(0)))
                    tensor.data = tensor.data.to("cpu", copy=True)

    def come_back(self, *, non_blocking: bool) -> None:
        """Bring everything back to where it was, with its bits."""
        if self._copies is None or not self.kinds:
            return
        for replace_values, copies in self._values:
            replace_values(self._copies.bring(copies, non_blocking=non_blocking), False)
        self._copies.bring_back(non_blocking=non_blocking)
        for returned in self._returned:
            returned()
        for tensor, device in self._moved:
            tensor.data = tensor.data.to(device.device, copy=True)
        self._moved.clear()
        self._values.clear()
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


def _apart(masters: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Masters in memory of their own: those that are the values leave with these."""
    taken = {each.untyped_storage().data_ptr() for each in values}
    return [each for each in masters if each.is_meta or each.untyped_storage().data_ptr() not in taken]


def _states_of(optimizer: Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if type(value) is Tensor and not value.is_meta)
