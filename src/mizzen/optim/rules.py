"""What is known of update rules: which work element by element, which do not, and which start with states.

A rule that works element by element gives the same result on any cut of a tensor, so its states can be sharded.
"""

import inspect
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

ELEMENTWISE: Final = (Adam, AdamW, SGD, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD)

_WHOLE: Final = "it works on whole matrices, and states are kept in flat pieces"
_SENT: Final = "it needs compressed communication"
_WIDTH: Final = "it needs the widths that the mup package records; give an optimizer of that package to initialize()"

UNBUILT: Final = {
    "muon": _WHOLE,
    "adafactor": _WHOLE,
    "lamb": "it needs the norm of every whole parameter",
    "lbfgs": "it evaluates the model several times in one step",
    "sparseadam": "it needs sparse gradients, and gradients are kept in flat buffers",
    "lion": "torch has no such rule",
    "onebitadam": _SENT,
    "zerooneadam": _SENT,
    "onebitlamb": _SENT,
    "muadam": _WIDTH,
    "muadamw": _WIDTH,
    "musgd": _WIDTH,
}
"""Names that users know -> why they do not work yet."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the rule is known to work element by element: it is one of torch's, or inherits its step from one."""
    # torch wraps `step` in the class itself when the first instance is made, so only what is inside can be compared.
    return inspect.unwrap(type(optimizer).step) in {inspect.unwrap(kind.step) for kind in ELEMENTWISE}


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has states that a step has made, as opposed to its constructor."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def renew_states(optimizer: Optimizer) -> None:
    """Make anew, for the parameters that the groups have now, what a constructor made: Adagrad's makes states."""
    optimizer.state.clear()
    if isinstance(optimizer, Adagrad):
        start = optimizer.defaults["initial_accumulator_value"]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = _adagrad_state(parameter, start, fused=bool(group["fused"]))


def _adagrad_state(parameter: Tensor, start: float, *, fused: bool) -> dict[str, Any]:
    place = parameter.device if fused else torch.device("cpu")
    return {"step": torch.zeros((), dtype=torch.float32, device=place), "sum": torch.full_like(parameter, start)}
