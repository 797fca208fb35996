"""The files of one DeepSpeed checkpoint by their names: who wrote which part."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from mizzen.checkpoint.foreign.extent import Folder
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
