"""The example of Fabric with the strategy that works on a CPU: `drive_fabric_example.py EXAMPLES FOLDER`."""

import runpy
import sys
from pathlib import Path

from clients.drive_lightning import FabricOnCpu

if __name__ == "__main__":
    example = runpy.run_path(str(Path(sys.argv[1]) / "fabric_loop.py"))
    strategy = FabricOnCpu(config=example["CONFIG"], process_group_backend="gloo")
    example["main"](sys.argv[2], strategy, "cpu", 2)
