"""Megatron-style `mpu` objects, both ways: one that answers from a mesh, and a layout read from one that a user brings.

Such an object answers `get_{role}_parallel_{rank,group,world_size}()`. Groups of a foreign one are compared, not used:
the mesh forms its own over the same ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.errors import LayoutError, UsageError

ROLES: Final = {
    "data": ("dp_replicate", "dp_shard"),
    "tensor_model": ("tp",),
    "slice": ("tp",),
    "pipeline_model": ("pp",),
    "pipe": ("pp",),
    "model": ("pp", "tp"),
    "sequence": ("sp",),
    "context": ("sp",),
    "sequence_data": ("dp_replicate", "dp_shard", "sp"),
    "expert_model": ("ep",),
    "expert_data": ("dp_replicate", "edp"),
}
"""The role in a method's name -> the axes that it stands for. The first name of several is Megatron's."""
QUESTIONS: Final = ("rank", "group", "world_size", "src_rank")


@dataclass(frozen=True, slots=True)
class Mpu:
    """What libraries that were written for Megatron ask of a mesh; `dir()` lists the questions."""

    mesh: Mesh

    def __getattr__(self, name: str) -> Callable[[], Any]:
        role, question = _parse(name)
        if role not in ROLES or question not in QUESTIONS:
            raise AttributeError(
                f"an mpu has no {name!r}; it has get_ROLE_parallel_QUESTION with ROLE one of {', '.join(ROLES)} and "
                f"QUESTION one of {', '.join(QUESTIONS)}"
            )
        mesh, axes = self.mesh, ROLES[role]
        answers: dict[str, Callable[[], Any]] = {
            "rank": lambda: mesh.ranks(*axes).index(mesh.rank),
            "group": lambda: mesh.group(*axes),
            "world_size": lambda: mesh.size(*axes),
            "src_rank": lambda: mesh.ranks(*axes)[0],
        }
        return answers[question]

    def __dir__(self) -> Iterable[str]:
        return [f"get_{role}_parallel_{question}" for role in ROLES for question in QUESTIONS]


def _parse(name: str) -> tuple[str, str]:
    role, _, question = name.removeprefix("get_").partition("_parallel_")
    return role, question


def layout_from_mpu(mpu: Any, world: int) -> Layout:
    """The layout that a user's object describes, refused unless its ranks lie as ours would."""
    tp, model, data = _degree(mpu, "tensor_model", "slice"), _degree(mpu, "model"), _degree(mpu, "data")
    pp = _degree(mpu, "pipeline_model", "pipe") or 1
    sp = _degree(mpu, "sequence", "context") or 1
    if tp is None and model is None and sp == 1:
        raise UsageError(
            "the mpu object has none of get_tensor_model_parallel_world_size, get_model_parallel_world_size and "
            "get_sequence_parallel_world_size: without one of them it says nothing about how a model is split"
        )
    if data is None and sp == 1:
        raise UsageError("the mpu object has no get_data_parallel_world_size")
    if tp is None:
        # Objects that know no other model parallelism call it by this name.
        tp = 1 if model is None else max(model // pp, 1)
    layout = Layout.fit(world, tp=tp, pp=pp, sp=sp, ep=_degree(mpu, "expert_model") or 1)
    if data not in (None, layout.dp):
        raise LayoutError(
            f"the mpu object says {data} data-parallel ranks, but pp={pp} sp={sp} tp={tp} leave {layout.dp} of {world}"
        )
    return layout


def mesh_from_mpu(mpu: Any, *, device_type: str) -> Mesh:
    """A mesh over the same ranks as a user's object, which must number them in our order."""
    layout = layout_from_mpu(mpu, dist.get_world_size())
    check_groups(mpu, layout, dist.get_rank())
    return Mesh.build(layout, device_type=device_type)


def check_groups(mpu: Any, layout: Layout, rank: int) -> None:
    """Refuse an object whose groups have other ranks than ours: the model talks over its own."""
    for role, axes in ROLES.items():
        group = _ask(mpu, role, "group")
        if group is None or role == "model":
            continue
        theirs, ours = tuple(dist.get_process_group_ranks(group)), layout.ranks_along(axes, rank)
        if theirs != ours:
            raise LayoutError(
                f"get_{role}_parallel_group() of the mpu object has ranks {theirs} on rank {rank}, where we would have "
                f"{ours}: number the ranks with tensor parallelism fastest, then sequence, data and pipeline"
            )


def _degree(mpu: Any, *roles: str) -> int | None:
    """How many ranks a role has; None when the object has never heard of it."""
    for role in roles:
        found = _ask(mpu, role, "world_size")
        if found is None:
            continue
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise UsageError(
                f"get_{role}_parallel_world_size() of the mpu object gave {found!r}, not a number of ranks"
            )
        missing = [
            name for question in ("rank", "group") if _method(mpu, name := f"get_{role}_parallel_{question}") is None
        ]
        if missing:
            raise UsageError(f"the mpu object has get_{role}_parallel_world_size, but not {' and '.join(missing)}")
        return found
    return None


def _ask(mpu: Any, role: str, question: str) -> Any:
    method = _method(mpu, f"get_{role}_parallel_{question}")
    return None if method is None else method()


def _method(mpu: Any, name: str) -> Callable[[], Any] | None:
    found = getattr(mpu, name, None)
    return found if callable(found) else None
