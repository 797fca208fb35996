"""Optimizers under the names and with the arguments of other implementations; the rules are torch's and mizzen's."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Adagrad, Adam

from mizzen.errors import NotBuilt, UsageError
from mizzen.optim.own_rules import Lamb, Lion, Muon


class FusedAdam(Adam):
    """torch's Adam, decoupled unless `adam_w_mode` is false, in one kernel where the device has it."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise NotBuilt(f"{type(self).__name__}(bias_correction=False): Adam without it is not built yet")
        groups = _groups(params)
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
            fused=_has_kernel(groups),
        )


class DeepSpeedCPUAdam(FusedAdam):
    """Adam as `FusedAdam` has it; where states rest is the configuration's business."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _states_are_fp32(self, fp32_optimizer_states)
        super().__init__(
            model_params,
            lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adamw_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class ZenFlowCPUAdam(DeepSpeedCPUAdam):
    """Adam as `DeepSpeedCPUAdam` has it; what is stepped late is the configuration's business."""

    def __init__(self, *args: Any, overlap_step: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overlap_step = overlap_step


class DeepSpeedCPUAdagrad(Adagrad):
    """torch's Adagrad. Accelerate passes arguments of Adam, which change nothing."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        **others: Any,
    ) -> None:
        _states_are_fp32(self, fp32_optimizer_states)
        _without_adam(self, others)
        super().__init__(_groups(model_params), lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """mizzen's Lion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(_groups(params), lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """mizzen's Lion. Accelerate passes arguments of Adam, which change nothing."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        **others: Any,
    ) -> None:
        _states_are_fp32(self, fp32_optimizer_states)
        _without_adam(self, others)
        super().__init__(_groups(model_params), lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLamb(Lamb):
    """mizzen's LAMB."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        wrong = {"eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad, "max_grad_norm": max_grad_norm}
        for name, value in wrong.items():
            if value:
                way_out = "set gradient_clipping in the configuration" if name == "max_grad_norm" else "leave it out"
                raise UsageError(f"FusedLamb({name}={value}) is not supported: {way_out}")
        super().__init__(
            _groups(params),
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


class MuonWithAuxAdam(Muon):
    """mizzen's Muon, with AdamW for what is no hidden matrix."""


def _groups(params: Iterable[Any]) -> list[Any]:
    """What can be gone through twice."""
    params = list(params)
    for number, group in enumerate(params):
        if isinstance(group, dict) and "params" not in group:
            raise UsageError(f"parameter group {number} has {', '.join(map(str, group)) or 'nothing'}, and no 'params'")
    return [group | {"params": list(group["params"])} if isinstance(group, dict) else group for group in params]


def _has_kernel(groups: list[Any]) -> bool:
    tensors = [tensor for group in groups for tensor in (group["params"] if isinstance(group, dict) else [group])]
    return all(
        isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.device.type in ("cpu", "cuda")
        for tensor in tensors
    )


def _states_are_fp32(optimizer: object, asked: bool) -> None:
    if not asked:
        raise NotBuilt(
            f"{type(optimizer).__name__}(fp32_optimizer_states=False): states have fp32; an optimizer of few bits, "
            "such as AdamW8bit, is chosen by its name in the configuration"
        )


def _without_adam(optimizer: object, others: dict[str, Any]) -> None:
    if unknown := others.keys() - {"adamw_mode", "bias_correction", "amsgrad", "betas", "eps"}:
        raise UsageError(f"{type(optimizer).__name__} has no argument {', '.join(sorted(unknown))}")
