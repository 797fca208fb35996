"""Keys that were given and change nothing in the configuration they stand in: which, and why."""

from collections.abc import Callable
from typing import Final, NamedTuple

from mizzen.config.migrate import Found
from mizzen.config.schema import Config
from mizzen.config.section import Section, nest_in


class _Need(NamedTuple):
    """What the keys at or below a path need to have an effect."""

    path: str
    is_met: Callable[[Config], bool]
    reason: str


def _has_tensor_parallelism(config: Config) -> bool:
    tensor = config.tensor_parallel
    return max(tensor.autotp_size, tensor.tensor_parallel.tp_size) > 1


_AT_STAGE_3: Final = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "leaf_module",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zeropp_loco_param",
)
_NEEDS: Final = (
    *(
        _Need(
            f"zero_optimization.{key}",
            lambda config: config.zero_optimization.stage == 3,
            "it is for zero_optimization.stage 3",
        )
        for key in _AT_STAGE_3
    ),
    _Need(
        "gradient_predivide_factor",
        lambda config: not config.prescale_gradients,
        "with prescale_gradients all of the division comes before the sum",
    ),
    _Need(
        "use_data_before_expert_parallelism",
        lambda config: config.expert_parallel.enabled,
        "expert_parallel.enabled is false",
    ),
    _Need(
        "seq_parallel_communication_data_type",
        lambda config: config.sequence_parallel_size > 1,
        "sequence_parallel_size is 1",
    ),
    _Need("tensor_parallel", _has_tensor_parallelism, "no size in tensor_parallel is above 1"),
)

_COMPRESSION: Final = "compression_training."


def why_inert(found: Found, config: Config) -> str | None:
    """Why a key that was given changes nothing; None where it does, or holds its default."""
    if not is_changed(found, config):
        return None
    if found.fate.kind == "no_effect":
        return found.fate.reason
    nest = nest_in(found.field.annotation)
    if found.fate.kind != "read" or (nest and nest.kind == "one"):  # a section is told of key by key
        return None
    unmet = (need for need in _NEEDS if f"{found.path}.".startswith(f"{need.path}.") and not need.is_met(config))
    return next((need.reason for need in unmet), None) or _switched_off(found.path, config)


def is_changed(found: Found, config: Config) -> bool:
    """Whether a key holds another value than its default."""
    value = config.at(found.path)
    return value is not None and value != found.field.get_default(call_default_factory=True)


def _switched_off(path: str, config: Config) -> str | None:
    """The switch of a section around a key that is off, outermost first."""
    parts = path.split(".")
    if path.startswith(_COMPRESSION) and parts[2:3] == ["different_groups"]:  # their switch stands beside them
        switch = f"{_COMPRESSION}{parts[1]}.shared_parameters.enabled"
        return None if config.at(switch) else _is_off(switch, config)
    for depth in range(1, len(parts)):
        around = ".".join(parts[:depth])
        section = config.at(around)
        is_off = isinstance(section, Section) and vars(section).get("enabled") is False
        is_used = around == "fp16" and config.computes_in_fp16
        if is_off and not is_used and path != f"{around}.enabled":
            return _is_off(f"{around}.enabled", config)
    return None


def _is_off(switch: str, config: Config) -> str:
    """Why a switch is off, in the words of the file."""
    if config.is_auto(switch):
        return f'{switch} is "auto", which is false unless a client says otherwise'
    return f"{switch} is {'false' if config.is_given(switch) else 'absent'}"
