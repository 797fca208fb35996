"""Constants that scripts import."""

from enum import Enum
from importlib.util import find_spec
from typing import Final

import torch

from deepspeed import __version__
from deepspeed.faces.builders import COMPATIBLE

HAS_TRITON: Final = find_spec("triton") is not None
version: Final = __version__
git_hash = git_branch = "mizzen"
installed_ops: Final = dict.fromkeys(COMPATIBLE, False)
compatible_ops: Final = COMPATIBLE
accelerator_name: Final = ""
torch_info: Final = {"version": ".".join(torch.__version__.split(".")[:2]), "cuda_version": torch.version.cuda or "0.0"}

TORCH_DISTRIBUTED_DEFAULT_PORT: Final = 29500
INFERENCE_GENERIC_MODE: Final = "generic"
INFERENCE_SPECIALIZED_MODE: Final = "specialized"
NCCL_BACKEND, CCL_BACKEND, MPI_BACKEND, GLOO_BACKEND, HCCL_BACKEND = "nccl", "ccl", "mpi", "gloo", "hccl"

LR_RANGE_TEST: Final = "LRRangeTest"
ONE_CYCLE: Final = "OneCycle"
WARMUP_LR: Final = "WarmupLR"
WARMUP_DECAY_LR: Final = "WarmupDecayLR"
WARMUP_COSINE_LR: Final = "WarmupCosineLR"

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
DEEPSPEED_OPTIMIZERS: Final = [
    *(ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER),
    *(LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
]

TRAIN_BATCH_SIZE, TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_batch_size", "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS, GRADIENT_CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"


class SchedulingResult(Enum):
    """What a server of many requests says of the next batch."""

    Success = 0
    EngineSequenceLimitExceeded = 1
    BatchSequenceLimitExceeded = 2
    BatchTokenLimitExceeded = 3
    KVCacheLimitExceeded = 4
    SequenceTokenLimitExceeded = 5
