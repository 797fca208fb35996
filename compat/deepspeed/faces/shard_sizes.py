"""`deepspeed.module_inject.tp_shard`: how many features each rank gets, by numbers that a process sets for a model.

The numbers are attributes of that module, where programs read them. mizzen's own plan does not ask for them.
"""

from importlib import import_module
from typing import Any

from mizzen.comm import groups

HEADS = ("lm_head", "embed_out")
MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def _numbers() -> Any:
    return import_module("deepspeed.module_inject.tp_shard")


def set_num_kv_heads(num: int | None) -> None:
    """Heads of keys and values: features that are a multiple of them are shared out by heads."""
    _numbers().num_kv_heads = num


def set_num_attention_heads(num: int | None) -> None:
    """Heads of queries."""
    _numbers().num_attention_heads = num


def set_n_embd(num: int | None) -> None:
    """The width of the model."""
    _numbers().n_embd = num


def set_tp_grain_size(num: int) -> None:
    """Features that are not cut apart where they are shared out evenly."""
    _numbers().tp_grain_size = num


def get_num_kv_heads() -> int | None:
    """What was set."""
    found: int | None = _numbers().num_kv_heads
    return found


def get_num_attention_heads() -> int | None:
    """What was set."""
    found: int | None = _numbers().num_attention_heads
    return found


def get_n_embd() -> int | None:
    """What was set."""
    found: int | None = _numbers().n_embd
    return found


def get_shard_size(total_size: int, mp_size: int, name: str | None = None, rank: int | None = None) -> int:
    """How many features a rank gets: by heads where these are known and the layer has them, else about evenly."""
    place = groups.get_rank() if rank is None else rank
    heads, grain = get_num_kv_heads(), max(1, int(_numbers().tp_grain_size))
    has_heads = not any(word in str(name or "") for word in (*HEADS, *MLP))
    if heads is not None and total_size % heads == 0 and has_heads:
        return total_size // heads * _share(heads, mp_size, place)
    unit = grain if total_size >= grain else 1
    return unit * _share(total_size // unit, mp_size, place)


def _share(count: int, ranks: int, rank: int) -> int:
    return count // ranks + (rank < count % ranks)


def get_shard_size_list(total_size: int, mp_size: int, name: str | None = None) -> list[int]:
    """How many features each rank gets."""
    return [get_shard_size(total_size, mp_size, name, rank) for rank in range(mp_size)]
