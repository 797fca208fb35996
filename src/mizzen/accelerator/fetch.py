"""Numbers on their way from the device to the host."""

from typing import TYPE_CHECKING

from mizzen.accelerator.protocol import Accelerator

if TYPE_CHECKING:
    from torch import Tensor


class Fetch:
    """A copy that was started. What is launched behind it does not delay it, so there can be work while one waits."""

    def __init__(self, values: "Tensor", accelerator: Accelerator) -> None:
        self._values = values
        if values.device.type != "cpu":
            self._values = accelerator.pin_memory(values.new_empty(values.shape, device="cpu"))
            self._values.copy_(values, non_blocking=True)
        self._event = accelerator.event()
        self._event.record()

    def read(self) -> "Tensor":
        """The values on the host, as soon as they are there."""
        self._event.synchronize()
        return self._values
