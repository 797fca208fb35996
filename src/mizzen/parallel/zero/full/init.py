"""`zero.Init`: models that are sharded while they are built. What happens to a parameter is in `early.py`."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.comm import groups
from mizzen.comm.join import init_distributed
from mizzen.config.load import ConfigSource, load, read_source
from mizzen.errors import NotBuilt, UsageError, expect
from mizzen.parallel.zero.full.early import Bench, Building


class Init:
    """A context in which modules are sharded as they are built, or, with a module, what shards it at once.

    Nested contexts are one. A configuration of another stage than 3, or one rank, leaves modules as they are; `dtype`
    is the dtype of the shards, which otherwise have that of the build.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        group: Any = None,
        remote_device: str | None = None,
        config: ConfigSource | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        accelerator = get_accelerator()
        if remote_device in ("cpu", "nvme") and accelerator.name != "cpu":
            raise NotBuilt(
                f"zero.Init(remote_device={remote_device!r}): parameters rest on the {accelerator.name} device; "
                "offload is not built yet, so leave the argument out"
            )
        if remote_device not in (None, "none", "cpu", "nvme", accelerator.name):
            raise UsageError(f"zero.Init(remote_device={remote_device!r}): known are none, cpu and nvme")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(
                f"zero.Init(dtype={dtype!r}): give a torch dtype of floating point, such as torch.bfloat16"
            )
        expect(group, ProcessGroup | None, "a process group")
        expect(module, nn.Module | None, "a module")
        given = read_source(config) if config is not None else {}
        load(given)
        section = given.get("zero_optimization")
        stage = section.get("stage", 3) if isinstance(section, Mapping) else 3
        self.is_wanted = enabled and stage in (3, "auto")
        self.dtype = dtype
        self.group = group
        self.building: Building | None = None
        self.depth = 0
        if module is not None and self.is_wanted:
            with self:
                if self.building is not None:
                    self.building.finish(module)

    def __enter__(self) -> "Init":
        """Modules that are built from here on are sharded."""
        self.depth += 1
        if self.is_wanted and AMBIENT.building is None:
            init_distributed(verbose=False)
            if groups.get_world_size(self.group) > 1:
                accelerator = get_accelerator()
                everyone: Any = torch.distributed.group.WORLD
                # Without names: clients (PEFT) take a tensor on a mesh that has some for one that is computed in parts.
                mesh = DeviceMesh.from_group(self.group or everyone, accelerator.name)
                self.building = AMBIENT.building = Building(Bench(mesh, self.dtype, accelerator.device()))
                self.building.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever is not sharded yet is; after an error everything stays as it is."""
        self.depth -= 1
        if self.building is not None and not self.depth:
            building, self.building, AMBIENT.building = self.building, None, None
            building.stop(finish=error is None)
