"""DeepSpeed's checkpoint folders as a Source: ZeRO 0 to 3, bf16, pipeline layers, experts, universal.

Names of files say who wrote which part. Names of tensors are those of the saved module. Pipeline layers are named by
their numbers, as in the module that wrote them; experts are numbered through over the ranks. What cannot be told for
certain is left out and listed in the facts. How ZeRO's flat shards are put together is in `optimizer_states.py`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mizzen.checkpoint.foreign import torch_file
from mizzen.checkpoint.foreign.extent import Folder
from mizzen.checkpoint.foreign.optimizer_states import (
    Shard,
    add_flat,
    add_numbered,
    add_pieces,
    shapes_of,
    shared_names,
    with_masters,
)
from mizzen.checkpoint.foreign.source import FlatRange, ForeignSource, JoinedTensor, as_recipe, shaped
from mizzen.checkpoint.foreign.values import TensorRef, count_of, entries, expect, name_in, number_in, shape_of, tensors
from mizzen.errors import CheckpointError

PATTERNS: Final = {
    "model": re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "shard": re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "optimizer": re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
    "layer": re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<mp>\d+)-)?model_states\.pt"),
    "expert": re.compile(r"(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"),
    "expert_optimizer": re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"),
}


@dataclass(frozen=True, slots=True)
class TagFiles:
    """Names of files by what they hold: `mp` is a pipeline stage or a tensor slice, `dp` a rank of ZeRO."""

    model: dict[int, str] = field(default_factory=dict)
    """mp -> file, where parameters are whole."""
    shard: dict[int, dict[int, str]] = field(default_factory=dict)
    """mp -> dp -> file, at stage 3."""
    optimizer: dict[int, dict[int, str]] = field(default_factory=dict)
    """mp -> dp -> file."""
    layer: dict[int, str] = field(default_factory=dict)
    """Number of a pipeline's layer -> file."""
    expert: list[str] = field(default_factory=list)
    expert_optimizer: list[str] = field(default_factory=list)
    universal: bool = False
    """Whether there is a folder `zero`, with whole states."""

    @classmethod
    def of(cls, folder: Folder) -> "TagFiles":
        """Sort the names in a folder; others are left alone."""
        names = folder.names()
        found = cls(universal="zero" in names and (folder.path / "zero").is_dir())
        for name in names:
            for kind, pattern in PATTERNS.items():
                if match := pattern.fullmatch(name):
                    found._take(kind, name, {key: int(value) for key, value in match.groupdict().items() if value})
        for what, files in (("shard", found.shard), ("optimizer", found.optimizer)):
            for mp, ranks in files.items():
                _check_ranks(folder, f"{what} files of model rank {mp}", ranks)
            _check_ranks(folder, f"{what} files by model rank", files)
        _check_ranks(folder, "model files", found.model)
        return found

    def _take(self, kind: str, name: str, number: dict[str, int]) -> None:
        match kind:
            case "model":
                self.model[number["mp"]] = name
            case "shard":
                self.shard.setdefault(number["mp"], {})[number["dp"]] = name
            case "optimizer":
                self.optimizer.setdefault(number["mp"], {})[number["dp"]] = name
            case "layer":
                if number.get("mp", 0):
                    raise CheckpointError(f"{name}: {_SLICED}")
                self.layer[number["layer"]] = name
            case "expert":
                if number["mp"]:
                    raise CheckpointError(f"{name}: {_SLICED}")
                self.expert.append(name)
            case _:
                self.expert_optimizer.append(name)

    @property
    def is_empty(self) -> bool:
        """Whether this is no checkpoint of DeepSpeed's."""
        return not (self.model or self.shard)

    def refuse_slices(self, folder: Folder) -> None:
        """Tensor-parallel slices cannot be joined without knowing along which dimension each was cut."""
        slices = max(len(self.model), len(self.shard))
        if slices > 1 and not self.layer and not self.universal:
            raise CheckpointError(f"{folder.path}: {slices} model ranks without layer files: {_SLICED}")


_SLICED: Final = (
    "tensor-parallel slices; convert the checkpoint with DeepSpeed's ds_to_universal, which knows how each tensor was "
    "cut, and import the result"
)


def _check_ranks(folder: Folder, what: str, ranks: Iterable[int]) -> None:
    found = {*ranks}
    missing = [rank for rank in range(len(found)) if rank not in found]
    if missing:
        raise CheckpointError(
            f"{folder.path}: {what}: there are {len(found)}, up to rank {max(found)}, but none of rank {missing[0]}"
        )


RESERVED: Final = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "num_experts"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers"),
        *("autoep_layers", "compression_states", "universal_checkpoint_version"),
    }
)
"""Keys of a model file that are the engine's; all others are the client's."""
TIED: Final = re.compile(r"tied_modules\.[^.]+\.(.+)")


@dataclass(slots=True)
class _Reading:
    """What is known while a folder is read."""

    folder: Folder
    files: TagFiles
    inert: tuple[str, ...]
    source: ForeignSource
    heads: list[Mapping[str, object]] = field(default_factory=list)
    """The model file of each model rank; at stage 3 that of data rank 0."""

    def load(self, name: str) -> Mapping[str, object]:
        """One file's dict."""
        return entries(torch_file.load(self.folder.file(name), inert=self.inert), str(self.folder.path / name))

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters, of all pipeline stages."""
        where = str(self.folder.path)
        groups = [group for head in self.heads for group in shapes_of(head, where)]
        return {name: shape for group in groups for name, shape in group.items()}

    @property
    def shared(self) -> Mapping[str, object]:
        """Second names of parameters -> the names under which they were saved. Without ZeRO only the bytes tell."""
        head, where = self.heads[0], str(self.folder.path)
        if head.get("shared_params") is None and isinstance(head.get("module"), dict):
            return shared_names(head["module"], where)
        return entries(head.get("shared_params"), f"{where}: shared_params")

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers."""
        listed = (head.get("buffer_names") or [] for head in self.heads)
        where = f"{self.folder.path}: buffer_names"
        return {name_in(name, where) for names in listed for name in expect(names, list, where)}


def open_deepspeed(folder: Folder, files: TagFiles, inert: tuple[str, ...]) -> ForeignSource:
    """Collect what a tag's folder holds."""
    files.refuse_slices(folder)
    reading = _Reading(folder, files, inert, ForeignSource(folder.path, "DeepSpeed checkpoint"))
    first = files.model or {mp: ranks[0] for mp, ranks in files.shard.items()}
    reading.heads += [reading.load(first[mp]) for mp in sorted(first)]
    if any(head.get("ds_autoep_layers") or head.get("autoep_layers") for head in reading.heads):
        raise CheckpointError(f"{folder.path}: experts made by AutoEP are not read")
    stage = _optimizer(reading)
    _model(reading)
    _share(reading)
    _facts(reading, stage)
    return reading.source


def _model(reading: _Reading) -> None:
    if reading.files.layer:
        _layers(reading)
    elif reading.files.shard:
        _sharded_model(reading)
    elif len(reading.heads) == 1:
        found, others = tensors(reading.heads[0].get("module"), f"{reading.folder.path}: module")
        for name, ref in found.items():
            reading.source.add("model", name, ref, where=reading.folder.path)
        reading.source.left_out += [f"model/{name}: not a tensor" for name in others]
    else:
        _masters_as_model(reading)
    for name in reading.files.expert:
        for key, ref in tensors(reading.load(name), name)[0].items():
            reading.source.add("model", key, ref, where=reading.folder.path / name)


def _masters_as_model(reading: _Reading) -> None:
    """Where the model's own values are not whole, the fp32 ones stand for them."""
    for (kind, name), recipe in [*reading.source.table.items()]:
        if kind == "master" and ("model", name) not in reading.source.table:
            reading.source.add("model", name, recipe, where=reading.folder.path)


def _layers(reading: _Reading) -> None:
    """Pipeline layers: `3.weight`, or the name under which a tied layer's weights were trained."""
    trained = reading.trained
    tied: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in trained.items():
        if match := TIED.fullmatch(name):
            tied.setdefault((match[1], shape), []).append(name)
    paths = [""] * (max(reading.files.layer) + 1)
    for number, name in sorted(reading.files.layer.items()):
        paths[number] = str(number)
        for key, ref in tensors(reading.load(name), name)[0].items():
            own, shared = f"{number}.{key}", tied.get((key, ref.shape), [])
            if own not in trained and len(shared) == 1:
                own = shared[0]
                paths[number] = own.removesuffix(f".{key}")
            if ("model", own) not in reading.source.table:
                reading.source.add("model", own, ref, where=reading.folder.path / name)
    reading.source.notes["layers"] = paths


def _sharded_model(reading: _Reading) -> None:
    """Stage 3: buffers from one rank, frozen parameters in pieces, trained ones as their fp32 values."""
    head, where = reading.heads[0], str(reading.folder.path)
    found, _ = tensors(head.get("module"), f"{where}: module")
    buffers = reading.buffers
    for name in (name for name in found if name in buffers):
        reading.source.add("model", name, found[name], where=where)
    _masters_as_model(reading)
    shapes = entries(head.get("frozen_param_shapes"), f"{where}: frozen_param_shapes")
    if not shapes:
        return
    files = reading.files.shard[0]
    ranks = [reading.load(files[rank]).get("frozen_param_fragments") for rank in sorted(files)]
    for name, value in shapes.items():
        shape = shape_of(value, f"{where}: frozen {name}")
        rest, parts = math.prod(shape), []
        for rank, fragments in enumerate(ranks):
            file = f"{where}/{files[rank]}: frozen {name}"
            piece = expect(entries(fragments, file).get(name), TensorRef, file)
            parts.append(FlatRange(piece, 0, min(piece.numel, rest)))
            rest -= parts[-1].count
        reading.source.add("model", name, JoinedTensor(tuple(parts), shape, f"{where}: frozen {name}"), where=where)


def _optimizer(reading: _Reading) -> object:
    """Add the optimizer's states; returns ZeRO's stage."""
    files, source = reading.files, reading.source
    if files.universal:
        return _universal(reading)
    if not files.optimizer:
        _unsharded(reading)
        return 0
    stage: object = None
    config = reading.heads[0].get("ds_config")
    if files.expert and isinstance(config, dict) and config.get("use_data_before_expert_parallelism"):
        raise CheckpointError(
            f"{reading.folder.path}: experts placed by use_data_before_expert_parallelism are not read: which rank has "
            "which of them is not known for certain; load and save the checkpoint without that key"
        )
    for mp, ranks in sorted(files.optimizer.items()):
        shards = [_shard(reading, ranks[rank]) for rank in sorted(ranks)]
        shapes = shapes_of(reading.heads[min(mp, len(reading.heads) - 1)], str(reading.folder.path))
        stage = number_in(shards[0].state.get("zero_stage", 1))
        (add_pieces if stage == 3 else add_flat)(source, shards, shapes)
        source.notes.setdefault("optimizer", _hyperparameters(shards[0].state))
    if files.expert_optimizer:
        source.left_out.append("states of experts without ZeRO: nothing says which parameter each belongs to")
    return stage


def _shard(reading: _Reading, name: str) -> Shard:
    path = str(reading.folder.path / name)
    return Shard(path, entries(reading.load(name).get("optimizer_state_dict"), f"{path}: optimizer_state_dict"))


def _hyperparameters(state: Mapping[str, object]) -> dict[str, object]:
    """Learning rates and the like, and the loss scaler: all of an optimizer that is no tensor."""
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
    groups = base.get("param_groups") if isinstance(base, dict) else state.get("param_groups")
    keys = ("loss_scaler", "dynamic_loss_scale", "cur_scale", "cur_iter", "overflow", "clip_grad")
    return {"param_groups": groups} | {key: state[key] for key in keys if key in state}


def _unsharded(reading: _Reading) -> None:
    """Without ZeRO the states are numbered, in the order in which the optimizer was given the parameters."""
    if reading.files.expert_optimizer:
        reading.source.left_out.append("optimizer states: nothing says which expert each belongs to")
        return
    head, where = reading.heads[0], str(reading.folder.path)
    state = entries(head.get("optimizer"), f"{where}: optimizer")
    if not state:
        return
    reading.source.notes["optimizer"] = _hyperparameters(state)
    if "fp32_groups" in state:
        state = with_masters(state, where)
    if len(reading.heads) > 1 or "param_groups" not in state:
        reading.source.left_out.append("optimizer states: saved without ZeRO in a form that does not name parameters")
        return
    add_numbered(reading.source, head.get("module"), state, skip=reading.buffers, where=where)


def _universal(reading: _Reading) -> object:
    """`zero/<name>/<state>.pt`: whole tensors, in a dict or alone, flat when they come from stage 3."""
    folder, trained = reading.folder.folder("zero"), reading.trained
    for name in folder.names():
        if not (folder.path / name).is_dir():
            continue
        inside = folder.folder(name)
        for file in inside.names():
            kind = "master" if file == "fp32.pt" else file.removesuffix(".pt")
            if not file.endswith(".pt") or (kind == "master" and trained and name not in trained):
                continue  # the converter also writes buffers and frozen weights, which the model file has
            where = str(inside.path / file)
            tree = torch_file.load(inside.file(file), inert=reading.inert)
            value = tree.get("param") if isinstance(tree, dict) else tree
            if (recipe := as_recipe(value)) is None:
                raise CheckpointError(f"{where}: has no tensor in it")
            if isinstance(value, TensorRef) and len(value.shape) == 1 and name in trained:
                recipe = shaped(value, trained[name], where)
            reading.source.add(kind, name, recipe, where=where)
    stage: object = None
    if folder.has("optimizer_state.pt"):
        path = str(folder.path / "optimizer_state.pt")
        state = entries(torch_file.load(folder.file("optimizer_state.pt"), inert=reading.inert), path)
        stage = number_in(state.get("zero_stage"))
        reading.source.notes["optimizer"] = _hyperparameters(state)
    reading.source.what = "DeepSpeed universal checkpoint"
    return stage


def _share(reading: _Reading) -> None:
    """A parameter with two names was saved under one of them."""
    table = reading.source.table
    for alias, name in reading.shared.items():
        if isinstance(name, str) and ("model", name) in table and ("model", alias) not in table:
            table["model", alias] = table["model", name]


def _facts(reading: _Reading, stage: object) -> None:
    head, files, notes = reading.heads[0], reading.files, reading.source.notes
    where = str(reading.folder.path)
    shared = reading.shared
    parameters = {name for kind, name in reading.source.table if kind == "model"} - reading.buffers - {*shared}
    trained = {name for kind, name in reading.source.table if kind != "model"}
    due, skipped = _count(head.get("global_steps"), where), _count(head.get("skipped_steps"), where)
    if notes.get("optimizer"):
        reading.source.what += f" of ZeRO stage {stage}" if stage in (1, 2, 3) else " without ZeRO"
    notes |= {
        "version": head.get("ds_version"),
        "zero_stage": stage,
        "ranks": {
            "data": _count(head.get("dp_world_size"), where),
            "model": max(len(files.model), len(files.shard)),
        },
        "global_steps": None if due is None else max(0, due - (skipped or 0)),  # theirs counts skipped steps, too
        "global_samples": _count(head.get("global_samples"), where),
        "skipped_steps": skipped,
        "lr_scheduler": head.get("lr_scheduler"),
        "config": head.get("ds_config"),
        "buffers": sorted(reading.buffers),
        "frozen": sorted(parameters - trained) if trained else [],
        "aliases": shared,
        "client_state": {key: value for key, value in head.items() if key not in RESERVED},
    }


def _count(value: object, where: str) -> int | None:
    return None if value is None else count_of(value, f"{where}: a counter")
