"""Analytic cost: the bytes that one rank holds for parameters, gradients, master weights and optimizer states.

Activations depend on the run and are not here; they are measured by simulation. Nor are buffers of the model, and the
few bytes of an optimizer's step counts.
"""

from dataclasses import dataclass
from typing import Final

from mizzen.config.schema import Config
from mizzen.model.sketch import Sketch, bytes_per_element
from mizzen.precision.policy import Policy, wider
from mizzen.wording import byte_size

STATES: Final = {"adagrad": 1, "rmsprop": 1, "asgd": 1, "sgd": 0, "lion": 1, "adafactor": 1}
"""Full-size tensors that an optimizer keeps, by the end of its name, so that DeepSpeedCPUAdagrad is Adagrad.

All others count as 2: Adam and its relatives, Adadelta, Rprop, and what is not known."""

WHOLE_STATES: Final = {"muon": 1, "adafactor": 0}
"""Full-size states for parameters that a rule needs whole; Adafactor keeps rows and columns, which hardly count."""

FURTHER_STATES: Final = ("momentum", "centered", "amsgrad")
"""Arguments of an optimizer that add one such tensor each, when they are not 0 or false."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes on one rank. Costs add up; a change that saves memory is a negative cost."""

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    states: int = 0
    host: int = 0
    """In host memory, beside the device: masters and states that rest there, and gradients on their way."""
    nvme: int = 0
    """On an NVMe drive."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.states + other.states,
            self.host + other.host,
            self.nvme + other.nvme,
        )

    def __neg__(self) -> "Cost":
        return Cost(-self.parameters, -self.gradients, -self.masters, -self.states, -self.host, -self.nvme)

    def __sub__(self, other: "Cost") -> "Cost":
        return self + -other

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return self.parameters + self.gradients + self.masters + self.states

    @property
    def resting(self) -> int:
        """The bytes of masters and states where these rest apart from the parameters, which are then no masters."""
        return (self.masters or self.parameters) + self.states

    def __str__(self) -> str:
        parts = (
            f"parameters {byte_size(self.parameters)}",
            f"gradients {byte_size(self.gradients)}",
            f"masters {byte_size(self.masters)}",
            f"states {byte_size(self.states)}",
        )
        beside = [f"{byte_size(size)} {where}" for size, where in ((self.host, "host"), (self.nvme, "nvme")) if size]
        return " + ".join([f"{byte_size(self.total)} ({', '.join(parts)})", *beside])


def replicated(config: Config, sketch: Sketch) -> Cost:
    """The cost of training the model whole on every rank, which every transform then changes."""
    policy = Policy.of(config)
    cost = Cost()
    for parameter in sketch.parameters:
        dtype = policy.held(parameter.dtype)
        if parameter.is_trained:
            states = states_per_parameter(config, is_whole=parameter.is_whole)
            cost += trained(parameter.numel, dtype, policy, states=states)
        else:
            cost += Cost(parameters=parameter.numel * bytes_per_element(dtype))
    return cost


def trained(count: int, dtype: str, policy: Policy, *, states: int) -> Cost:
    """The cost of so many trained elements where a rank holds everything that belongs to them.

    Parameters that are as wide as their masters are their own.
    """
    master = wider(policy.masters, dtype)
    return Cost(
        parameters=count * bytes_per_element(dtype),
        gradients=count * bytes_per_element(wider(policy.accumulation, dtype)),
        masters=count * bytes_per_element(master) if master != dtype else 0,
        states=count * bytes_per_element(wider(policy.states, master)) * states,
    )


def states_per_parameter(config: Config, *, is_whole: bool = False) -> int:
    """How many full-size tensors the configured optimizer keeps for each parameter, or for each that is held whole."""
    if config.optimizer is None:
        return 2
    name, arguments = config.optimizer.type.lower(), config.optimizer.params
    kept = next((count for rule, count in STATES.items() if name.endswith(rule)), 2)
    if is_whole and name in WHOLE_STATES:
        return WHOLE_STATES[name]
    return kept + sum(bool(arguments.get(key)) for key in FURTHER_STATES)
