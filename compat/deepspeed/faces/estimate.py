"""How much memory training takes, by a rule of thumb. `mizzen plan` says it for a file and a number of ranks."""

from collections.abc import Iterable

from torch import nn

PARAMETER, STATES, GRADIENT = 2, 12, 4
"""Bytes per parameter: as it computes, its master and two states, its gradient in fp32."""
BUILT = 4
"""Bytes per parameter of a model that a rank has just built, in fp32."""


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a host, bytes of a GPU) at stage 2, without activations."""
    ranks, states = num_gpus_per_node * num_nodes, total_params * (STATES + GRADIENT)
    built = total_params * BUILT * num_gpus_per_node
    host = max(built, states / num_nodes) if cpu_offload else built
    gpu = total_params * PARAMETER + (0 if cpu_offload else states / ranks)
    return int(host * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of a host, bytes of a GPU, those of the largest layer) at stage 3, without activations."""
    ranks, largest = num_gpus_per_node * num_nodes, 2 * PARAMETER * largest_layer_params
    resting = (STATES + GRADIENT) * cpu_offload + PARAMETER * (cpu_offload and cpu_offload_params)
    built = BUILT * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    host = max(built, total_params * resting / num_nodes)
    gpu = largest + total_params * (PARAMETER + STATES + GRADIENT - resting) / ranks
    return int(host * additional_buffer_factor), int(gpu), largest


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it, with and without offload."""
    sizes = (total_params, num_gpus_per_node, num_nodes)
    rows = []
    for offload in (True, False):
        found = estimate_zero2_model_states_mem_needs(*sizes, offload, additional_buffer_factor)
        rows.append((f"offload_optimizer={_place(offload)}", found))
    _print(2, sizes, rows)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print it, with and without offload, and with models that are sharded as they are built."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                *(total_params, largest_layer_params, num_gpus_per_node, num_nodes),
                *(optimizer, params, zero_init, additional_buffer_factor),
            )
            words = f"offload_optimizer={_place(optimizer)}, offload_param={_place(params)}, zero.Init={zero_init}"
            rows.append((words, (host, gpu)))
    _print(3, (total_params, num_gpus_per_node, num_nodes), rows)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _count(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print it for a model."""
    largest = max((_count(module, recurse=False) for module in model.modules()), default=0)
    estimate_zero3_model_states_mem_needs_all_cold(
        _count(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def _count(model: nn.Module, *, recurse: bool = True) -> int:
    return sum(parameter.numel() for parameter in model.parameters(recurse=recurse))


def _place(offload: bool) -> str:
    return "cpu" if offload else "none"


def _print(stage: int, sizes: tuple[int, int, int], rows: Iterable[tuple[str, tuple[int, int]]]) -> None:
    count, gpus, nodes = sizes
    print(f"stage {stage}, {count:,} parameters, {nodes} nodes with {gpus} GPUs each, without activations:")  # noqa: T201
    for words, (host, gpu) in rows:
        print(f"{host / 2**30:9.2f} GB per host, {gpu / 2**30:7.2f} GB per GPU: {words}")  # noqa: T201
    print("offload is not built yet; `mizzen plan` says more")  # noqa: T201
