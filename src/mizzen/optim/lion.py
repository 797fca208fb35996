"""Lion: steps by the sign of an interpolation between gradient and momentum. One state, element by element."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mizzen.optim.ranges import check_betas, check_range


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
