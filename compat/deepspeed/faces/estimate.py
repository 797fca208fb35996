"""How much memory training takes, by a rule of thumb. `mizzen plan` says it for a file and a number of ranks."""

from typing import Any

from torch import nn

PARAMETER, STATES, GRADIENT = 2, 12, 4
"""Bytes per parameter: as it computes, its master and two states, its gradient in fp32."""


def estimate_zero2_model_states_mem_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, **_: Any
) -> tuple[float, float]:
    """(bytes of the host, bytes of a GPU) for a rank at stage 2, without activations."""
    ranks = num_gpus_per_node * num_nodes
    return 0.0, total_params * PARAMETER + total_params * (STATES + GRADIENT) / ranks


def estimate_zero3_model_states_mem_needs(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, **_: Any
) -> tuple[float, float, float]:
    """(bytes of the host, bytes of a GPU, those of the largest layer) for a rank at stage 3, without activations."""
    ranks, largest = num_gpus_per_node * num_nodes, 2 * PARAMETER * largest_layer_params
    return 0.0, largest + total_params * (PARAMETER + STATES + GRADIENT) / ranks, largest


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it."""
    _, gpu = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes)
    _print(2, total_params, num_gpus_per_node, num_nodes, gpu)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print it."""
    _, gpu, _ = estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    _print(3, total_params, num_gpus_per_node, num_nodes, gpu)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(_count(model), num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it for a model."""
    largest = max((_count(module, recurse=False) for module in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(_count(model), largest, num_gpus_per_node, num_nodes)


def _count(model: nn.Module, *, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in model.parameters(recurse=recurse))


def _print(stage: int, count: int, gpus: int, nodes: int, gpu: float) -> None:
    where = f"{nodes} nodes with {gpus} GPUs each"
    print(f"stage {stage}, {count:,} parameters, {where}: {gpu / 1e9:.2f} GB per GPU, and activations")  # noqa: T201
    print("offload: not built yet; `mizzen plan` says more")  # noqa: T201
