"""`deepspeed.module_inject`'s rules as objects, and the small layers and functions beside them."""

from argparse import Namespace
from functools import partial
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import mizzen
from drop_in import programs
from mizzen.config.load import load
from mizzen.config.parallel import TensorParallelConfig
from mizzen.errors import MizzenError, NotBuilt
from mizzen.model.sketch import Sketch
from mizzen.model.trace import flow_of
from mizzen.parallel.tensor.rules import decide
from parity.decoders import Decoder
from parity.test_tensor import check, config, values_of, walk


def test_rules_as_objects_are_a_partition_config():
    programs.deepspeed()
    from deepspeed.module_inject import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec, merge_autotp_configs

    own = AutoTPConfig.from_dict(
        {"layer_specs": [{"patterns": [r"\.out\.weight$"], "partition_type": "row"}], "strict_mode": True}
    )
    assert own.layer_specs == [TPLayerSpec([r"\.out\.weight$"], PartitionType.ROW)]
    assert AutoTPConfig.from_dict(own.to_dict()) == own
    llama = AutoTPPresets.get_preset("Llama")
    assert llama.find_matching_spec("model.layers.3.mlp.up_proj.weight").partition_type is PartitionType.COLUMN
    assert llama.find_matching_spec("model.layers.3.mlp.down_proj.weight").partition_type is PartitionType.ROW
    assert llama.find_matching_spec("model.embed_tokens.weight") is None
    assert AutoTPPresets.get_preset("unheard") is None
    both = merge_autotp_configs(llama, own)
    assert both.strict_mode and both.layer_specs == [*own.layer_specs, *llama.layer_specs]
    with pytest.raises(MizzenError, match="layer_spec"):
        AutoTPConfig.from_dict({"layer_spec": []})


class ChatBlock(nn.Module):
    """The names of ChatGLM: Q, K and V of few heads in one matrix, gate and up in another."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.query_key_value, self.self_attention.dense = nn.Linear(16, 16 + 8 + 8), nn.Linear(16, 16)
        self.mlp.dense_h_to_4h, self.mlp.dense_4h_to_h = nn.Linear(16, 2 * 24), nn.Linear(24, 16)

    def forward(self, hidden):
        q, k, v = self.self_attention.query_key_value(hidden).split([16, 8, 8], -1)
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + self.self_attention.dense(mixed)
        gate, up = self.mlp.dense_h_to_4h(hidden).chunk(2, -1)
        return hidden + self.mlp.dense_4h_to_h(functional.silu(gate) * up)


def chatglm() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 16), ChatBlock(), ChatBlock())


PRESETS = {
    "llama": ("llama", 14, 0),
    "qwen2": ("qwen2", 14, 0),
    "phi3": ("phi3", 8, 0),
    "chatglm": (chatglm, 8, 0),
    "mixtral": ("mixtral", 8, 0),
    "deepseek_v2": ("deepseek2", 12, 2),
}
"""A family, a model of it, and how many layers of its blocks are cut, and how many are whole and summed in part."""


@pytest.mark.parametrize("family", PRESETS)
def test_rules_for_families_cut_a_model_of_them(family):
    programs.deepspeed()
    from deepspeed.module_inject import AutoTPPresets

    from parity import transformers_models as models

    kind, cut, summed = PRESETS[family]
    model = kind() if callable(kind) else models.built(kind)
    section = {"autotp_size": 2, "partition_config": AutoTPPresets.get_preset(family).to_dict()}
    section["partition_config"]["use_default_specs"] = False
    settings = load({"train_batch_size": 8, "tensor_parallel": section})
    found = decide(Sketch.of(model).with_flow(flow_of(model)), 2, settings.tensor_parallel)
    styles = [layer.style for layer in found.layers]
    assert sum(style in ("column", "row") for style in styles) == cut
    assert styles.count("partly summed") == summed


def test_every_family_of_the_configuration_has_rules():
    programs.deepspeed()
    from deepspeed.module_inject import AutoTPPresets

    kinds = TensorParallelConfig.model_fields["preset_model"].annotation
    for name in (each for kind in get_args(kinds) for each in get_args(kind)):
        assert AutoTPPresets.get_preset(name).layer_specs, name


def test_shares_of_features_follow_the_heads_that_were_set():
    programs.deepspeed()
    from deepspeed.module_inject import tp_shard

    assert tp_shard.get_shard_size_list(10, 4) == [3, 3, 2, 2]
    tp_shard.set_tp_grain_size(4)
    assert tp_shard.get_shard_size_list(16, 3) == [8, 4, 4]
    tp_shard.set_num_kv_heads(3)
    try:
        assert (tp_shard.get_num_kv_heads(), tp_shard.num_kv_heads) == (3, 3)
        assert tp_shard.get_shard_size_list(12, 2, "self_attn.q_proj") == [8, 4]
        assert tp_shard.get_shard_size_list(12, 2, "mlp.up_proj") == [8, 4]
        assert tp_shard.get_shard_size_list(24, 2, "lm_head") == [12, 12]
        assert tp_shard.get_shard_size(12, 2, "self_attn.q_proj", rank=1) == 4
    finally:
        tp_shard.set_num_kv_heads(None)
        tp_shard.set_tp_grain_size(1)


def test_classes_of_injection_policies_can_be_named():
    programs.deepspeed()
    from deepspeed.module_inject.containers import HFBertLayerPolicy
    from deepspeed.module_inject.replace_policy import HFBertLayerPolicy as Same
    from deepspeed.module_inject.replace_policy import HFGPT2LayerPolicy

    assert HFBertLayerPolicy is Same
    with pytest.raises(MizzenError, match="HFGPT2LayerPolicy waits for"):
        HFGPT2LayerPolicy(None)


def test_the_plan_of_transformers_becomes_rules():
    programs.deepspeed()
    from deepspeed.module_inject.autotp_config import PartitionType
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES, TPPlanConverter

    plan = {"model.layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_rep"}
    up, down, head = TPPlanConverter.convert(plan)
    assert up.matches("model.layers.11.mlp.up_proj.weight") and not up.matches("model.layers.1.x.mlp.up_proj.weight")
    assert down.partition_type is PartitionType.ROW and head.gather_output
    assert TPPlanConverter.convert(dict.fromkeys("abcdef", "colwise")) and len(SUPPORTED_STYLES) == 6
    with pytest.raises(MizzenError, match="'grouped_gemm'"):
        TPPlanConverter.convert({"experts": "grouped_gemm"})


def by_rules() -> tuple:
    """Rules as objects, in the place where a file has them, of which a model is cut."""
    programs.deepspeed()
    from deepspeed.module_inject import AutoTPConfig, PartitionType, TPLayerSpec

    rules = AutoTPConfig(
        layer_specs=[
            TPLayerSpec([r"mlp\.up"], shape=(2, -1)),
            TPLayerSpec([r"mlp\.down"], PartitionType.ROW),
            TPLayerSpec([r"attention\."], PartitionType.SKIP),
        ]
    )
    section = {"autotp_size": 2, "partition_config": rules.to_dict()}
    engine, *_ = mizzen.initialize(model=Decoder(), config=config(2, 1, tensor_parallel=section))
    shapes = [tuple(engine.module.get_submodule(f"blocks.0.{name}").weight.shape) for name in ("mlp.up", "attention.q")]
    return *walk(engine), values_of(engine), shapes


def test_a_model_is_cut_by_rules_as_objects(world):
    found = world(2).run(by_rules)
    check([each[:3] for each in found], "grouped", "SGD", 0.0)
    assert {tuple(each[3]) for each in found} == {((24, 16), (16, 16))}


def test_what_is_summed_is_found_by_what_reads_what():
    programs.deepspeed()
    from deepspeed.module_inject.auto_tp import AutoTP, move

    model = Decoder()
    assert AutoTP.supported(model) and not AutoTP.supported(nn.LayerNorm(4))
    assert AutoTP.tp_parser(model) == [(type(model.blocks[0]), ["attention.out", "mlp.down"])]
    with pytest.raises(MizzenError, match="autotp_size"):
        AutoTP(model)
    given = torch.ones(2)
    assert move(given, "cpu").data_ptr() != given.data_ptr() and move(given, "meta").is_meta


def test_the_section_and_the_dtype_of_a_configuration(tmp_path):
    programs.deepspeed()
    from deepspeed.runtime.tensor_parallel import TpTrainingManager, get_tensor_parallel_config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.tensor_parallel.init_utils import infer_config_dtype, load_ds_config, tp_group_world_size

    section = get_tensor_parallel_config({"tensor_parallel": {"autotp_size": 4}, "train_batch_size": 2})
    assert isinstance(section, TPTrainingConfig) and section.autotp_size == 4 and not section.tp_overlap_comm
    assert isinstance(section.tensor_parallel, TPConfig)
    file = tmp_path / "config.json"
    file.write_text('{"bf16": {"enabled": true}}')
    assert infer_config_dtype(load_ds_config(str(file))) is torch.bfloat16
    assert infer_config_dtype({"fp16": {"enabled": False}}) is None and tp_group_world_size(None) is None
    model = nn.Linear(2, 2)
    assert TpTrainingManager(model, 2, torch.bfloat16).module is model and model.weight.dtype is torch.bfloat16


class GLMBlock(nn.Module):
    """By its name, Q, K and V lie in its matrix one after the other."""


class BloomBlock(nn.Module):
    """By its name, they lie side by side for each head."""


def fused() -> tuple:
    programs.deepspeed()
    from deepspeed.module_inject.layers import (
        AsyncColumnParallel,
        FusedModuleWrapper,
        GatherFromTensorParallelRegion,
        GatherReplacedLayerParams,
        fused_LinearLayer,
    )

    group, inputs = dist.group.WORLD, torch.arange(8.0).view(2, 4)
    torch.manual_seed(1)
    whole = nn.Linear(4, 12)
    kept = whole.weight.detach().clone(), whole.bias.detach().clone()
    expected = functional.linear(inputs, *kept)
    three = fused_LinearLayer(whole, group, fused_module=FusedModuleWrapper(GLMBlock()))
    found = three(inputs)
    with GatherReplacedLayerParams([three.weight], three):
        together = torch.equal(three.weight, kept[0]), tuple(three.bias.shape)
        three.weight.data += 1
    moved = three(inputs) - found
    side = nn.Linear(4, 12)
    side.weight.data, side.bias.data = (each.clone() for each in kept)
    one = fused_LinearLayer(side, group, fused_module=BloomBlock())
    again = GatherFromTensorParallelRegion.apply(group, one(inputs))
    alone = AsyncColumnParallel.apply(group, inputs, one.weight, one.bias)
    with pytest.raises(MizzenError, match="FalconDecoderLayer|CodeGenBlock"):
        fused_LinearLayer(nn.Linear(4, 12), group, fused_module=type("CodeGenBlock", (nn.Module,), {})())
    return found.detach(), expected, together, moved.detach(), again.detach(), torch.equal(alone, one(inputs))


def test_fused_matrices_and_their_gathering(world):
    for rank, (found, expected, together, moved, again, is_same) in enumerate(world(2).run(fused)):
        own = [part[:, rank * 2 : rank * 2 + 2] for part in expected.split(4, -1)]
        torch.testing.assert_close(found, torch.cat(own, -1))
        assert together == (True, (12,))
        torch.testing.assert_close(moved, torch.tensor([[6.0], [22.0]]).expand(2, 6))
        torch.testing.assert_close(again, expected)
        assert is_same


def of_few_heads() -> GLMBlock:
    """A block of ChatGLM2, as its attention says."""
    block = GLMBlock()
    block.self_attention = nn.Module()
    vars(block.self_attention).update(num_attention_heads_per_partition=4, num_multi_query_groups_per_partition=2)
    return block


def with_config(**facts) -> GLMBlock:
    block = GLMBlock()
    block.config = Namespace(**facts)
    return block


@pytest.mark.parametrize(
    ("block", "rows", "reason"),
    [
        (GLMBlock, 16, "16 rows are not 3 equal runs"),
        (GLMBlock, 18, "18 rows are fewer than 3 \\* 8"),  # 4608 of ChatGLM2's 4096 can be divided by three, too
        (lambda: None, 18, "18 rows are fewer than 3 \\* 8"),
        (of_few_heads, 24, "there are 4 heads of queries and 2 of keys"),
        (partial(with_config, num_attention_heads=4, num_key_value_heads=1), 24, "4 heads of queries and 1 of keys"),
    ],
)
def test_queries_keys_and_values_of_different_sizes_are_not_cut_as_equal_ones(block, rows, reason):
    programs.deepspeed()
    from deepspeed.module_inject.layers import fused_LinearLayer

    with pytest.raises(NotBuilt, match=f"differ in size: .*{reason}.*SubParamLinearLayer"):
        fused_LinearLayer(nn.Linear(8, rows), None, fused_module=block())


def test_equal_queries_keys_and_values_are_cut_whatever_else_a_configuration_says():
    programs.deepspeed()
    from deepspeed.module_inject import tp_shard
    from deepspeed.module_inject.layers import fused_LinearLayer

    unread = partial(with_config, num_attention_heads=4, multi_query_group_num=1, multi_query_attention=False)
    for block, rows in ((GLMBlock, 24), (unread, 24), (partial(with_config, num_heads=2, num_kv_heads=2), 12)):
        assert fused_LinearLayer(nn.Linear(8, rows), None, fused_module=block())._runs == (rows // 3,) * 3
    tp_shard.set_num_attention_heads(4)
    tp_shard.set_num_kv_heads(2)
    with pytest.raises(NotBuilt, match="there are 4 heads of queries and 2 of keys"):
        fused_LinearLayer(nn.Linear(8, 24), None, fused_module=GLMBlock())


def test_small_layers():
    programs.deepspeed()
    from deepspeed.module_inject import EmbeddingLayer, Normalize
    from deepspeed.module_inject.fusedqkv_utils import require_tp_fused_qkvw, split_by_qkvlist_and_refuse
    from deepspeed.module_inject.layers import RMSNormalize, add_bias

    table, x = torch.randn(5, 4), torch.randn(2, 4)
    rows = torch.tensor([4, 1])
    assert torch.equal(EmbeddingLayer(weight=nn.Parameter(table))(rows), table[rows])
    assert EmbeddingLayer((3, 2)).weight.dtype is torch.half
    weight, bias = torch.rand(4), torch.rand(4)
    ours = Normalize(weight=nn.Parameter(weight), bias=nn.Parameter(bias))(x)
    torch.testing.assert_close(ours, functional.layer_norm(x, (4,), weight, bias))
    torch.testing.assert_close(RMSNormalize(4, eps=1e-6)(x), functional.rms_norm(x, (4,), None, 1e-6))
    assert torch.equal(add_bias(x, bias), x + bias) and add_bias(x, None) is x
    first, second = split_by_qkvlist_and_refuse([table[:4], table[:4] + 1], 2)
    assert torch.equal(first, torch.cat([table[:2], table[:2] + 1])) and second.shape == (4, 4)
    assert require_tp_fused_qkvw("h.0.attn.c_attn", 2) and not require_tp_fused_qkvw("h.0.attn.c_attn", 1)
