"""Configurations of several kinds of parallelism that cannot be, and what is said of them, before any rank exists."""

import pytest
from torch import nn

from mizzen.api import sketch_of
from mizzen.config.load import load
from mizzen.errors import MizzenError
from mizzen.order import ORDER
from mizzen.plan.build import build
from parity.decoders import Decoder

TP, PP = {"tensor_parallel": {"autotp_size": 2}}, {"pipeline_parallel_size": 2}
FULL = {"activation_checkpointing": {"mode": "full"}}


def zero(stage: int, **more) -> dict:
    return {"zero_optimization": {"stage": stage, **more}}


def pipeline(**more) -> dict:
    return PP | {"pipeline": more}


WRONG = [
    (6, TP | PP, "world size 6 is not a multiple of pp*sp*tp = 2*1*2 = 4: use 4 or 8 ranks"),
    (2, TP | PP, "world size 2 is not a multiple of pp*sp*tp = 2*1*2 = 4: use 4 ranks, or tp=1, or pp=1"),
    (8, {"tensor_parallel": {"autotp_size": 3}}, "world size 8 is not a multiple of pp*sp*tp = 1*1*3 = 3"),
    (12, {"pipeline_parallel_size": 3} | TP, "do not make 3 chunks: use fewer stages"),
    (8, {"pipeline_parallel_size": 4} | TP, "2 blocks (blocks) do not make 4 chunks: use fewer stages"),
    (4, pipeline(schedule="interleaved") | TP, "2 blocks (blocks) do not make 4 chunks: use fewer stages, or fewer"),
    (4, pipeline(schedule="2f2b") | TP, "pipeline.schedule: '2f2b' is unknown; there are 1f1b, gpipe"),
    (4, pipeline(schedule=["0F0 0B0"]) | TP, "pipeline.schedule has 1 row for pipeline_parallel_size 2"),
    (4, pipeline(virtual_stages=3) | TP, "pipeline.virtual_stages is 3, but schedule '1f1b' gives every stage 1 chunk"),
    (4, {"pipeline": {"schedule": "gpipe"}} | TP, "pipeline.schedule is set, but there is one stage"),
    (4, {"pipeline": {"virtual_stages": 2}} | TP, "pipeline.virtual_stages is set, but there is one stage"),
    (8, TP | PP | {"sequence_parallel_size": 2}, "sequence_parallel_size: sequence parallelism is not built yet"),
    (8, TP | PP | {"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: expert parallelism is not built"),
    (8, TP | PP | zero(1) | {"data_parallel_replicate_size": 2}, "stage 1 in 2 copies: sharding inside copies"),
    (8, TP | PP | {"data_parallel_replicate_size": 3}, "pp*dp_replicate*sp*tp = 2*3*1*2 = 12: use 12 ranks"),
    (16, TP | PP | zero(3, mics_shard_size=3), "mics_shard_size: 3 does not divide the 4 data-parallel ranks"),
    (8, TP | PP | zero(3, mics_shard_size=1), "zero_optimization.mics_shard_size is 1 at stage 3"),
    (8, TP | PP | zero(3, zero_hpz_partition_size=3), "zero_optimization.zero_hpz_partition_size is 3, which does not"),
    (8, TP | PP | {"data_parallel_size": 4}, "data_parallel_size: 4 is not what 8 ranks leave for it, 2"),
    (4, TP | PP | {"train_batch_size": 3, "gradient_accumulation_steps": 2}, "train_batch_size: 3 is not a multiple"),
    (8, TP | PP | {"activation_checkpointing": {"mode": "full", "partition_activations": True}}, "over tp=2"),
    (8, TP | PP | FULL | {"compile": {"enabled": True, "backend": "eager"}}, "the backend eager does not promise"),
    (8, TP | PP | {"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled over pp=2"),
    (8, TP | PP | {"fused": {"rotary": True}}, "fused.rotary finds no module whose forward calls"),
    (8, TP | PP | {"fused": {"head_chunk": 8}}, "fused.head_chunk is about the chunks of fused.head_loss"),
    (8, TP | PP | {"tensor_parallel_size": 2}, "that the model is split already, and tensor_parallel asks to split it"),
    (8, PP | {"tensor_parallel_size": 2}, "the model is said to come split over 2 tensor-parallel ranks"),
    (8, {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["nothing"]}]}}} | PP,
     "the pattern 'nothing' fits no layer"),
]  # fmt: skip
"""Ranks, keys, and words of the message."""


@pytest.mark.parametrize(("ranks", "keys", "words"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_is_refused_with_the_way_out(ranks, keys, words):
    batch = {} if "train_batch_size" in keys else {"train_micro_batch_size_per_gpu": 2}
    with pytest.raises(MizzenError) as told:
        config = load({"optimizer": {"type": "SGD"}, **batch, **keys})
        build(config, ranks, sketch_of(Decoder(), config), ORDER)
    assert words in str(told.value)


def test_a_model_without_blocks_has_no_stages():
    config = load({"train_batch_size": 4} | PP)
    with pytest.raises(MizzenError, match="no module of Linear repeats in a list"):
        build(config, 2, sketch_of(nn.Linear(2, 2), config), ORDER)
