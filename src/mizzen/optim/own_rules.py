"""The update rules that torch does not have, or not as files ask for them: Lamb, Lion and Muon.

Lamb is Adam whose step on each parameter is as long as that parameter's norm says, however the parameter is cut. Lion
steps by the sign of an interpolation between gradient and momentum: one state, element by element. Muon makes the
momentum orthogonal for the matrices of hidden layers, and is AdamW for everything else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from mizzen.kernels.norm import squares_of
from mizzen.model.sketch import ParameterSketch


def check_range(name: str, value: float, *, low: float, high: float = float("inf")) -> None:
    """Refuse an argument outside of [low, high)."""
    if not low <= value < high:
        bound = f"in [{low:g}, {high:g})" if high != float("inf") else f"at least {low:g}"
        raise ValueError(f"{name} is {value:g}; it must be {bound}")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuse decay rates outside of [0, 1)."""
    for number, beta in enumerate(betas):
        check_range(f"betas[{number}]", beta, low=0, high=1)


@dataclass(frozen=True, slots=True)
class Portion:
    """A range of a flat tensor that belongs to one parameter."""

    name: str
    start: int
    stop: int
    counted: tuple[tuple[int, int], ...] | None = None
    """What of it enters a norm here, where other ranks hold some of it too; None is all of it."""

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """What enters a norm, of the flat tensor."""
        ranges = ((self.start, self.stop),) if self.counted is None else self.counted
        return [flat[start:stop] for start, stop in ranges]


class Lamb(Optimizer):
    """Layer-wise adaptive moments.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  u = m / (sqrt(v) + eps) + wd p
    p <- p - lr sqrt(1 - b2^t) / (1 - b1^t) c u,  c = |p| / |u| within [min_coeff, max_coeff], or 1 where a norm is 0

    Norms are those of whole parameters: `share` says which ranges of the tensors belong to which, and how to add up
    over the ranks that hold the rest; where several hold the same, both norms of c grow alike. Until then every tensor
    is a parameter of its own. The memory of gradients is used for u.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_range("lr", lr, low=0)
        check_betas(betas)
        check_range("eps", eps, low=0)
        check_range("weight_decay", weight_decay, low=0)
        check_range("min_coeff", min_coeff, low=0)
        check_range("max_coeff", max_coeff, low=min_coeff)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._portions: Mapping[Tensor, Sequence[Portion]] | None = None
        self._rows: Mapping[str, int] = {}
        self._add_up: Callable[[Tensor], object] = _keep
        self._device: torch.device | None = None

    def share(
        self,
        portions: Mapping[Tensor, Sequence[Portion]],
        names: Iterable[str],
        add_up: Callable[[Tensor], object],
        device: torch.device,
    ) -> None:
        """Work on ranges of parameters. All ranks give the same `names`; `add_up` sums a tensor over them, in place."""
        self._portions, self._device = dict(portions), device
        self._rows = {name: row for row, name in enumerate(names)}
        self._add_up = add_up

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        stepped = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        ranges = [self._ranges(number, parameter) for number, (parameter, _) in enumerate(stepped)]
        rows = self._rows or {portions[0].name: row for row, portions in enumerate(ranges)}
        weights, updates = self._squares(stepped, ranges, rows).sqrt().unbind(1)
        ratios = torch.where((weights > 0) & (updates > 0), weights / updates, torch.nan)
        for (parameter, group), portions in zip(stepped, ranges, strict=True):
            length = group["lr"] * self._correction(parameter, group)
            limited = ratios.clamp(group["min_coeff"], group["max_coeff"]).nan_to_num(nan=1.0).to(parameter.dtype)
            flat, update = parameter.view(-1), _gradient(parameter).view(-1)
            for portion in portions:
                part = slice(portion.start, portion.stop)
                flat[part].addcmul_(update[part], limited[rows[portion.name]], value=-length)

    def _squares(
        self, stepped: list[tuple[Tensor, dict[str, Any]]], ranges: list[Sequence[Portion]], rows: Mapping[str, int]
    ) -> Tensor:
        """For each name the sums of squares of the parameter and of its update, over all ranks, in fp64."""
        device = stepped[0][0].device if stepped else self._device
        squares = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        for (parameter, group), portions in zip(stepped, ranges, strict=True):
            self._form_update(parameter, group)
            for column, tensor in enumerate((parameter, _gradient(parameter))):
                found = [(rows[each.name], part) for each in portions for part in each.parts_of(tensor.view(-1))]
                parts = [part for _, part in found]
                if parts:
                    places = torch.tensor([row for row, _ in found], device=device)
                    squares[:, column].index_add_(0, places, squares_of(parts, device=squares.device))
        self._add_up(squares)
        return squares

    def _form_update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Advance the moments, and put the update into the gradient's memory."""
        (beta1, beta2), gradient, state = group["betas"], _gradient(parameter), self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        torch.sqrt(square, out=gradient)
        torch.div(mean, gradient.add_(group["eps"]), out=gradient)
        if group["weight_decay"]:
            gradient.add_(parameter, alpha=group["weight_decay"])

    def _correction(self, parameter: Tensor, group: dict[str, Any]) -> float:
        if not group["bias_correction"]:
            return 1.0
        (beta1, beta2), step = group["betas"], float(self.state[parameter]["step"])
        return float((1 - beta2**step) ** 0.5 / (1 - beta1**step))

    def _ranges(self, number: int, parameter: Tensor) -> Sequence[Portion]:
        if self._portions is not None:
            return self._portions[parameter]
        return (Portion(f"#{number}", 0, parameter.numel()),)


def _keep(squares: Tensor) -> None:
    """One rank has all of them."""


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise AssertionError("no gradient")
    return parameter.grad


class Lion(Optimizer):
    """EvoLved Sign Momentum, with decoupled weight decay.

    update = sign(b1 m + (1 - b1) g);  p <- p (1 - lr wd) - lr update;  m <- b2 m + (1 - b2) g
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        check_range("lr", lr, low=0)
        check_betas(betas)
        check_range("weight_decay", weight_decay, low=0)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), gradient = group["betas"], parameter.grad
        if gradient is None:
            raise AssertionError("no gradient")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum = state["exp_avg"]
        update = torch.lerp(gradient, momentum, beta1).sign_()
        momentum.lerp_(gradient, 1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.mul_(group["lr"]))


NOT_HIDDEN: Final = ("embed", "lm_head")
"""Parts of names by which input and output layers are known."""

ROUNDS: Final = 5
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic that brings singular values of (0, 1] near 1 in five rounds."""


class MatrixParts(Protocol):
    """A matrix of which this rank steps a part."""

    def join(self, part: Tensor) -> Tensor:
        """The whole that the parts of all ranks are of; all of them call this."""

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""


class Muon(Optimizer):
    """Groups with `use_muon` get orthogonal updates, the others AdamW; `split_groups` sets the flag.

    m <- mu m + (1 - mu) g;  u = orthogonal((1 - mu) g + mu m);  p <- p (1 - lr wd) - lr sqrt(max(1, rows / columns)) u

    Of a matrix that is cut over ranks each has its part of p, m and u; only to make u orthogonal it is put together.
    """

    joined: Mapping[Tensor, MatrixParts] = MappingProxyType({})
    """How to put together what is cut."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        for name, value in (("lr", lr), ("muon_lr", muon_lr), ("adam_lr", adam_lr), ("weight_decay", weight_decay)):
            check_range(name, value or 0.0, low=0)
        check_range("momentum", momentum, low=0, high=1)
        check_betas(betas)
        given = split_groups(_as_groups(params), {})
        is_fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for g in given for p in g["params"])
        self._adam = AdamW([torch.zeros(0)], betas=(betas[0], betas[1]), eps=eps, fused=is_fused)
        shared = {"weight_decay": weight_decay}
        adam = self._adam.defaults | shared | {"lr": lr if adam_lr is None else adam_lr}
        muon = shared | {"lr": lr if muon_lr is None else muon_lr, "momentum": momentum}
        super().__init__([(muon if group["use_muon"] else adam) | group for group in given], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        adam = object.__new__(AdamW)  # one for each step: two threads may step two views of this optimizer at once
        vars(adam).update(vars(self._adam))
        adam.param_groups, adam.state = [group for group in self.param_groups if not group["use_muon"]], self.state
        adam.step()
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None and parameter.numel():
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = torch.lerp(gradient, momentum, group["momentum"])
        parts = self.joined.get(parameter)
        whole = update if parts is None else parts.join(update)
        rows = whole.reshape(len(whole), -1)
        update = orthogonal(rows).view_as(whole)
        update = update if parts is None else parts.part_of(update)
        length = group["lr"] * max(1.0, rows.shape[0] / rows.shape[1]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.to(parameter.dtype), alpha=length)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly U V^T of a matrix U S V^T, by a Newton-Schulz iteration: bf16 on a GPU, fp32 elsewhere."""
    a, b, c = _COEFFICIENTS
    work = matrix.bfloat16() if matrix.device.type == "cuda" else matrix.float()
    is_tall = work.shape[0] > work.shape[1]
    work = work.T if is_tall else work
    work = work / (torch.linalg.vector_norm(work) + 1e-7)
    for _ in range(ROUNDS):
        gram = work @ work.T
        work = a * work + (b * gram + c * gram @ gram) @ work
    result: Tensor = work.T if is_tall else work
    return result


def split_groups(groups: Sequence[Mapping[str, Any]], facts: Mapping[int, ParameterSketch]) -> list[dict[str, Any]]:
    """Each group in two: parameters that get orthogonal updates, and the rest; one that has the flag stays as it is.

    A parameter's own `use_muon` decides. Without one it is a matrix, or more, of a hidden layer: neither an embedding
    nor `lm_head`, by what `facts` has for the id of the parameter.
    """
    split: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            split.append(dict(group))
            continue
        chosen: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in group["params"]:
            chosen[_is_hidden(parameter, facts.get(id(parameter)))].append(parameter)
        split.extend({**group, "params": chosen[flag], "use_muon": flag} for flag in (True, False))
    return split


def _is_hidden(parameter: Tensor, fact: ParameterSketch | None) -> bool:
    asked = vars(parameter).get("use_muon")
    if asked is not None:
        return bool(asked)
    if parameter.dim() < 2:
        return False
    return fact is None or not (
        fact.is_embedding or any(part in name.lower() for part in NOT_HIDDEN for name in fact.names)
    )


def _as_groups(params: Iterable[Any]) -> list[Mapping[str, Any]]:
    given = list(params)
    return given if given and isinstance(given[0], Mapping) else [{"params": given}]
