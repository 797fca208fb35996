"""Values for a model that was built on the meta device: each rank reads, from files, what it keeps of its own part.

By then a rank has let go of what others run (`Plan.take`). Of the rest it reads one parameter after the other: all of
it, its part where the parameter is cut, or its shard at ZeRO stage 3. So the model is whole on no rank at any time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mizzen.accelerator import get_accelerator
from mizzen.checkpoint.weight_files import WeightFiles
from mizzen.comm.mesh import Mesh
from mizzen.config.layout import SHARD_AXES
from mizzen.config.schema import Config
from mizzen.errors import CheckpointError
from mizzen.log import get_logger
from mizzen.model.home import Site
from mizzen.offload.built_shards import keep_on
from mizzen.parallel.zero.full.init import Bench, adopt_shard
from mizzen.parallel.zero.full.sharded_parameter import chunk, shard_dim
from mizzen.plan.build import Plan
from mizzen.wording import and_more, byte_size


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """What files may call the tensors of a model."""

    names: Mapping[str, tuple[str, ...]]
    """All names of each parameter, under each of them."""
    prefix: str
    """Files of transformers may leave out the part of a name that is the model without its head."""

    @classmethod
    def of(cls, plan: Plan, model: nn.Module) -> "ParameterNames":
        """The names of a whole model."""
        names = {name: p.names for p in plan.sketch.parameters for name in p.names}
        return cls(names, str(getattr(model, "base_model_prefix", "") or ""))

    def candidates(self, name: str) -> Iterable[str]:
        """The names under which a tensor may be in a file, the likeliest first."""
        known = dict.fromkeys((name, *self.names.get(name, ())))
        yield from known
        if self.prefix:
            yield from (each.removeprefix(f"{self.prefix}.") for each in known)


def fill_from_files(model: nn.Module, plan: Plan, mesh: Mesh) -> frozenset[str]:
    """Give tensors without memory the values that files have for them; returns the parameters that were filled.

    Nothing is done where the model has all its values, or no folder is known: what is then missing is refused later.
    """
    empty = {name: each for name, each in model.named_parameters() if each.is_meta}
    buffers = {name: each for name, each in model.named_buffers() if each.is_meta}
    folder = weights_folder(model, plan.resolved.config)
    if not (empty or buffers) or folder is None:
        return frozenset()
    files, names = WeightFiles.open(folder), ParameterNames.of(plan, model)
    found = {name: files.find(names.candidates(name)) for name in (*empty, *buffers)}
    _set_computed_buffers(model, {name for name in buffers if found[name] is None})
    if missing := [name for name in empty if found[name] is None]:
        raise CheckpointError(
            f"{folder}: has no {and_more(missing, 3)}, and the model has no values for it: it is on the meta device. "
            "Build what is new in the model on a real device"
        )
    reading = _ParameterReader(files, plan, mesh)
    for name, buffer in buffers.items():
        if (there := found[name]) is not None:
            _set_buffer(model, name, files.read(there, buffer.shape).to(buffer.dtype))
    total = sum(reading.fill(name, empty[name], str(found[name])) for name in empty)
    whole = sum(p.nbytes for p in plan.sketch.parameters)
    get_logger().info(f"read {byte_size(total)} of {byte_size(whole)} from {folder}")
    return frozenset(empty)


def weights_folder(model: nn.Module, config: Config) -> Path | None:
    """Where a model's values are: as the configuration says, or the folder that a model of transformers comes from."""
    if config.checkpoint.weights is not None:
        return Path(config.checkpoint.weights)
    said = vars(vars(model).get("config", object)).get("_name_or_path")
    return Path(said) if isinstance(said, str) and said and Path(said).is_dir() else None


class _ParameterReader:
    """Parameters on their way from files into a model."""

    def __init__(self, files: WeightFiles, plan: Plan, mesh: Mesh) -> None:
        self.files = files
        self.mesh = mesh
        self.cut = plan.cut_here
        self.sharded = plan.moved_by_apply - self.cut.keys()
        self.device = get_accelerator().device()
        self.keep = keep_on(None, plan.resolved.config) or (lambda shard: shard.to(self.device))
        self.bench = Bench(mesh.axes(*SHARD_AXES), None, self.device, self.keep) if self.sharded else None

    def fill(self, name: str, parameter: nn.Parameter, there: str) -> int:
        """Read what this rank keeps of a parameter; returns its bytes."""
        shape, dtype = parameter.shape, parameter.dtype
        if self.bench is not None and name in self.sharded and shape.numel():
            value = self.keep(self._shard(there, shape).to(dtype))
            _become(parameter, torch.empty(0, dtype=dtype, device=self.device))
            adopt_shard(parameter, name, value, shape, self.bench)
        else:
            sketch = self.cut.get(name)
            site = Site(sketch.shape, sketch.home, self.mesh.layout, self.mesh.rank) if sketch is not None else None
            value = self.files.read_site(there, site) if site is not None else self.files.read(there, shape)
            value = value.to(self.device, dtype)
            _become(parameter, value)
        return value.numel() * value.element_size()

    def _shard(self, there: str, shape: torch.Size) -> Tensor:
        axis = self.mesh.axes(*SHARD_AXES)
        dim = shard_dim(shape, axis.size())
        sides = [[(0, size)] if size else [] for size in shape]
        first, last = chunk(shape[dim], axis)
        sides[dim] = [(first, last)] if first < last else []
        return self.files.read(there, shape, sides)


def _become(parameter: nn.Parameter, value: Tensor) -> None:
    """Let a parameter have memory, and stay the object that modules and optimizers know."""
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, value)


def _set_computed_buffers(model: nn.Module, names: Iterable[str]) -> None:
    """Let a model of transformers compute the buffers that no file has, such as the angles of rotary embeddings.

    Parameters are on the meta device at this time, where its `_init_weights` does nothing to them.
    """
    holders: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        holders.setdefault(path, []).append(leaf)
    initialize: Any = getattr(model, "_init_weights", None)
    for path, leaves in holders.items():
        module, untouched = model.get_submodule(path), {}
        for leaf in leaves:
            meta = getattr(module, leaf)
            mark = torch.nan if meta.is_floating_point() else True if meta.dtype is torch.bool else -12345
            untouched[leaf] = torch.full(meta.shape, mark, dtype=meta.dtype)
            setattr(module, leaf, untouched[leaf].clone())
        if initialize is not None:
            initialize(module)
        for leaf in leaves:
            if torch.equal(_bits(getattr(module, leaf)), _bits(untouched[leaf])):
                raise CheckpointError(
                    f"'{path + '.' if path else ''}{leaf}' is on the meta device, is in no file and cannot be computed "
                    "here: build the model with real buffers, its parameters alone on the meta device, as "
                    "accelerate's init_empty_weights does"
                )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
