"""LAMB: Adam whose step on each parameter is as long as that parameter's norm says, however the parameter is cut."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mizzen.kernels.norm import squares_of
from mizzen.optim.ranges import check_betas, check_range


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
                    squares[:, column].index_add_(0, places, squares_of(parts))
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
