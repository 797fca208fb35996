"""What builders load: functions under the names that programs call, done by torch and by mizzen's rules."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from mizzen.errors import NotBuilt, UsageError
from mizzen.optim.own_rules import Lion


class Utils:
    """Tensors as one, and back."""

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """One flat tensor with the content of all."""
        return _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call, no-any-return]

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Views of it, in the shapes of these."""
        return _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call, no-any-return]


class AdamOperations:
    """Adam over lists of tensors."""

    def multi_tensor_adam(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """The step of that number, with lists of gradients, parameters and both averages; mode 1 is AdamW."""
        gradients, parameters, first, second = map(list, tensor_lists)
        if not bias_correction:
            raise NotBuilt("multi_tensor_adam(bias_correction=0): Adam without it is not built yet")
        with torch.no_grad():
            adam(
                parameters,
                gradients,
                first,
                second,
                [],
                [torch.tensor(float(step - 1)) for _ in parameters],
                decoupled_weight_decay=mode == 1,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=epsilon,
                maximize=False,
            )


class _Numbered:
    """Optimizers that are known by numbers; what one has made another does not know."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def _make(self, number: int, what: Any) -> int:
        self._made[number] = what
        return 0

    def _create(self, optimizer_id: int, *_: Any) -> int:
        """Nothing is kept: all is told with each step."""
        return self._make(optimizer_id, None)

    def _destroy(self, number: int) -> int:
        self._made.pop(number, None)
        return 0

    def _known(self, number: int) -> Any:
        if number not in self._made:
            known = ", ".join(map(str, self._made)) or "none"
            raise UsageError(f"no optimizer has the number {number} here: create it first; known: {known}")
        return self._made[number]


class CpuAdam(_Numbered):
    """Adam over one tensor."""

    destroy_adam = _Numbered._destroy

    def create_adam(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        """Note whether it is AdamW; all else is told with each step."""
        return self._make(optimizer_id, int(adamw_mode))

    def adam_update(self, optimizer_id: int, step: int, lr: float, *others: Any) -> int:
        """The step of that number: betas, epsilon, decay, bias correction, parameter, gradient and averages follow."""
        beta1, beta2, epsilon, weight_decay, bias_correction, parameter, gradient, first, second = others
        lists = [[gradient], [parameter], [first], [second]]
        mode = self._known(optimizer_id)
        AdamOperations().multi_tensor_adam(
            0, parameter, lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
        )
        return 0

    def adam_rollback(self, *_: Any) -> NoReturn:
        """Waits for offload."""
        raise NotBuilt("adam_rollback waits for a capability that is not built yet: offload")


class CpuAdagrad(_Numbered):
    """Adagrad over one tensor."""

    create_adagrad, destroy_adagrad = _Numbered._create, _Numbered._destroy

    def adagrad_update(self, optimizer_id: int, step: int, lr: float, *others: Any) -> int:
        """The step of that number: epsilon, decay, parameter, gradient and the sum of squares follow."""
        self._known(optimizer_id)
        epsilon, weight_decay, parameter, gradient, squares = others
        with torch.no_grad():
            adagrad(
                *([parameter], [gradient], [squares], [torch.tensor(float(step - 1))]),
                lr=lr,
                weight_decay=weight_decay,
                lr_decay=0.0,
                eps=epsilon,
                maximize=False,
            )
        return 0


class LionOperations(_Numbered):
    """Lion over one tensor, or lists of them."""

    create_lion, destroy_lion = _Numbered._create, _Numbered._destroy

    def lion_update(self, optimizer_id: int, step: int, lr: float, *others: Any) -> int:
        """One step: betas, decay, parameter, gradient and momentum follow."""
        self._known(optimizer_id)
        beta1, beta2, weight_decay, parameter, gradient, momentum = others
        lists = [[gradient], [parameter], [momentum]]
        self.multi_tensor_lion(0, parameter, lists, lr, beta1, beta2, step, weight_decay)
        return 0

    def multi_tensor_lion(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        step: int,
        weight_decay: float,
    ) -> None:
        """One step with lists of gradients, parameters and momenta."""
        for gradient, parameter, momentum in zip(*tensor_lists, strict=True):
            rule = Lion([parameter], lr, (beta1, beta2), weight_decay)
            before, parameter.grad, rule.state[parameter]["exp_avg"] = parameter.grad, gradient, momentum
            rule.step()
            parameter.grad = before


class LambOperations:
    """LAMB over one tensor."""

    def lamb(self, *_: Any) -> NoReturn:
        """Waits for a kernel."""
        raise NotBuilt("the function lamb() waits for kernels of that name: deepspeed.ops.lamb.FusedLamb is the rule")
