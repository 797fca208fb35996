"""A module whose parameters are sharded stays where it is: `.to()`, `.cpu()` and their kin find nothing to move.

torch would exchange the parameter objects, which others know them by, for new ones. What else a module does otherwise
than torch's own while it is sharded is here too: it says what it cannot do in its own words, and forgets gradients that
no parameter shows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mizzen.ambient import AMBIENT
from mizzen.errors import NotBuilt, UsageError
from mizzen.log import warn_once
from mizzen.parallel.zero.full.gradients import UnitGradients


class Staying:
    """Comes before a module's own class while an engine has it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What `.to()` and the like call."""
        module: Any = self
        first = next((each for each in module.parameters() if each.is_floating_point()), None)
        if first is None:
            return self
        there = fn(torch.empty(0, dtype=first.dtype, device=first.device))
        if there.dtype != first.dtype:
            raise UsageError(
                f"a sharded model cannot become {there.dtype}: it holds {first.dtype} as the configuration says; set "
                "bf16 or fp16 there, or change the model before initialize()"
            )
        if there.device != first.device:
            warn_once(
                f"a sharded model stays on {first.device} while an engine has it, and did not go to {there.device}"
            )
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; a change of its input in place is refused in our words."""
        unit: Any = super()
        try:
            return unit.__call__(*args, **kwargs)
        except RuntimeError as error:
            if "RegisterPostBackwardFunction" not in str(error):
                raise
            raise self._refusal_of_change() from error

    def _refusal_of_change(self) -> NotBuilt:
        name = next((f" with '{owner.name}'" for owner in self._owners()), "")
        return NotBuilt(
            f"the {type(self).__name__.removeprefix('FSDP')}{name} changes its input in place, by a module such as "
            "ReLU(inplace=True), a call such as add_(), or `x += ...`, and at ZeRO stage 3 it is a unit of its own: "
            "make that inplace=False, or `x = x + ...`; or pin the module around it in zero_optimization.leaf_module"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, also those of sharded parameters, which do not show them."""
        plain: Any = super()
        plain.zero_grad(set_to_none=set_to_none)
        owners = self._owners()
        for store in {id(owner.store): owner.store for owner in owners}.values():
            if isinstance(store.gradients, UnitGradients):
                store.gradients.forget({owner.name for owner in owners if owner.store is store})

    def _owners(self) -> list[Any]:
        """Who trains the parameters, which are sharded or whole now."""
        module: Any = self
        found = (AMBIENT.owners.get(parameter) for parameter in module.parameters())
        return [owner for owner in found if owner is not None]

    @property
    def _initialize_hook(self) -> Any:
        """What `torch.compile` and `torch.jit` ask a module for: a model as a whole is refused at once."""
        stores = (owner.store for owner in self._owners())
        if any(store.model is self for store in stores if isinstance(store.gradients, UnitGradients)):
            raise UsageError(
                "torch.compile or torch.jit of an engine, or of its whole model, at ZeRO stage 3, where parameters are "
                'gathered unit by unit: call engine.compile(), or set "compile": {"enabled": true}, which compiles '
                "each block; for torch.jit take the model after engine.destroy()"
            )
        raise AttributeError("_initialize_hook")

    def __deepcopy__(self, memo: Any) -> Any:
        """What `copy.deepcopy` calls."""
        raise UsageError(
            "a model whose parameters are sharded cannot be copied or pickled: copy it before initialize(), take whole "
            "values with mizzen.zero.safe_get_full_fp32_param, or save with engine.save_16bit_model or save_checkpoint"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What `torch.save` and `pickle` call."""
        return self.__deepcopy__(None)


def stay(module: nn.Module) -> None:
    """Let a module that FSDP2 has wrapped stay; its name is the one that FSDP2 gave it.

    All modules of one class get one class again: a compiler looks at that, and would compile each of them anew.
    """
    kind = type(module)
    known = next((each for each in kind.__subclasses__() if issubclass(each, Staying)), None)
    module.__class__ = known or type(kind.__name__, (Staying, kind), {"__module__": kind.__module__})
