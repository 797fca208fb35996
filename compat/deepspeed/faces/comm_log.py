"""A log of collectives of a script's own, and switches that turn collectives off."""

import sys
import time
from collections.abc import Callable
from typing import Any

from mizzen.comm import groups
from mizzen.comm.report import section_of
from mizzen.comm.timing import COLUMNS, CommLog, bandwidth, message_size, table
from mizzen.config.observe import CommsLoggerConfig
from mizzen.errors import NotBuilt, UsageError


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """Gbit/s as (algorithm, bus) of a message of `size` bytes that took so many milliseconds, among all ranks."""
    ranks = _ranks()
    return bandwidth(comm_op, milliseconds=duration, size=message_size(comm_op, size, ranks), ranks=ranks)


class CommsLogger(CommLog):
    """mizzen's log, with a script's own measurements in it; that of the collectives is `comm.log_summary`'s."""

    def __getattr__(self, name: str) -> Any:
        """`enabled`, `verbose`, `prof_all`, `prof_ops`, `debug`."""
        if name not in CommsLoggerConfig.model_fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.settings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CommsLoggerConfig.model_fields:
            name, value = "settings", section_of({**self.settings.model_dump(), name: value})
        super().__setattr__(name, value)

    def configure(self, comms_config: Any) -> None:
        """Take a configuration, or its section."""
        self.settings = section_of(comms_config)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record one operation, in milliseconds and bytes."""
        self.add(record_name, raw_name, milliseconds=latency, size=msg_size, ranks=_ranks())

    @property
    def comms_dict(self) -> dict[str, dict[int, list[Any]]]:
        """Operation -> message size -> [count, milliseconds, Gbit/s of the algorithm, Gbit/s of the bus]."""
        return {
            name: {size: [len(m.latencies), m.latencies, m.algorithm, m.bus] for size, m in sizes.items()}
            for name, sizes in self.records.items()
        }

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:  # type: ignore[override]
        """What `comms_dict` has."""
        return self.comms_dict

    def has_data(self) -> bool:
        """Whether anything was recorded."""
        return bool(self.records)

    reset_data = CommLog.reset

    def get_operation_names(self) -> list[str]:
        """What was recorded."""
        return list(self.records)

    def get_total_operations(self) -> int:
        """How often."""
        return sum(len(measured.latencies) for sizes in self.records.values() for measured in sizes.values())

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print all rows, or return them; ranks are compared by `comm.log_summary`, for the collectives."""
        if show_straggler:
            raise UsageError(
                "log_all(show_straggler=True): ranks are compared by comm.log_summary(show_straggler=True)"
            )
        summary = self.summary()
        if print_log:
            sys.stdout.write(table(summary, COLUMNS) + "\n")
        rank = groups.get_rank() if groups.is_initialized() else 0
        metadata = {"world_size": _ranks(), "rank": rank, "timestamp": time.time()}
        return {"summary": summary, "straggler_analysis": None, "metadata": metadata} if return_dict else None


def _ranks() -> int:
    return groups.get_world_size() if groups.is_initialized() else 1


def _switch(name: str) -> Callable[..., None]:
    def switch(flag: bool = False) -> None:
        if flag:
            raise NotBuilt(f"{name}(True): mizzen does not turn collectives off, since results would be wrong")

    switch.__name__ = switch.__qualname__ = name
    return switch


all_gather_comm_off, reduce_scatter_comm_off = _switch("all_gather_comm_off"), _switch("reduce_scatter_comm_off")
broadcast_comm_off, all_reduce_comm_off = _switch("broadcast_comm_off"), _switch("all_reduce_comm_off")
reduce_comm_off, backward_comm_off = _switch("reduce_comm_off"), _switch("backward_comm_off")
