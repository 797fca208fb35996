"""The device that this process computes on, and what torch does not say about it.

`get_accelerator()` is the way in; `protocol.py` is the contract. Nothing here imports torch until an accelerator is
made. How ranks talk is `comm/`'s business: an accelerator only names its backend.
"""

from mizzen.accelerator.protocol import Accelerator, Capacity, DeviceInfo, Event, Memory, Stream
from mizzen.accelerator.registry import (
    create_accelerator,
    get_accelerator,
    register_accelerator,
    set_accelerator,
    survey,
)
from mizzen.accelerator.streams import Fetch, Split, Timer

__all__ = [
    "Accelerator",
    "Capacity",
    "DeviceInfo",
    "Event",
    "Fetch",
    "Memory",
    "Split",
    "Stream",
    "Timer",
    "create_accelerator",
    "get_accelerator",
    "register_accelerator",
    "set_accelerator",
    "survey",
]
