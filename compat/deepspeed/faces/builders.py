"""Op builders: names that programs ask about. mizzen compiles nothing, so building always succeeds or never can."""

from typing import Any, Final

from deepspeed.faces import operations
from deepspeed.faces.aio import AsyncIo
from mizzen.errors import NotBuilt


class OpBuilder:
    """One operation: what it is called, and whether there is something behind it here."""

    NAME = ""
    BUILD_VAR = ""
    LOADS: type | None = None
    """What does its work."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Its import path."""
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` works."""
        return self.LOADS is not None

    def builder_available(self) -> bool:
        """Whether there is something to load."""
        return self.is_compatible()

    def sources(self) -> list[str]:
        """No file of ours is compiled."""
        return []

    def include_paths(self) -> list[str]:
        """None."""
        return []

    def cxx_args(self) -> list[str]:
        """None."""
        return []

    def load(self, verbose: bool = True) -> Any:
        """What has the functions of this operation: there is nothing to compile."""
        if self.LOADS is None:
            capability = WAITING.get(self.NAME, "kernels of that name")
            raise NotBuilt(f"the operation {self.name} waits for a capability that is not built yet: {capability}")
        return self.LOADS()

    jit_load = load


CUDAOpBuilder = CPUOpBuilder = TorchCPUOpBuilder = OpBuilder

WAITING: Final = {
    "gds": "GPUDirect Storage (async_io reads and writes tensors of a device through the host)",
    "pin_memory": "offload",
    "dc": "passes over the graph",
    "random_ltd": "data efficiency",
    "sparse_attn": "sparse attention",
    "fp_quantizer": "LoRA and quantized weights",
    "quantizer": "LoRA and quantized weights",
    "transformer_inference": "inference",
    "inference_core_ops": "inference",
    "cutlass_ops": "inference",
    "ragged_ops": "inference",
    "ragged_device_ops": "inference",
    "spatial_inference": "inference",
}

NAMES: Final[dict[str, tuple[str, type | None]]] = {
    "AsyncIOBuilder": ("async_io", AsyncIo),
    "CCLCommBuilder": ("deepspeed_ccl_comm", None),
    "CPUAdagradBuilder": ("cpu_adagrad", operations.CpuAdagrad),
    "CPUAdamBuilder": ("cpu_adam", operations.CpuAdam),
    "CPULionBuilder": ("cpu_lion", operations.LionOperations),
    "DeepCompileBuilder": ("dc", None),
    "EvoformerAttnBuilder": ("evoformer_attn", None),
    "FPQuantizerBuilder": ("fp_quantizer", None),
    "FusedAdamBuilder": ("fused_adam", operations.AdamOperations),
    "FusedLambBuilder": ("fused_lamb", operations.LambOperations),
    "FusedLionBuilder": ("fused_lion", operations.LionOperations),
    "GDSBuilder": ("gds", None),
    "InferenceBuilder": ("transformer_inference", None),
    "InferenceCoreBuilder": ("inference_core_ops", None),
    "InferenceCutlassBuilder": ("cutlass_ops", None),
    "PinMemoryBuilder": ("pin_memory", None),
    "QuantizerBuilder": ("quantizer", None),
    "RaggedOpsBuilder": ("ragged_device_ops", None),
    "RaggedUtilsBuilder": ("ragged_ops", None),
    "RandomLTDBuilder": ("random_ltd", None),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", None),
    "SparseAttnBuilder": ("sparse_attn", None),
    "SpatialInferenceBuilder": ("spatial_inference", None),
    "StochasticTransformerBuilder": ("stochastic_transformer", None),
    "TransformerBuilder": ("transformer", None),
    "UtilsBuilder": ("utils", operations.Utils),
}
"""Class -> the name of its operation, and what does it here."""

for _class, (_name, _loads) in NAMES.items():
    _body = {"NAME": _name, "BUILD_VAR": f"DS_BUILD_{_name.upper()}", "LOADS": _loads, "__module__": __name__}
    globals()[_class] = type(_class, (OpBuilder,), _body)

ALL_OPS: Final = {name: globals()[kind]() for kind, (name, _) in NAMES.items()}
COMPATIBLE: Final = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
"""Name of an operation -> whether there is something behind it."""

__all__ = ["ALL_OPS", "CUDAOpBuilder", "CPUOpBuilder", "OpBuilder", *NAMES]
