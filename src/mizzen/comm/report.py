"""Turning the log of collectives on, and printing it. What is measured, and how, is in `timing.py`."""

import sys
import time
from typing import Any

import torch
from torch.distributed import ReduceOp

from mizzen.ambient import AMBIENT
from mizzen.comm.collectives import all_gather_object, all_reduce, barrier
from mizzen.comm.groups import exchange_device, get_rank, get_world_size
from mizzen.comm.timing import COLUMNS, STRAGGLER_COLUMNS, CommLog, table
from mizzen.config.load import load, read_source
from mizzen.config.migrate import spread_paths
from mizzen.config.observe import CommsLoggerConfig
from mizzen.config.schema import Config


def comm_log() -> CommLog:
    """The log of this process."""
    if AMBIENT.comm_log is None:
        AMBIENT.comm_log = CommLog()
    log: CommLog = AMBIENT.comm_log
    return log


def configure(
    config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set what is logged: from a configuration or its section `comms_logger`, then what is given by name."""
    log = comm_log()
    settings = log.settings if config is None else section_of(config)
    named = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    given = {name: value for name, value in named.items() if value is not None}
    log.settings = section_of({**settings.model_dump(), **given}) if given else settings


def section_of(config: Any) -> CommsLoggerConfig:
    """`comms_logger` of a configuration in any form, checked; what else is in it is for `initialize` to judge."""
    match config:
        case CommsLoggerConfig():
            return config
        case object(comms_logger=CommsLoggerConfig() as section):
            return section
    raw = read_source(config)
    spread_paths(raw)
    given = raw.get("comms_logger", {}) if raw.keys() & Config.model_fields.keys() else raw
    return load({"comms_logger": given}).comms_logger


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print what was measured, on rank 0. Every rank calls this: it waits for all, and compares them when asked to."""
    log = comm_log()
    summary = log.summary()
    settings, log.settings = (
        log.settings,
        CommsLoggerConfig.model_construct(),
    )  # what follows is not the user's communication
    try:
        barrier()
        stragglers = log.stragglers(_gather, _reduce_min) if show_straggler else None
        barrier()
    finally:
        log.settings = settings
    if get_rank() == 0:
        text = table(summary, COLUMNS)
        if stragglers is not None:
            text += "\n\n" + table(stragglers, STRAGGLER_COLUMNS)
        sys.stdout.write(text + "\n")
    if not return_dict:
        return None
    metadata = {"world_size": get_world_size(), "rank": get_rank(), "timestamp": time.time()}
    return {"summary": summary, "straggler_analysis": stragglers, "metadata": metadata}


def reset_log() -> None:
    """Forget all measurements."""
    comm_log().reset()


def _gather(value: Any) -> list[Any]:
    values = [None] * get_world_size()
    all_gather_object(values, value)
    return values


def _reduce_min(values: torch.Tensor) -> None:
    there = values.to(exchange_device())
    all_reduce(there, ReduceOp.MIN)
    values.copy_(there)
