"""The names by which Trainer and Accelerate drive an engine, over mizzen; for the tests beside it and nothing else.

The folder above goes on the path of the processes that those tests start, never on that of the tests themselves.
"""

from deepspeed import checkpoint, runtime, utils, zero
from mizzen import Engine as DeepSpeedEngine
from mizzen import comm, init_distributed, initialize

__version__ = "0.19.8"
__all__ = [
    "DeepSpeedEngine",
    "__version__",
    "checkpoint",
    "comm",
    "init_distributed",
    "initialize",
    "runtime",
    "utils",
    "zero",
]
