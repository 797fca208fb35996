"""Constants that scripts import."""

from datetime import timedelta
from enum import Enum
from importlib.util import find_spec
from typing import Final

import torch

from deepspeed import __version__
from deepspeed.faces.builders import COMPATIBLE


def _nccl() -> str:
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return "0.0"
    return ".".join(map(str, torch.cuda.nccl.version()[:2]))  # type: ignore[no-untyped-call]


HAS_TRITON: Final = find_spec("triton") is not None
version: Final = __version__
git_hash = git_branch = "mizzen"
installed_ops: Final = dict.fromkeys(COMPATIBLE, False)
compatible_ops: Final = COMPATIBLE
accelerator_name: Final = ""
torch_info: Final = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": _nccl(),
    "hip_version": torch.version.hip or "0.0",
}
"""What this torch was built with; 0.0 is nothing."""

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS: Final = [
    *(ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER),
    *(LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
]

TORCH_DISTRIBUTED_DEFAULT_PORT: Final = 29500
default_pg_timeout: Final = timedelta(minutes=30)
TUTEL_INSTALLED: Final = False
"""A package with kernels for experts, which nothing here uses."""


class SchedulingResult(Enum):
    """What a server of many requests says of the next batch."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5
