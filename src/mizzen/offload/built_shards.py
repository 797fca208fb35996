"""Where shards rest that no engine has yet, while a model is built or read from files: in host memory, or in files."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import Final

import torch
from torch import Tensor

from mizzen.accelerator import get_accelerator
from mizzen.config.schema import Config
from mizzen.errors import UsageError
from mizzen.files import make_folder, perform
from mizzen.offload.places import ParameterSettings

PREFIX: Final = "mizzen-swap-shard-"


def keep_on(asked: str | None, config: Config) -> Callable[[Tensor], Tensor] | None:
    """What brings a shard to a device by its name or, without one, to where parameters are to rest; None: it stays.

    Shards stay where they are on a machine whose device is the host, unless they go to NVMe.
    """
    settings = ParameterSettings.of(config)
    place = {"cpu": "host", "nvme": "nvme"}.get(asked or "", settings.place if asked is None else "device")
    if place == "nvme":
        if not settings.paths:
            raise UsageError(
                f"zero.Init(remote_device={asked!r}): the folder for its files is zero_optimization.offload_param."
                "nvme_path of the configuration, which is not given: pass config_dict_or_path="
            )
        return partial(_map, path=settings.paths[0])
    if place == "host" and not get_accelerator().shares_host_memory:
        return lambda shard: shard.to("cpu", copy=True)
    return None


def _map(shard: Tensor, path: str) -> Tensor:
    """A copy in a file that is mapped into memory, of which the system keeps there what it has room for.

    The file has no name from the start, and is gone when nobody has the tensor any more.
    """
    if not shard.numel():
        return shard.to("cpu", copy=True)
    make_folder(Path(path))
    descriptor, name = mkstemp(prefix=PREFIX, dir=path)
    try:
        try:  # a file with holes would end the process, without a word, where the disk is full
            perform("allocate", Path(name), os.posix_fallocate, descriptor, 0, shard.nbytes, needed=shard.nbytes)
        finally:
            os.close(descriptor)
        found = torch.from_file(name, shared=True, size=shard.numel(), dtype=shard.dtype)
    finally:
        Path(name).unlink()
    return found.view(shard.shape).copy_(shard)
