"""The optimizers of engines, under the classes that clients ask for; which one an engine has depends on its stage."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final
from weakref import proxy

import torch
from torch import Tensor
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from deepspeed.faces import scaler
from deepspeed.faces.errors import also
from deepspeed.faces.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
    MuonWithAuxAdam,
    ZenFlowCPUAdam,
)
from mizzen.engine.engine import Engine
from mizzen.engine.optimizer import EngineOptimizer
from mizzen.errors import NotBuilt
from mizzen.optim.own_rules import Lamb, Lion, Muon

DeepSpeedOptimizerCallable = DeepSpeedSchedulerCallable = Callable[[Any], Any]
"""What makes an optimizer from parameter groups, or a schedule from an optimizer."""


class DeepSpeedOptimizer(EngineOptimizer):
    """The optimizer of any engine, with the calls that programs make of one by hand."""

    engine: Engine
    """The one that it belongs to, which it does not keep alive."""

    @also(AssertionError)
    def backward(self, loss: Tensor, create_graph: bool = False, retain_graph: bool = False) -> None:
        """Gradients of a loss as it is: who calls this of an optimizer divides by the accumulation himself."""
        if create_graph:
            raise NotBuilt("backward(create_graph=True): gradients of gradients are not built yet")
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def set_lr(self, lr: float) -> None:
        """One learning rate for all groups."""
        self.engine.set_lr(lr)

    def get_lr(self) -> float:
        """That of the first group."""
        return self.engine.get_lr()[0]

    def needs_scaler(self) -> bool:
        """Whether a loss has to be scaled before a `.backward()` of the user's own."""
        return self.loss_scaler.is_on

    def scale_if_loss(self, value: Any) -> Any:
        """A loss as its backward needs it; anything else as it is."""
        is_loss = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
        return self.loss_scaler.scaled(value) if is_loss else value

    def backward_prologue(self, loss: Tensor | None = None) -> Any:
        """What comes before a backward by hand: the loss is scaled."""
        return None if loss is None else self.scale_if_loss(loss)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing: gradients are reduced by the hooks of the engine, or in its step."""

    backward_epilogue = enter_backward = exit_backward = clear_backward_seen_flag = _nothing

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """The tensors of each group."""
        return [list(group["params"]) for group in self.param_groups]

    bit16_groups = fp16_groups

    @property
    def initialized_optimizer(self) -> "DeepSpeedOptimizer":
        """Itself."""
        return self


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine that shards."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Of ZeRO stages 1 and 2."""


class ZenFlowZeroOptimizer(DeepSpeedZeroOptimizer):
    """Of ZeRO stages 1 and 2 with a section `zenflow`."""

    @classmethod
    def create(cls, zenflow_config: Any) -> type["ZenFlowZeroOptimizer"]:
        """Which of the two classes an engine's optimizer has."""
        return ZenFlowZeroOptimizerParallel if zenflow_config.overlap_step else ZenFlowZeroOptimizerSequential


class ZenFlowZeroOptimizerSequential(ZenFlowZeroOptimizer):
    """Of one that waits for late updates."""


class ZenFlowZeroOptimizerParallel(ZenFlowZeroOptimizer):
    """Of one whose late updates go on beside training (`overlap_step`)."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801
    """Of ZeRO stage 3."""

    @property
    def parameter_offload(self) -> "DeepSpeedZeRoOffload":
        """What gathers parameters there; here hooks of mizzen's own do, and stay."""
        return DeepSpeedZeRoOffload()


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """Of stage 0 with parameters of 16 bits."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):  # noqa: N801
    """Of nobody here: FP16_Optimizer does the same for every rule."""


class BF16_Optimizer(ZeROOptimizer):  # noqa: N801
    """Of nobody here: DeepSpeedZeroOptimizer does the same for bf16."""


class PlainOptimizer(DeepSpeedOptimizer):
    """Of stage 0 in fp32. An engine's own is also of the class of the optimizer inside, and answers for it."""

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


@cache
def _plain(kind: Any) -> type[PlainOptimizer]:
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (PlainOptimizer, kind), body)


class _NoModule:
    """Stands for a model none of whose parameters needs anything done."""

    def named_parameters(self, recurse: bool = True) -> Iterator[Any]:
        """None."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[Any]:
        """None."""
        return iter(())


class _Coordinator:
    """Stands for a recorded order of gathers: there is none."""

    def is_invalid_trace(self) -> bool:
        """Whether the record is void."""
        return True

    def _invalidate_trace(self) -> None:
        """Nothing."""


class DeepSpeedZeRoOffload:
    """Lists and calls that clients go through around generation. Gathered parameters stay whole by themselves."""

    def __init__(self) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing."""


RULES: Final[dict[type[Optimizer], tuple[type[Optimizer], type[Optimizer]]]] = {
    Adam: (FusedAdam, DeepSpeedCPUAdam),
    AdamW: (FusedAdam, DeepSpeedCPUAdam),
    Lamb: (FusedLamb, FusedLamb),
    Lion: (FusedLion, DeepSpeedCPULion),
    Adagrad: (Adagrad, DeepSpeedCPUAdagrad),
    Muon: (MuonWithAuxAdam, MuonWithAuxAdam),
}
"""A rule that a configuration names -> what programs call it, on a device and offloaded to the host."""


def dress(engine: Engine, *, is_configured: bool) -> None:
    """Give the optimizer of an engine its class, and, where the configuration names it, also the one inside."""
    outer, zero = engine.optimizer, engine.settings.zero_optimization
    if outer is None:
        return
    if is_configured:
        _name_rule(engine, outer.optimizer)
    is_low = engine.settings.fp16.enabled or engine.settings.bf16.enabled
    sharded = DeepSpeedZeroOptimizer if zero.zenflow is None else ZenFlowZeroOptimizer.create(zero.zenflow)
    kinds = {1: sharded, 2: sharded, 3: DeepSpeedZeroOptimizer_Stage3}
    inside: Any = type(outer.optimizer)
    kind = kinds.get(zero.stage) or (FP16_Optimizer if is_low else _plain(inside))
    outer.__class__ = kind
    outer.engine = proxy(engine)  # type: ignore[attr-defined]
    scaler.dress(outer.loss_scaler)


def _name_rule(engine: Engine, rule: Optimizer) -> None:
    section = engine.settings.optimizer
    is_torch_s = section is not None and section.params.get("torch_adam", False)
    if type(rule) not in RULES or is_torch_s:
        return
    given = engine.config.get("zero_optimization")
    offload = given.get("offload_optimizer") if isinstance(given, dict) else None
    is_on_host = isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme")
    kind = RULES[type(rule)][is_on_host]
    if kind is DeepSpeedCPUAdam and engine.settings.zero_optimization.zenflow is not None:
        kind = ZenFlowCPUAdam
    kind([torch.zeros(1)])  # type: ignore[call-arg]  # torch hooks the step of a class when its first object is made
    rule.__class__ = kind
