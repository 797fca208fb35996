"""The start-up fingerprint: before the first step all ranks compare what they are about to do, in one exchange.

What goes into it (configuration, versions, shapes of the model) is the caller's choice. A rank that differs is named
with the field and both values, on every rank alike.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from mizzen.comm.agreement import differing_texts
from mizzen.comm.collectives import all_gather_into_tensor
from mizzen.comm.groups import exchange_device, get_all_ranks_from_group
from mizzen.config.layout import Layout, role_in_words
from mizzen.errors import CommError
from mizzen.wording import and_more, rank_in_role, rank_list

ABSENT: Final = "nothing"
SHOWN: Final = 6
"""How many differences are told."""


def compare(fields: Mapping[str, Any], group: Any = None, layout: Layout | None = None) -> None:
    """Raise a CommError on every rank of the group unless all have the same fields. Every rank of it calls this.

    Fields are what JSON has, and may be nested. With a layout ranks are named with their roles.
    """
    ranks, device = get_all_ranks_from_group(group), exchange_device(group)

    def gather(row: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(len(ranks), row.numel(), dtype=row.dtype, device=device)
        all_gather_into_tensor(rows.view(-1), row.to(device), group=group)
        return rows

    texts, _ = differing_texts(json.dumps(fields, sort_keys=True), gather)
    if texts:
        raise CommError(explain([(ranks[place], flatten(json.loads(text))) for place, text in texts.items()], layout))


def explain(ranks: Sequence[tuple[int, Mapping[str, str]]], layout: Layout | None = None) -> str:
    """The ranks that differ from the others, by field; where no value has a majority, the first rank's counts."""
    names = dict.fromkeys(name for _, fields in ranks for name in fields)
    told = []
    for name in names:
        values = {rank: fields.get(name, ABSENT) for rank, fields in ranks}
        usual, _ = Counter(values.values()).most_common(1)[0]
        odd: dict[str, list[int]] = {}
        for rank, value in values.items():
            if value != usual:
                odd.setdefault(value, []).append(rank)
        for value, where in odd.items():
            who = rank_in_role(where[0], _role(where[0], layout)) if len(where) == 1 else rank_list(where)
            which = f"{who} {'has' if len(where) == 1 else 'have'}"
            told.append(f"{name}: {which} {_short(value)}, the others {_short(usual)}")
    return (
        f"the ranks are not about to do the same: {and_more(told, SHOWN, separator='; ')}. Start all ranks with the "
        "same code, configuration and packages"
    )


def _role(rank: int, layout: Layout | None) -> str:
    return role_in_words(layout, rank) if layout is not None and rank < layout.world else ""


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over the bits of a tensor as whole numbers, which is the same in any order and for NaN as well."""
    data = tensor.detach().contiguous().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(data.element_size(), torch.uint8)
    return data.view(width).sum(dtype=torch.int64)


def flatten(values: Any, path: str = "") -> dict[str, str]:
    """Nested dicts and lists as fields with dotted paths, so that a difference is named by its key."""
    if isinstance(values, Mapping) and values:
        parts = [(f"{path}.{key}" if path else str(key), value) for key, value in values.items()]
    elif isinstance(values, list | tuple) and values:
        parts = [(f"{path}[{index}]", value) for index, value in enumerate(values)]
    else:
        return {path: values if isinstance(values, str) else repr(values)}
    return {name: text for part, value in parts for name, text in flatten(value, part).items()}


def _short(value: str) -> str:
    return value if len(value) <= 80 else f"{value[:60]}... ({len(value)} characters)"
