"""A layout laid over the ranks of this job: named axes, all process groups of their products, and `mpu` objects.

Which ranks belong together is arithmetic and lives in `config/layout.py`; here are the groups and the DeviceMesh. This
is the only file that may call `DeviceMesh._flatten` (docs/borrowed.md). A Megatron-style `mpu` is served both ways: one
that answers from a mesh, and a mesh over the ranks of one that a user brings. Such an object answers
`get_{role}_parallel_{rank,group,world_size}()`; groups of a foreign one are compared, not used.

[Note: all groups at once]
Forming a group is something that all ranks do, in the same order; a group formed when it is first asked for, by some
ranks and not by others, ends in a hang or, worse, in two groups under one name. So `Mesh.build` forms every group there
will be, in a fixed order, and asking for a product that is not in `PRODUCTS` is an error. It costs little: products
that have the same ranks share one group, all axes of size 1 share one group of this rank alone, and a product of
everything is the job's own group. And a layout is laid over a job once: engines of equal layout share the mesh. Groups
hold threads, sockets and, on a device, memory, and cannot be given back while another rank may still use them.

[Note: groups of ours]
`init_device_mesh` would give each axis of size 1 a group of its own, and every group torch's default timeout of half an
hour instead of the job's. So the groups are formed here and handed to `DeviceMesh.from_group`. Only a product of
several axes is flattened by torch, because FSDP2 accepts a mesh beside a tensor-parallel one only if both are cut from
one root.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mizzen.backport import set_timeout
from mizzen.comm.communicator import current
from mizzen.comm.groups import new_group
from mizzen.config.layout import AXES, DATA_AXES, EXPERT_AXES, SAMPLE_AXES, Layout, Partition, role_in_words
from mizzen.errors import LayoutError, UsageError
from mizzen.progress import get_progress

PRODUCTS: Final = (
    SAMPLE_AXES,
    ("dp_shard", "sp"),  # one copy of the sharded state
    DATA_AXES,
    ("pp", "tp"),  # one copy of the model
    AXES,
)
"""The products of axes that there are groups for, beside the axes themselves."""
EXPERT_PRODUCTS: Final = (("dp_replicate", "edp"),)  # gradients of experts are averaged
"""The products of axes that the second view, that of experts, has groups for."""


@dataclass(slots=True)
class Aside:
    """All ranks once more, for what goes on beside training, such as a save: the two never mix.

    One thread at a time uses the group. Engines that share a mesh wait for each other's, in the order in which all
    ranks have started them.
    """

    group: ProcessGroup | None
    """None for one rank."""
    thread: Thread | None = None
    """The last that was started to use it."""

    def wait(self) -> None:
        """Come back when nobody uses the group."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """A Layout laid over the ranks of this job, seen from one of them."""

    layout: Layout
    devices: DeviceMesh
    """All axes of `AXES`."""
    expert: DeviceMesh
    """The second view, whose axes are `layout.expert_axes`."""
    rank: int
    aside: Aside
    _meshes: dict[tuple[str, ...], DeviceMesh | Callable[[], DeviceMesh]] = field(repr=False, compare=False)
    """By axes; what takes no group to make is made when it is first asked for."""
    _groups: Mapping[tuple[int, ...], ProcessGroup] = field(repr=False, compare=False, default_factory=dict)
    """Every group that this rank belongs to, by its ranks."""

    @classmethod
    def build(
        cls,
        layout: Layout,
        *,
        device_type: str,
        timeout: timedelta | None = None,
        groups: Sequence[Partition] = (),
    ) -> "Mesh":
        """The mesh of a layout, whose groups the first call forms. Every rank calls this, with the same arguments.

        `groups` are those that no product of axes gives, each time all groups of the job that are of one kind.
        """
        if not dist.is_initialized():
            raise UsageError("a mesh needs a process group: call mizzen.init_distributed() first")
        if dist.get_world_size() != layout.world:
            raise LayoutError(
                f"the layout is for {layout.world} ranks ({layout}), but the job has {dist.get_world_size()}"
            )
        comm = current()
        limit = timeout or timedelta(seconds=comm.watchdog.patience.timeout)
        key = (layout, device_type, limit, tuple(groups))
        if key not in comm.meshes:
            builder = _Builder(layout, device_type, dist.get_rank(), limit)
            devices = builder.view(AXES, layout.shape, PRODUCTS)
            expert = builder.view(layout.expert_axes, layout.expert_shape, EXPERT_PRODUCTS)
            for partition in groups:
                builder.form(partition, "plan")
            aside = Aside(builder.aside())
            comm.meshes[key] = cls(layout, devices, expert, dist.get_rank(), aside, builder.meshes, builder.by_ranks())
        found: Mesh = comm.meshes.pop(key)
        comm.meshes[key] = found  # the last one, for those who ask for the current one
        get_progress().set_role(role_in_words(layout, found.rank))
        comm.watchdog.know_roles(partial(role_in_words, layout))
        return found

    @classmethod
    def current(cls) -> "Mesh | None":
        """The mesh of the engine that was made last, for calls that get no handle on one; None before the first."""
        meshes: list[Mesh] = list(current().meshes.values()) if dist.is_initialized() else []
        return meshes[-1] if meshes else None

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh that this rank belongs to along one axis."""
        return self.axes(name)

    def axes(self, *names: str) -> DeviceMesh:
        """The one-dimensional mesh of all ranks that differ from this one only along these axes."""
        key = _key(self.layout, names)
        if key not in self._meshes:
            known = ", ".join(" * ".join(product) for product in (*PRODUCTS, *EXPERT_PRODUCTS))
            raise UsageError(
                f"there is no group for {' * '.join(names)}: groups are formed when the mesh is built, for every axis "
                f"and for {known}; a further one has to be added to PRODUCTS in comm/mesh.py"
            )
        found = self._meshes[key]
        if not isinstance(found, DeviceMesh):
            found = self._meshes[key] = found()
        return found

    def group(self, *names: str) -> ProcessGroup:
        """The process group of the same ranks."""
        return self.axes(*names).get_group()

    def group_of(self, ranks: tuple[int, ...]) -> ProcessGroup:
        """The group of exactly these ranks, which is one of an axis, of a product, or of the plan."""
        if ranks not in self._groups:
            raise UsageError(f"there is no group of the ranks {', '.join(map(str, ranks))}: the plan has not named it")
        return self._groups[ranks]

    @property
    def everyone(self) -> ProcessGroup | None:
        """The process group of all ranks of the job; None where there is one."""
        return self.group(*AXES) if self.layout.world > 1 else None

    def size(self, *names: str) -> int:
        """How many ranks that is."""
        return self.layout.size(*names)

    def coordinate(self, name: str) -> int:
        """The place of this rank along an axis."""
        self.layout.size(name)
        return self.layout.coordinates(self.rank)[name]

    def titles(self) -> dict[str, str]:
        """The names of the groups of several ranks, with the axes that they are; the fewest where they are the same."""
        titles: dict[str, str] = {}
        for axes in sorted(self._meshes, key=len):
            group = current().backend.group(self.group(*axes))
            if group is not None and len(group.ranks) > 1:
                titles.setdefault(group.name, "_".join(axes))
        return titles

    def ranks(self, *names: str) -> tuple[int, ...]:
        """The global ranks of the group along these axes, in its order."""
        return self.layout.ranks_along(names, self.rank)

    # What a rank is to others, for those who need not know which axes there are

    @property
    def same_model(self) -> tuple[int, ...]:
        """The ranks that compute with the same part of the model as this one, itself among them."""
        return self.ranks(*DATA_AXES)

    @property
    def same_piece(self) -> tuple[int, ...]:
        """The ranks that run the same piece of the model, whether its matrices are cut or not."""
        return self.ranks(*(axis for axis in AXES if axis != "pp"))

    @property
    def same_model_group(self) -> ProcessGroup:
        """The process group of `same_model`."""
        return self.group(*DATA_AXES)

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that see different samples."""
        return self.ranks(*SAMPLE_AXES).index(self.rank)

    @property
    def sequence_group(self) -> ProcessGroup:
        """The ranks that share each sequence with this one."""
        return self.group("sp")

    @property
    def tensor_rank(self) -> int:
        """The place of this rank among those that share each matrix with it."""
        return self.coordinate("tp")

    @property
    def role(self) -> dict[str, int]:
        """Who this rank is, whatever number it has: its place among the stages, samples, sequences and matrices."""
        return {"pp": self.coordinate("pp"), "dp": self.data_rank} | {
            axis: self.coordinate(axis) for axis in ("sp", "tp")
        }

    @property
    def degrees(self) -> dict[str, int]:
        """How many ranks each axis has, by its name."""
        return dict(zip(AXES, self.layout.shape, strict=True))

    @property
    def drawing(self) -> tuple[int, ...]:
        """The place of this rank among those that draw different random numbers: those of a matrix draw the same."""
        return tuple(self.coordinate(axis) for axis in ("pp", *DATA_AXES))


@dataclass(frozen=True, slots=True)
class _Builder:
    """Forms each group once, however many names it has."""

    layout: Layout
    device_type: str
    rank: int
    timeout: timedelta
    groups: dict[Partition, ProcessGroup] = field(default_factory=dict)
    meshes: dict[tuple[str, ...], DeviceMesh | Callable[[], DeviceMesh]] = field(default_factory=dict)

    def view(self, axes: tuple[str, ...], shape: tuple[int, ...], products: tuple[tuple[str, ...], ...]) -> DeviceMesh:
        """All ranks, with named axes; they and their products are put among the meshes."""
        ranks = torch.arange(self.layout.world, dtype=torch.int, device="cpu").view(shape)
        groups = [self._group(name) for name in axes]
        view = DeviceMesh.from_group(groups, self.device_type, ranks, mesh_dim_names=axes)
        for name in axes:
            self.meshes.setdefault((name,), partial(view.__getitem__, name))
        for product in products:
            key = _key(self.layout, product)
            if key not in self.meshes:
                self.meshes[key] = self._flatten(view[key], tuple(self.layout.groups(product)))
        return view

    def aside(self) -> ProcessGroup | None:
        """A group of all ranks that only what goes on beside training uses, on the host."""
        backends = dist.get_backend_config()
        if self.layout.world == 1 or "fake" in backends:
            return None
        backend = None if "mpi" in backends else "gloo"
        formed: ProcessGroup = new_group(None, self.timeout, backend=backend, group_desc="aside")
        return formed

    def _flatten(self, mesh: DeviceMesh, partition: Partition) -> DeviceMesh:
        """The product of several axes. One of them all has no axis left beside it, and so needs no common root."""
        if len(partition) == 1:
            everyone = self._form(partition, "")
            return DeviceMesh.from_group(
                everyone, self.device_type, mesh_dim_names=("_".join(mesh.mesh_dim_names or ()),)
            )
        flat = mesh._flatten()
        if "fake" not in dist.get_backend_config():
            set_timeout()(self.timeout, flat.get_group())
        self.groups.setdefault(partition, flat.get_group())
        return flat

    def _group(self, axis: str) -> ProcessGroup:
        return self.form(tuple(self.layout.groups(axis)), axis)

    def form(self, partition: Partition, title: str) -> ProcessGroup:
        """The group that this rank belongs to; of a partition that leaves it out, one that it may not use."""
        if partition not in self.groups:
            self.groups[partition] = self._form(partition, title)
        return self.groups[partition]

    def by_ranks(self) -> dict[tuple[int, ...], ProcessGroup]:
        """Every group that this rank belongs to, by its ranks."""
        mine = ((ranks, group) for partition, group in self.groups.items() for ranks in partition if self.rank in ranks)
        everyone: Any = dist.group.WORLD
        return dict(mine) | {tuple(range(self.layout.world)): everyone}

    def _form(self, partition: Partition, title: str) -> ProcessGroup:
        everyone: Any = dist.group.WORLD
        if len(partition) == 1 and len(partition[0]) == self.layout.world:
            return everyone  # type: ignore[no-any-return]
        is_complete = sum(map(len, partition)) == self.layout.world
        if everyone.bound_device_id is not None and is_complete:
            # One call splits the communicator of all ranks for all groups of the partition.
            split = [list(ranks) for ranks in partition]
            return dist.split_group(split_ranks=split, timeout=self.timeout, group_desc=title)  # type: ignore[return-value]
        formed = [new_group(ranks, self.timeout, group_desc=title) for ranks in partition]
        mine = (group for ranks, group in zip(partition, formed, strict=True) if self.rank in ranks)
        return next(mine, formed[0])  # type: ignore[no-any-return]


def groups_of_rank(layout: Layout, rank: int, partitions: Sequence[Partition] = ()) -> dict[tuple[int, ...], str]:
    """The groups of several ranks that a rank belongs to once a mesh is laid, each with the axes that it is along.

    `partitions` are those of a plan. Nothing is formed here: this is what `Mesh.build` will form.
    """
    found: dict[tuple[int, ...], str] = {}
    products = (*((axis,) for axis in (*AXES, *EXPERT_AXES)), *PRODUCTS, *EXPERT_PRODUCTS)
    for axes in sorted(products, key=len):
        found.setdefault(layout.ranks_along(axes, rank), "all" if axes == AXES else " * ".join(axes))
    for partition in partitions:
        found |= {ranks: "plan" for ranks in partition if rank in ranks and ranks not in found}
    return {ranks: title for ranks, title in found.items() if len(ranks) > 1}


def _key(layout: Layout, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that make a difference, in the order of the ranks; one of size 1 when none does."""
    if not names:
        raise UsageError("name at least one axis")
    layout.size(*names)  # names are known, and not twice
    order = layout.expert_axes if any(name in EXPERT_AXES for name in names) else AXES
    return tuple(name for name in order if name in names and layout.size(name) > 1) or (names[0],)


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
