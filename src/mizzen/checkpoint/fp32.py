"""A checkpoint's weights in fp32, from whatever wrote it: as a state dict, as files, or into a model.

The names and arguments are those that DeepSpeed's users know. Masters come before the model's own 16-bit values.
"""

from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from mizzen.checkpoint.export import files_of, waiting_for, with_aliases
from mizzen.checkpoint.open import open_source
from mizzen.checkpoint.source import Source
from mizzen.checkpoint.weights_out import Waiting, write_weights
from mizzen.errors import CheckpointError
from mizzen.log import get_logger

Model = TypeVar("Model", bound=nn.Module)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, Waiting]:
    """All weights in fp32, and integer buffers as they are. Lazily: values whose `contiguous()` reads the tensor."""
    found = fp32_weights(open_source(checkpoint_dir, tag), frozen=not exclude_frozen_parameters)
    if lazy_mode:
        return found
    # A weight with two names is one Waiting, and becomes one tensor.
    read = {id(waiting): waiting for waiting in found.values()}
    tensors = {number: waiting.read() for number, waiting in read.items()}
    return {name: tensors[id(waiting)] for name, waiting in found.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write all weights in fp32 into a folder, in shards, with an index if there are several."""
    source = open_source(checkpoint_dir, tag)
    found = fp32_weights(source, frozen=not exclude_frozen_parameters)
    written = write_weights(output_dir, found, shard=max_shard_size, safe=safe_serialization, read=files_of(source))
    get_logger().info(f"{output_dir}: wrote {len(found)} tensors in {', '.join(path.name for path in written)}")


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: str | Path, tag: str | None = None) -> Model:
    """Move a model to the CPU and give it the checkpoint's weights; names that only one side has are told."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    own = model.state_dict()
    wrong = [
        f"{name}: {list(own[name].shape)} here, {list(value.shape)} there"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]
    if wrong or not own.keys() & state.keys():
        reason = "; ".join(wrong[:8]) or f"no name is in both; it has {', '.join([*state][:4])}"
        raise CheckpointError(f"{checkpoint_dir}: made for another model: {reason}")
    result = model.load_state_dict(state, strict=False)
    told = {
        "of the model are not in the checkpoint": result.missing_keys,
        "of the checkpoint are not in the model": result.unexpected_keys,
    }
    for what, names in told.items():
        if names:
            get_logger().warning(f"{checkpoint_dir}: {len(names)} names {what}: {', '.join(names[:8])}")
    return model


def fp32_weights(source: Source, *, frozen: bool = True) -> dict[str, Waiting]:
    """Each weight and buffer once per name; fp32 if it has a fraction. Names that mean one weight share a Waiting."""
    left_out = source.facts().get("frozen")
    if isinstance(left_out, list | tuple) and not all(isinstance(name, str) for name in left_out):
        raise CheckpointError("the facts of the checkpoint cannot be used: 'frozen' is no list of names")
    skipped = set(left_out) if isinstance(left_out, list | tuple) and not frozen else set()
    found = waiting_for(source, "fp32")
    return with_aliases(source, {name: waiting for name, waiting in found.items() if name not in skipped})
