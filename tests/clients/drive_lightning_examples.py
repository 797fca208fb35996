"""An example of Lightning with the strategy that works on a CPU: `drive_lightning_examples.py EXAMPLE FOLDER`."""

import runpy
import sys
from pathlib import Path

from clients.drive_lightning import FabricOnCpu, OnCpu

STRATEGIES = {"fabric_loop.py": FabricOnCpu, "lightning_trainer.py": OnCpu}

if __name__ == "__main__":
    example = runpy.run_path(sys.argv[1])
    strategy = STRATEGIES[Path(sys.argv[1]).name](config=example["CONFIG"], process_group_backend="gloo")
    example["main"](sys.argv[2], strategy, "cpu", 2)
