"""`mizzen.tensor`: layers that are cut over tensor-parallel ranks, under the names and with the signatures of Megatron.

A face: the work is in `parallel/tensor/`. Every call takes the ranks that share a matrix as `tp_group`; without it
they are those of `initialize_model_parallel`, or of the engine that was made last, and this rank alone without either.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mizzen.accelerator import get_accelerator
from mizzen.comm.groups import is_initialized
from mizzen.comm.join import init_distributed
from mizzen.comm.mesh import Mesh, Mpu
from mizzen.config.layout import Layout
from mizzen.errors import UsageError
from mizzen.parallel.tensor import exchange
from mizzen.parallel.tensor.batches import broadcast_batch
from mizzen.parallel.tensor.cross_entropy import vocab_cross_entropy
from mizzen.parallel.tensor.layers import (
    ColumnCutLinear,
    LayerOptions,
    RowCutLinear,
    VocabCutEmbedding,
    mark_sequence_parallel,
    vocab_logits,
)
from mizzen.parallel.tensor.rng import differing

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_model_parallel",
    "mark_sequence_parallel",
    "parallel_lm_logits",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]

Fill = Callable[[Tensor], Any]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, context_parallel_size: int = 1
) -> Mpu:
    """Lay a mesh over the ranks of the job before a model is built; every rank calls this.

    What it returns goes to `mizzen.initialize(mpu=...)`.
    """
    world = init_distributed(verbose=False)
    layout = Layout.fit(
        world.size, tp=tensor_model_parallel_size, pp=pipeline_model_parallel_size, sp=context_parallel_size
    )
    return Mpu(Mesh.build(layout, device_type=get_accelerator().name))


def get_tensor_model_parallel_group() -> Any:
    """The ranks that share a matrix; None where this rank shares it with nobody."""
    mesh = Mesh.current() if is_initialized() else None
    return None if mesh is None or mesh.layout.tp == 1 else mesh.group("tp")


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share a matrix."""
    return LayerOptions(get_tensor_model_parallel_group()).ranks


def get_tensor_model_parallel_rank() -> int:
    """The place of this rank among those that share a matrix."""
    return LayerOptions(get_tensor_model_parallel_group()).rank


def _group(given: Any) -> Any:
    return get_tensor_model_parallel_group() if given is None else given


def _options(given: Any, fill: Fill, config: Any, *, sequence: bool, **others: Any) -> LayerOptions:
    """Options of a layer, from its arguments and from Megatron's configuration object where there is one."""
    said = (
        {} if config is None else {name: getattr(config, name, None) for name in ("sequence_parallel", "params_dtype")}
    )
    dtype, dim = others.pop("params_dtype") or said.get("params_dtype"), others.pop("sequence_dim")
    is_cut = sequence or bool(said.get("sequence_parallel"))
    return LayerOptions(_group(given), fill, dtype, sequence_dim=dim if is_cut else None, **others)


class ColumnParallelLinear(ColumnCutLinear):
    """A linear layer each of whose tensor-parallel ranks has some output features. Returns (output, bias not added).

    With `sequence_parallel` its input is this rank's part of the sequence, along `sequence_dim`. `stride` is the number
    of matrices in one, such as 3 for Q, K and V. Weights follow from the random numbers of the process, which ranks
    have alike, or with a `name` from that and the seed. `config` is an object with Megatron's names for these.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Fill = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        seed: int | None = None,
        config: Any = None,
        tp_group: Any = None,
    ) -> None:
        _refuse_kept(keep_master_weight_for_test)
        options = _options(
            tp_group,
            init_method,
            config,
            sequence=sequence_parallel,
            sequence_dim=sequence_dim,
            params_dtype=params_dtype,
            device=device,
            name=name,
            seed=seed,
            stride=stride,
        )
        super().__init__(
            (input_size, output_size), options, bias=bias, gather_output=gather_output, skip_bias_add=skip_bias_add
        )


class RowParallelLinear(RowCutLinear):
    """A linear layer each of whose tensor-parallel ranks has some input features. Returns (output, bias not added).

    Its input is this rank's features with `input_is_parallel`, else all of them. With `sequence_parallel` its output is
    this rank's part of the sequence. The other arguments are those of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Fill = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        seed: int | None = None,
        config: Any = None,
        tp_group: Any = None,
    ) -> None:
        _refuse_kept(keep_master_weight_for_test)
        options = _options(
            tp_group,
            init_method,
            config,
            sequence=sequence_parallel,
            sequence_dim=sequence_dim,
            params_dtype=params_dtype,
            device=device,
            name=name,
            seed=seed,
            stride=stride,
        )
        super().__init__(
            (input_size, output_size),
            options,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
        )


class VocabParallelEmbedding(VocabCutEmbedding):
    """An embedding each of whose tensor-parallel ranks has some rows; a vocabulary need not divide among them.

    With `reduce_scatter_embeddings` its output is this rank's part of the sequence, along `sequence_dim`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Fill = nn.init.xavier_normal_,
        reduce_scatter_embeddings: bool = False,
        *,
        sequence_dim: int = 0,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        name: str | None = None,
        seed: int | None = None,
        config: Any = None,
        tp_group: Any = None,
    ) -> None:
        options = _options(
            tp_group,
            init_method,
            config,
            sequence=reduce_scatter_embeddings,
            sequence_dim=sequence_dim,
            params_dtype=params_dtype,
            device=device,
            name=name,
            seed=seed,
        )
        super().__init__((num_embeddings, embedding_dim), options)


def _refuse_kept(is_asked: bool) -> None:
    if is_asked:
        raise UsageError("keep_master_weight_for_test=True: the whole weight of a layer that is cut is not kept")


def parallel_lm_logits(
    input_: Tensor,
    word_embeddings_weight: Tensor,
    parallel_output: bool = True,
    bias: Tensor | None = None,
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    tp_group: Any = None,
) -> Tensor:
    """Logits by the table of a `VocabParallelEmbedding`: this rank's with `parallel_output`, else those of all."""
    return vocab_logits(
        input_,
        word_embeddings_weight,
        _group(tp_group),
        bias=bias,
        gather_output=not parallel_output,
        sequence_dim=sequence_dim if sequence_parallel else None,
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    tp_group: Any = None,
) -> Tensor:
    """The loss of every token from this rank's logits, which are not gathered; 0 for targets to be ignored.

    `vocab_size` is needed where the vocabulary does not divide among the ranks. Smoothing is torch's.
    """
    return vocab_cross_entropy(
        vocab_parallel_logits,
        target,
        _group(tp_group),
        size=vocab_size,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, tp_group: Any = None
) -> dict[str, Tensor]:
    """The tensors of these keys from the first tensor-parallel rank; `data` of the others is not looked at."""
    return broadcast_batch(keys, data, datatype, _group(tp_group))


class RandomNumberTracker:
    """Random numbers that differ among tensor-parallel ranks, for the dropout of activations that are cut."""

    @contextmanager
    def fork(self, name: str = "", tp_group: Any = None) -> Iterator[None]:
        """Inside, each of these ranks draws other numbers. They follow from the stream that the ranks have alike."""
        with differing(_group(tp_group)):
            yield


def get_cuda_rng_tracker() -> RandomNumberTracker:
    """`with get_cuda_rng_tracker().fork(): ...` for dropout that differs among ranks; it needs no seeding."""
    return RandomNumberTracker()


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """As it is; gradients are summed."""
    return exchange.copy_in(input_, _group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """The sum over the ranks."""
    return exchange.sum_out(input_, _group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """This rank's part of the last dimension."""
    return exchange.split_along(input_, -1, _group(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """The parts of the last dimension of all ranks."""
    return exchange.gather_along(input_, -1, _group(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """This rank's part of the first dimension."""
    return exchange.split_along(input_, 0, _group(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None
) -> Tensor:
    """The parts of the first dimension of all ranks: for layers that are cut, or for what all ranks do alike."""
    gather = exchange.gather_sequence if tensor_parallel_output_grad else exchange.gather_along
    return gather(input_, 0, _group(group))


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """This rank's part of the first dimension of the sum over the ranks."""
    return exchange.scatter_sequence(input_, 0, _group(group))
