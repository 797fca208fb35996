"""Modules inside of blocks, each by one fused operation: norms, rotary embeddings and gated layers.

A module is taken for what its class's `forward` computes: before any of them is changed, that function is run on small
tensors and compared with the specification.
"""

from collections.abc import Callable, Iterable
from inspect import isfunction, signature
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from mizzen.errors import PlanError
from mizzen.kernels.rms_norm import plain_rms_norm, rms_norm
from mizzen.kernels.rotary import plain_rotary, rotary
from mizzen.kernels.swiglu import plain_swiglu, swiglu
from mizzen.model.sketch import ROTARY, ModuleSketch
from mizzen.rewrite.forward import ReplacedForward

EPSILONS: Final = ("variance_epsilon", "eps")
"""Names under which norms keep what they add to the mean square."""


class FusedModule(ReplacedForward):
    """A module inside of a block that is computed by our operations. A compiler would do as well, and wants none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward)
        self.module: Any = module


class OneInputModule(FusedModule):
    """A fused module with one input, however it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns."""
        (inputs,) = (*args, *kwargs.values())
        return self.compute(inputs)

    def compute(self, inputs: Tensor) -> Tensor:
        """The operation."""
        raise NotImplementedError


class FusedNorm(OneInputModule):
    """weight * x / rms(x)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.eps = _epsilon(module)

    def compute(self, inputs: Tensor) -> Tensor:
        """By torch's own kernel."""
        return rms_norm(inputs, self.module.weight, self.eps)


class FusedGatedLayer(OneInputModule):
    """down(silu(gate(x)) * up(x))."""

    def compute(self, inputs: Tensor) -> Tensor:
        """The layers are called as modules, whatever they are."""
        module = self.module
        found: Tensor = module.down_proj(swiglu(module.gate_proj(inputs), module.up_proj(inputs)))
        return found


# [Note: rotary embeddings of one model]
# Attention calls a function of its file by name. To put another one there would change every model of that class in the
# process. So a module gets the code of its own `forward` with other globals: a copy of the file's, in which that one
# name means our function. It is taken when the engine is built; what is changed in that file later is not seen.
class FusedRotary(FusedModule):
    """Attention whose queries and keys are turned by our kernel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.function = _rewired(type(module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns."""
        return self.function(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions that were made here cannot be pickled, but made again."""
        return type(self), (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedRotary":
        """The memo knows the module already: it is being copied, and this with it."""
        return type(self)(memo.get(id(self.module), self.module))


def _rewired(forward: Callable[..., Any]) -> FunctionType:
    if not isfunction(forward):
        raise AssertionError(f"{forward} is no function")
    names = {**forward.__globals__, ROTARY: rotary}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def check(modules: Iterable[ModuleSketch], trouble_of: Callable[[Any, ModuleSketch], str]) -> None:
    """Refuse modules that are something else than what is to stand in their place."""
    seen: set[type[nn.Module]] = set()
    for module in modules:
        if "forward" in module.own:
            raise PlanError(f"fused: a {module.kind} of this model has been given another forward, which would be lost")
        if module.type is None or module.type in seen:
            continue
        seen.add(module.type)
        if trouble := trouble_of(module.type.forward, module):
            raise PlanError(f"fused: {module.kind} {trouble}")


def replace(modules: Iterable[nn.Module], kind: Callable[[Any], ReplacedForward]) -> None:
    """Put one of a kind in the place of each module's `forward`."""
    for module in modules:
        vars(module)["forward"] = kind(module)


def trouble_of_norm(forward: Any, module: ModuleSketch) -> str:
    """What is wrong with a norm; empty when nothing is."""
    if module.own.isdisjoint(EPSILONS):
        return f"keeps its epsilon under none of {', '.join(EPSILONS)}: leave fused.rms_norm out"
    inputs, weight, eps = _numbers(3, 8), _numbers(8), 0.25
    stand_in = SimpleNamespace(weight=weight, **dict.fromkeys(EPSILONS, eps))
    if _agree(forward, (stand_in, inputs), plain_rms_norm(inputs, weight, eps)):
        return ""
    return "computes something else than weight * x / rms(x): leave fused.rms_norm out"


def trouble_of_gated(forward: Any, module: ModuleSketch) -> str:
    """What is wrong with a gated layer; empty when nothing is."""
    inputs = _numbers(3, 8)
    stand_in = SimpleNamespace(
        gate_proj=lambda x: 2 * x + 1, up_proj=lambda x: x - 2, down_proj=lambda x: 3 * x, act_fn=functional.silu
    )
    expected = 3 * plain_swiglu(2 * inputs + 1, inputs - 2)
    if _agree(forward, (stand_in, inputs), expected):
        return ""
    return "computes something else than down_proj(silu(gate_proj(x)) * up_proj(x)): leave fused.swiglu out"


def trouble_of_rotary(forward: Any, module: ModuleSketch) -> str:
    """What is wrong with the rotary function of an attention's file; empty when nothing is."""
    function = forward.__globals__.get(ROTARY)
    if not callable(function) or tuple(signature(function).parameters)[4:] not in ((), ("unsqueeze_dim",)):
        return f"calls an {ROTARY} with other arguments than Llama's: leave fused.rotary out"
    query, key, cosine, sine = _numbers(2, 3, 5, 8), _numbers(2, 1, 5, 8) + 1, _numbers(2, 5, 8), _numbers(1, 5, 8) - 1
    takes_half = _call(function, (query, key, cosine[..., :4], sine[..., :4])) is not None
    if not takes_half and _agree(function, (query, key, cosine, sine), plain_rotary(query, key, cosine, sine)):
        return ""
    return "turns its queries and keys in another way than Llama: leave fused.rotary out"


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any | None:
    """What a function of a model gives; None if it looks for more than it is given, or for something else."""
    try:
        with torch.no_grad():
            return function(*arguments)
    except (AttributeError, RuntimeError, TypeError):
        return None


def _agree(function: Callable[..., Any], arguments: tuple[Any, ...], expected: Any) -> bool:
    """Whether a function of a model computes this."""
    found = _call(function, arguments)
    if found is None:
        return False
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    return all(isinstance(one, Tensor) and torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)


def _epsilon(module: nn.Module) -> float:
    return float(next(vars(module)[name] for name in EPSILONS if name in vars(module)))


def _numbers(*shape: int) -> Tensor:
    """Some, always the same, without drawing any: the random stream belongs to the run."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float32, device="cpu").mul(0.7).sin().reshape(shape)
