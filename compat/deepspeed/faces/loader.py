"""mizzen's loader, made with the arguments that other programs give."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from mizzen.accelerator import get_accelerator
from mizzen.comm import groups
from mizzen.data.loader import Collate, Loader, LoaderFactory
from mizzen.errors import NotBuilt


class DeepSpeedDataLoader(ABC):  # noqa: B024
    """Makes loaders, and is what they are for `isinstance`. A sampler that is given is used as it is."""

    def __new__(
        cls,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = True,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> Any:
        """A loader of this rank's micro-batches; the order of an epoch is made from the seed 0 and its number."""
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise NotBuilt("DeepSpeedDataLoader with a curriculum waits for data efficiency, which is not built yet")
        is_one = local_rank < 0 or not groups.is_initialized()
        rank, ranks = (0, 1) if is_one else (groups.get_rank(), groups.get_world_size())
        factory = LoaderFactory(
            seed=0,
            rank=rank if data_parallel_rank is None else data_parallel_rank,
            ranks=ranks if data_parallel_world_size is None else data_parallel_world_size,
            drop_last=dataloader_drop_last,
            device_type=get_accelerator().name,
        )
        made = factory(
            dataset,
            batch_size=batch_size,
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            workers=num_local_io_workers,
        )
        if tput_timer is not None and isinstance(made, Loader):
            made.before_batch = tput_timer.start
        return made


DeepSpeedDataLoader.register(Loader)
