"""`deepspeed.module_inject.autotp_config` and its neighbours: rules for cutting a model, as objects.

mizzen reads such rules from `tensor_parallel.partition_config` and finds all others by what reads what. These objects
write that section: `AutoTPConfig.to_dict()`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Final

import torch
from torch import nn

from deepspeed.faces.start import tp_model_init
from mizzen.comm import groups
from mizzen.config.load import load, read_source
from mizzen.config.parallel import TensorParallelConfig
from mizzen.errors import NotBuilt, UsageError
from mizzen.model.blocks import Blocks
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.parallel.tensor.regions import find_regions


class PartitionType(Enum):
    """How a layer is cut."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


@dataclass
class TPLayerSpec:
    """A rule: the layers whose weights have names in which a pattern is found, and how they are cut."""

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: Any = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self) -> None:
        self.partition_type = PartitionType(self.partition_type)

    def matches(self, param_name: str, model_type: str | None = None) -> bool:
        """Whether the rule is for a weight of this name, in a model of this type."""
        if self.model_types and model_type is not None and model_type.lower() not in map(str.lower, self.model_types):
            return False
        return any(re.search(pattern, param_name) for pattern in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a configuration."""
        return {key: value for key, value in asdict(self).items() if value is not None} | {
            "partition_type": self.partition_type.value
        }


@dataclass
class AutoTPConfig:
    """Rules in the order in which they are tried."""

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name: str, model_type: str | None = None) -> TPLayerSpec | None:
        """The first rule for a weight of this name."""
        return next((spec for spec in self.layer_specs if spec.matches(param_name, model_type)), None)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> "AutoTPConfig":
        """As `tensor_parallel.partition_config` has it; keys that it does not have are refused."""
        load({"tensor_parallel": {"partition_config": dict(config_dict)}})
        given = dict(config_dict)
        specs = [TPLayerSpec(**{**spec, "patterns": list(spec["patterns"])}) for spec in given.pop("layer_specs", ())]
        return cls(layer_specs=specs, **given)

    def to_dict(self) -> dict[str, Any]:
        """What stands in `tensor_parallel.partition_config`."""
        own = {key: value for key, value in asdict(self).items() if key not in ("layer_specs", "tp_size")}
        return own | {"layer_specs": [spec.to_dict() for spec in self.layer_specs]}


def merge_autotp_configs(base: AutoTPConfig, override: AutoTPConfig) -> AutoTPConfig:
    """The second, whose rules are tried before those of the first."""
    return replace(override, layer_specs=[*override.layer_specs, *base.layer_specs])


def _specs(columns: Sequence[str], rows: Sequence[str], fused: Mapping[str, Any] | None = None) -> list[TPLayerSpec]:
    found = [TPLayerSpec([_end(name)], shape=shape) for name, shape in (fused or {}).items()]
    found.append(TPLayerSpec([_end(name) for name in rows], PartitionType.ROW))
    return [*found, *([TPLayerSpec([_end(name) for name in columns])] if columns else [])]


def _end(name: str) -> str:
    return rf"\.{re.escape(name)}\.weight$"


def _ends(pattern: str) -> str:
    return rf"\.(?:{pattern})\.weight$"


_ATTENTION: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA: Final = ((*_ATTENTION, "mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj"))


PRESETS: Final = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")


class AutoTPPresets:
    """Rules for families of models. mizzen needs none: it finds layers by what they read."""

    @staticmethod
    def llama() -> AutoTPConfig:
        """Llama, and all with its names."""
        return AutoTPConfig(layer_specs=_specs(*_LLAMA))

    @staticmethod
    def qwen2() -> AutoTPConfig:
        """Qwen2, with Llama's names."""
        return AutoTPConfig(layer_specs=_specs(*_LLAMA))

    @staticmethod
    def phi3() -> AutoTPConfig:
        """Phi-3: gate and up in one matrix; Q, K and V too, whose sizes are found by how they are read."""
        specs = _specs(("self_attn.qkv_proj",), _LLAMA[1], {"mlp.gate_up_proj": (2, -1)})
        return AutoTPConfig(layer_specs=specs)

    @staticmethod
    def bloom() -> AutoTPConfig:
        """Bloom: Q, K and V of each head side by side in one matrix."""
        columns = ("self_attention.query_key_value", "mlp.dense_h_to_4h")
        return AutoTPConfig(layer_specs=_specs(columns, ("self_attention.dense", "mlp.dense_4h_to_h")))

    @staticmethod
    def chatglm() -> AutoTPConfig:
        """ChatGLM: Q, K and V in one matrix, whose sizes are found by how they are read; gate and up in another."""
        rows = ("self_attention.dense", "mlp.dense_4h_to_h")
        specs = _specs(("self_attention.query_key_value",), rows, {"mlp.dense_h_to_4h": (2, -1)})
        return AutoTPConfig(layer_specs=specs)

    @staticmethod
    def mixtral() -> AutoTPConfig:
        """Mixtral: Llama's attention; experts as far as they are layers, as those of older files are."""
        columns, rows = r"self_attn\.[qkv]_proj|experts\.\d+\.w[13]", r"self_attn\.o_proj|experts\.\d+\.w2"
        return AutoTPConfig(layer_specs=[TPLayerSpec([_ends(rows)], PartitionType.ROW), TPLayerSpec([_ends(columns)])])

    @staticmethod
    def deepseek_v2() -> AutoTPConfig:
        """DeepSeek-V2: heads of keys and values come out of a few features, and a layer with keys for all is whole."""
        mlp = r"mlp\.(?:shared_experts\.|experts\.\d+\.)?"
        columns = rf"self_attn\.(?:q_proj|q_b_proj|kv_b_proj)|{mlp}(?:gate|up)_proj"
        whole = r"self_attn\.(?:q_a_proj|kv_a_proj_with_mqa)"
        return AutoTPConfig(
            layer_specs=[
                TPLayerSpec([_ends(whole)], PartitionType.SKIP),
                TPLayerSpec([_ends(rf"self_attn\.o_proj|{mlp}down_proj")], PartitionType.ROW),
                TPLayerSpec([_ends(columns)]),
            ]
        )

    @staticmethod
    def get_preset(model_type: str) -> AutoTPConfig | None:
        """The rules of a family by its name; None where there are none."""
        name = model_type.lower()
        return getattr(AutoTPPresets, name)() if name in PRESETS else None


STYLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "colwise": {},
    "colwise_rep": {"gather_output": True},
    "colwise_gather_output": {"gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
    "embedding_rowwise": {"partition_type": PartitionType.ROW},
}


class TPPlanConverter:
    """The plan that a model of transformers has for itself, as rules."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec]:
        """One rule for each pattern, of which a star is one name of a path."""
        unknown = sorted({*hf_tp_plan.values()} - STYLES.keys())
        if unknown:
            raise UsageError(
                f"no rule says what the style {unknown[0]!r} of transformers is; known: {', '.join(STYLES)}"
            )
        return [
            TPLayerSpec([rf"(^|\.){re.escape(path).replace(re.escape('*'), '[^.]+')}\.weight$"], **STYLES[style])
            for path, style in hf_tp_plan.items()
        ]


class AutoTP:
    """Which layers of a model are summed over ranks, found by what reads what and not by their names."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotBuilt(
            "AutoTP as an object that replaces layers: initialize() cuts a model, by tensor_parallel.autotp_size"
        )

    @staticmethod
    def supported(model: Any) -> bool:
        """Whether anything of a model can be cut; a plan says what, or why not."""
        return not isinstance(model, nn.Module) or bool(find_regions(flow_of(model)))

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """For each class of blocks the layers whose outputs are summed, by their paths in a block."""
        found: dict[type[nn.Module], dict[str, None]] = {}
        rows = [layer.path for region in find_regions(flow_of(model)) for layer in region.sinks]
        for block in Blocks.of(Sketch.of(model)).units:
            inside = (row.removeprefix(f"{block.path}.") for row in rows if row.startswith(f"{block.path}."))
            found.setdefault(type(model.get_submodule(block.path)), {}).update(dict.fromkeys(inside))
        return [(kind, list(paths)) for kind, paths in found.items() if paths]


def move(tensor: torch.Tensor, device: Any, copy: bool = True) -> torch.Tensor:
    """A tensor on another device; one without values is made there."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device, copy=copy)


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TensorParallelConfig:
    """The section of a configuration, with its defaults."""
    return load({"tensor_parallel": dict(ds_config.get("tensor_parallel", {}))}).tensor_parallel


class TpTrainingManager:
    """A model that is to be cut, as `module`: `initialize` does it."""

    def __init__(self, model: nn.Module, tp_size: int, dtype: torch.dtype) -> None:
        self.module = tp_model_init(model, tp_size, dtype)


def load_ds_config(config: Any) -> dict[str, Any]:
    """A configuration as a dict, wherever it is."""
    return dict(read_source(config))


def infer_config_dtype(config_dict: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the precision that a configuration enables; None where it enables none."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if dict(config_dict.get(key) or {}).get("enabled") is True:
            return dtype
    return None


def tp_group_world_size(tp_group: Any, dist_module: Any = None) -> int | None:
    """How many ranks a group has; None without a group."""
    return None if tp_group is None else groups.get_world_size(tp_group)
