"""A device whose memory lies behind real copies, on a machine that has none: for tests of what rests elsewhere."""

from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.registry import set_accelerator


class Behind(Cpu):
    """The host as a device that does not share the host's memory: nothing of one is a view of the other."""

    shares_host_memory = False

    def __init__(self):
        super().__init__()
        self.locked = {}
        self.lock_pages = self.lock

    def lock(self, tensor):
        """Count what is locked, by its address."""
        assert tensor.data_ptr() not in self.locked
        self.locked[tensor.data_ptr()] = tensor.numel()
        return lambda: self.locked.pop(tensor.data_ptr())


def use_behind():
    """Train on such a device from now on, in this process."""
    accelerator = Behind()
    set_accelerator(accelerator)
    return accelerator
