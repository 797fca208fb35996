"""The step with ZenFlow: important columns on the device in every step, everything else on the host every few steps.

A column is what one input of a matrix is multiplied with; the gradients of important ones are the largest, in sum.
Vectors are always important. What happens in a step follows from the section `zenflow` and from counts that are saved
with the optimizer's states, so a run that is resumed goes on as it would have. Gradients wait as they are: a step that
is skipped adds nothing, and columns are chosen anew only when none wait.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from mizzen.comm import collectives, groups
from mizzen.config.zero import ZenFlowConfig
from mizzen.engine.offloaded_step import LotFactors, OffloadedStep
from mizzen.log import warn_once
from mizzen.model.box import Box
from mizzen.offload.zenflow import CHOSEN, IMPORTANT, LATE_STATES, WAITED, LateUpdates, OnHostLate
from mizzen.optim.rules import stand_ins
from mizzen.plan.parts import Lot, Store

LONGEST: Final = 32
"""Steps that gradients wait at most where the interval is found by itself."""
UNKNOWN: Final = 1 << 62
"""The steps in an epoch of a rank that does not know them: more than any other has."""


@dataclass(frozen=True, slots=True)
class LateLot:
    """A lot whose important columns are on the device, in one step."""

    lot: Lot
    rest: OnHostLate
    tensor: Tensor
    """What stands for it in the optimizer: here its masters in host memory, with the gradient."""
    factor: float
    """What gradients on the device are multiplied with."""
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a run stands before a step, as its states say."""

    taken: int
    waited: int
    chosen: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Counts":
        """Read the states of any lot: all have the same."""
        return cls(int(state["step"]), int(state[WAITED]), int(state[CHOSEN]))

    def is_warm_up(self, section: ZenFlowConfig) -> bool:
        """Whether every element is still updated in every step."""
        return self.taken < section.full_warm_up_rounds

    def selects(self, section: ZenFlowConfig, interval: int | None) -> bool:
        """Whether the next step chooses columns, given the steps after which it is to do so again; None is never."""
        if self.is_warm_up(section) or self.waited:
            return False
        return not self.chosen or (interval is not None and self.chosen >= interval)


class ZenFlowStep(OffloadedStep):
    """Steps all lots of an engine, those in host memory in two parts."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        section: ZenFlowConfig,
        stores: Sequence[Store],
        epoch_steps: Callable[[], int | None],
        threads: int,
        cores: Sequence[int] = (),
    ) -> None:
        super().__init__(optimizer, device, threads=threads, cores=cores)
        self.section = section
        self.stores = tuple(stores)
        self.epoch_steps = epoch_steps
        """Optimizer steps in an epoch of this rank, if that is known."""
        self._hook = optimizer.register_state_dict_pre_hook(lambda _: self._bring_home())

    def close(self) -> None:
        """End the thread, and let the optimizer, which may be a client's, give its state dict by itself again."""
        super().close()
        self._hook.remove()

    def _bring_home(self) -> None:
        for lot in (lot for store in self.stores for lot in store.contents.lots):
            if isinstance(lot.rest, OnHostLate):
                lot.rest.bring_home()

    def _step_all(self, lots: LotFactors, factor: float) -> None:
        """Step what is important, and what rests on the device; add up the other gradients, or step with them."""
        start = time.perf_counter()
        for lot, _ in lots:
            lot.keep_writes()
            lot.rest.trust_values()
        late, here = list[LateLot](), list[tuple[Lot, float]]()
        for lot, rest in lots:
            if isinstance(lot.rest, OnHostLate):
                late += [self._loaded(lot, lot.rest, rest, factor)] if lot.tensors else []
            else:
                here.append((lot, rest))
        waits = self._step_late(late, factor) if late else 0
        self._step_on_device(here, factor)
        for lot, _ in lots:
            lot.rest.wait()
        self._measures = {"offload_ms": (time.perf_counter() - start) * 1e3, "zenflow_waiting_steps": float(waits)}

    def _loaded(self, lot: Lot, rest: OnHostLate, own_factor: float, factor: float) -> LateLot:
        """A lot with its gradient and states; the model gets what an update beside training has made by now."""
        rest.late.finish(rest.readers)
        lot.load(own_factor)
        (tensor,) = lot.tensors
        states = self.optimizer.state
        if not states[tensor]:
            states[tensor] = self._new_states(tensor)
        rest.rest_states(lot.tensors, states)
        states[tensor]["step"] = states[tensor]["step"].cpu()
        if rest.late.shown is not None:
            lot.send()
        return LateLot(lot, rest, tensor, own_factor * factor, states[tensor])

    def _new_states(self, tensor: Tensor) -> dict[str, Any]:
        """The states of an optimizer that has not stepped: those of a step with zeros, which changes none of them."""
        zeros = torch.zeros_like(tensor)
        zeros.grad = torch.zeros_like(tensor)
        view = stand_ins(self.optimizer, {tensor: (zeros, {})})
        view.step()
        state: dict[str, Any] = view.state[zeros]
        state["step"].zero_()
        return state

    def _step_late(self, late: Sequence[LateLot], factor: float) -> int:
        """Step lots in two parts; returns how many steps' gradients wait now."""
        section, counts = self.section, Counts.of(late[0].state)
        if not counts.waited and counts.selects(section, self._select_interval(counts)):
            self._select()
            counts = replace(counts, chosen=0)
        for each in late:
            found, taken = each.rest.bring_important(each.tensor, self.optimizer.state), each.rest.taken
            if taken is not None:
                found.master.grad = taken.index_select(0, found.index).to(found.master.dtype)
        is_warm_up, waited = counts.is_warm_up(section), counts.waited + 1
        is_due = is_warm_up or self._is_due(late, waited)
        is_beside = is_due and section.overlap_step and not is_warm_up
        for each in late:
            step = self._host_step(each, counts.taken, is_beside=is_beside) if is_due else None
            gradient = each.tensor.grad
            each.rest.late.begin(
                self._thread.submit(self._update_late, each.rest.late, gradient, factor, waited, step, is_beside)
            )
        self._step_important(late)
        for each in late:
            each.state["step"] += 1
            each.state[WAITED].fill_(0 if is_due else waited)
            each.state[CHOSEN].fill_(0 if is_warm_up else counts.chosen + 1)
            if is_due and not is_beside:
                each.rest.late.settle()
            each.lot.send()
            each.lot.unload()
            if section.offload:
                each.rest.rest_important()
        return 0 if is_due else waited

    def _update_late(
        self,
        late: LateUpdates,
        gradient: Tensor | None,
        factor: float,
        count: int,
        step: Callable[[Tensor], None] | None,
        is_beside: bool,
    ) -> None:
        """What the thread of the host does for a lot in one step.

        Where it fails, whoever waits for the lot is told, and every step and save after that is refused.
        """
        try:
            with torch.no_grad():
                if gradient is not None:
                    late.add(gradient, factor)
                if step is not None:
                    late.update(step, count, is_beside=is_beside)
        except BaseException as error:
            self._failure = error
            raise

    def _step_important(self, late: Sequence[LateLot]) -> None:
        """Step what is on the device of all lots in one call."""
        states: dict[Tensor, tuple[Tensor, dict[str, Any]]] = {}
        for each in late:
            found = each.rest.here
            if found is not None and found.master.grad is not None and found.index.numel():
                found.master.grad.mul_(each.factor)
                own = {name.partition(" ")[2]: value for name, value in found.held.items() if name != "master"}
                states[each.tensor] = found.master, own | {"step": found.step}
        if states:
            stand_ins(self.optimizer, states).step()
        for master, _ in states.values():
            master.grad = None

    def _host_step(self, each: LateLot, taken: int, *, is_beside: bool) -> Callable[[Tensor], None]:
        """The optimizer's step of what is late, with the settings of now, for a gradient that is not known yet."""
        target = each.rest.late.target(is_beside=is_beside)
        own = {key: value for key, value in each.state.items() if key not in LATE_STATES}
        own["step"] = torch.full_like(own["step"], taken)
        view = stand_ins(self.optimizer, {each.tensor: (target, own)})

        def step(gradient: Tensor) -> None:
            target.grad = gradient
            view.step()
            target.grad = None

        return step

    # When

    def _is_due(self, late: Sequence[LateLot], waited: int) -> bool:
        """Whether gradients have waited long enough, this step's included."""
        interval = self.section.update_interval
        return waited >= LONGEST or self._have_grown(late, waited) if interval == "auto" else waited >= interval

    def _have_grown(self, late: Sequence[LateLot], waited: int) -> bool:
        """Whether in nearly all matrices late gradients, as long as they have waited, are as large as important ones.

        Large is the mean of absolute values, over all ranks, in this step. The host waits for the device.
        """
        grown, count = 0, 0
        for store in self.stores:
            names = [name for name, parameter in store.contents.trained.items() if parameter.dim() > 1]
            lots = set(map(id, store.contents.lots))
            found = list(_sums([each for each in late if id(each.lot) in lots], store, names))
            table = torch.zeros((len(names), 4), dtype=torch.float64, device=self.device)
            if found:
                rows, numbers = zip(*found, strict=True)
                table.index_add_(0, torch.tensor(rows, device=self.device), torch.stack(numbers))
            if store.ranks.shard_group is not None:
                collectives.all_reduce(table, group=store.ranks.shard_group)
            for size, important, elements, chosen in table.tolist():
                others = elements - chosen
                grown += not others or not chosen or waited * (size - important) / others >= important / chosen
            count += len(names)
        return grown >= int(self.section.auto_ratio * count)

    def _select_interval(self, counts: Counts) -> int | None:
        """Steps after which columns are chosen anew; None where that is not known, and not yet asked for."""
        section = self.section
        if section.select_strategy == "step" and section.select_interval != "auto":
            return section.select_interval
        epochs = 1 if section.select_interval == "auto" else section.select_interval
        steps = section.steps_per_epoch or (self._fewest_epoch_steps() if counts.chosen else None)
        if steps is None and counts.chosen:
            warn_once(
                "zenflow: important columns are chosen once, since nobody says how many steps an epoch has: set "
                'zenflow.steps_per_epoch, or select_strategy "step" with a select_interval'
            )
        return None if steps is None else epochs * steps

    def _fewest_epoch_steps(self) -> int | None:
        """Optimizer steps in the shortest epoch of any rank; None where no rank knows its own.

        Loaders of two ranks may have different lengths, and may be replaced at any time; but columns have to be chosen
        in the same step by all. So the ranks ask each other whenever a round is over, by the counts that all have.
        """
        own = self.epoch_steps()
        fewest = UNKNOWN if own is None else own
        for group in (store.ranks.reduce_group for store in self.stores):
            if group is not None:
                least = torch.tensor(fewest, device=groups.exchange_device(group))
                collectives.all_reduce(least, ReduceOp.MIN, group=group)
                fewest = int(least)
        return None if fewest == UNKNOWN else fewest

    # Which

    def _select(self) -> None:
        """Choose the columns of every matrix whose gradients are the largest, in the sum of absolute values."""
        for store in self.stores:
            shapes = {name: tuple(parameter.shape) for name, parameter in store.contents.trained.items()}
            sizes = {name: math.prod(shape[1:]) for name, shape in shapes.items() if len(shape) > 1}
            sums = torch.zeros(sum(sizes.values()), dtype=torch.float32, device=self.device)
            by_name = dict(zip(sizes, sums.split_with_sizes(list(sizes.values())), strict=True))
            for piece in store.pieces("gradient"):
                for box, data in piece.parts() if piece.name in sizes else ():
                    columns = _columns(box, piece.shape, self.device)
                    by_name[piece.name].index_add_(0, columns, data.abs().float().sum(0).view(-1))
            if store.ranks.shard_group is not None and len(sums):
                collectives.all_reduce(sums, group=store.ranks.shard_group)
            chosen = {name: self._largest(found) for name, found in by_name.items()}
            for piece in store.pieces(IMPORTANT, self.optimizer.state):
                for box, data in piece.parts():
                    if piece.name in chosen:
                        columns = _columns(box, piece.shape, torch.device("cpu"))
                        data.copy_(chosen[piece.name][columns].view(box.shape[1:]).expand(box.shape))
                    else:
                        data.fill_(True)

    def _largest(self, sums: Tensor) -> Tensor:
        """Which columns are important: the asked share of them, and at least one unless that is nothing."""
        count = round(self.section.topk_ratio * len(sums))
        count = max(count, 1) if self.section.topk_ratio > 0 and len(sums) else count
        found = torch.zeros(len(sums), dtype=torch.bool)
        found[sums.topk(count).indices.cpu()] = True
        return found


def _sums(late: Sequence[LateLot], store: Store, names: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
    """For each part of a matrix its row and (sum of all sizes, of important ones, all elements, important ones)."""
    rows = {name: row for row, name in enumerate(names)}
    for each in late:
        found, taken = each.rest.here, each.rest.taken
        if found is None or taken is None or found.master.grad is None:
            continue
        for portion in (one for one in store.contents.portions[each.tensor] if one.name in rows):
            low, high = torch.searchsorted(found.places, torch.tensor([portion.start, portion.stop])).tolist()
            sizes = [taken[portion.start : portion.stop].abs().sum(), found.master.grad[low:high].abs().sum()]
            counts = torch.tensor([portion.stop - portion.start, high - low], device=taken.device)
            yield rows[portion.name], torch.cat([torch.stack(sizes).double(), counts.double()])


def _columns(box: Box, shape: Sequence[int], device: torch.device) -> Tensor:
    """The columns that a box has elements of, counted over all dimensions but the first."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for dim in range(1, len(shape)):
        own = torch.arange(box.start[dim], box.stop[dim], device=device)
        found = found.unsqueeze(-1) + own * math.prod(shape[dim + 1 :])
    return found.view(-1)
