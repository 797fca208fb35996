"""Muon: momentum made orthogonal, for the matrices of hidden layers, and AdamW for everything else."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from mizzen.model.sketch import ParameterSketch
from mizzen.optim.ranges import check_betas, check_range

NOT_HIDDEN: Final = ("embed", "lm_head")
"""Parts of names by which input and output layers are known."""

ROUNDS: Final = 5
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic that brings singular values of (0, 1] near 1 in five rounds."""


class Muon(Optimizer):
    """Groups with `use_muon` get orthogonal updates, the others AdamW; `split_groups` sets the flag.

    m <- mu m + (1 - mu) g;  u = orthogonal((1 - mu) g + mu m);  p <- p (1 - lr wd) - lr sqrt(max(1, rows / columns)) u
    """

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
        self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adam.state = self.state
        self._adam.step()
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
        rows = update.reshape(len(update), -1)
        update = orthogonal(rows)
        length = group["lr"] * max(1.0, rows.shape[0] / rows.shape[1]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.view_as(parameter).to(parameter.dtype), alpha=length)


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
