"""Intel GPUs: torch's module does all of it, so there are only facts here."""

from mizzen.accelerator.device import TorchDevice, backend_for


def xpu() -> TorchDevice:
    """Torch's `xpu`."""
    return TorchDevice(
        name="xpu",
        comm_backend=backend_for("xpu"),
        visible_devices="ZE_AFFINITY_MASK",
        export_prefixes=("CCL_", "FI_", "I_MPI_"),
    )
