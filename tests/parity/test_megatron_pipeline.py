"""Layers that are cut over tensor-parallel ranks, in the stages of a PipelineModule, train as one process does."""

import pytest
import torch
from torch import nn

import mizzen
from breadth import choice
from mizzen import tensor
from mizzen.errors import ConfigError
from mizzen.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, TiedLayerSpec
from parity.gpt import VOCABULARY, WIDTH, Block, batch

SAMPLES, STEPS, MICROS = 8, 3, 2


class Norm(nn.LayerNorm):
    """The last one, which sees a part of the sequence where that is cut."""

    def __init__(self, sequence: bool) -> None:
        super().__init__(WIDTH)
        if sequence:
            tensor.mark_sequence_parallel(self)


class Logits:
    """The table once more, as the head."""

    def __init__(self, sequence: bool) -> None:
        self.sequence = sequence

    def __call__(self, embed: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return tensor.parallel_lm_logits(hidden, embed.weight, sequence_parallel=self.sequence)


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return tensor.vocab_parallel_cross_entropy(logits, labels.t(), vocab_size=VOCABULARY).mean()


def transposed(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.t()


def built(topology, sequence: bool) -> PipelineModule:
    torch.manual_seed(5)
    group = tensor.get_tensor_model_parallel_group()
    table = (tensor.VocabParallelEmbedding, VOCABULARY, WIDTH, nn.init.normal_)
    return PipelineModule(
        [
            transposed,
            TiedLayerSpec("embed", *table, reduce_scatter_embeddings=sequence),
            *(LayerSpec(Block, group, sequence, 0.0) for _ in range(4)),
            LayerSpec(Norm, sequence),
            TiedLayerSpec("embed", *table, reduce_scatter_embeddings=sequence, forward_fn=Logits(sequence)),
        ],
        topology=topology,
        loss_fn=loss,
    )


def settings(stage: int, **more) -> dict:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "progress": {"enabled": False},
        "seed": 1,
        **more,
    }


def train(pp: int, tp: int, sequence: bool, stage: int, more: dict) -> tuple:
    mpu = tensor.initialize_model_parallel(tp, pp)
    topology = PipeModelDataParallelTopology(pp, tp, mpu.get_data_parallel_world_size())
    engine, *_ = mizzen.initialize(model=built(topology, sequence), config=settings(stage, **more))
    assert engine.settings.tensor_parallel_size == tp, "as the topology says"
    losses = []
    for step in range(STEPS):
        ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
        own = [each.chunk(ranks)[rank].chunk(MICROS) for each in batch(step, SAMPLES)]
        losses.append(engine.train_batch(iter(list(zip(*own, strict=True)))).loss)
    return losses, {name: mizzen.zero.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


def reference() -> tuple:
    """One process, plain torch."""
    model = built(PipeModelDataParallelTopology(1, 1, 1), False)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    rule, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        rule.zero_grad()
        tokens, labels = batch(step, SAMPLES)
        found = loss(model(tokens), labels)
        found.backward()
        rule.step()
        losses.append(found.item())
    return losses, before, {name: value.detach() - before[name] for name, value in model.named_parameters()}


CASES = [
    # ranks, stages, tensor-parallel ranks, sequence, ZeRO stage, more keys
    (4, 2, 2, True, 1, {}),
    (8, 2, 2, False, 3, {}),
    (8, 2, 2, True, 2, {"pipeline": {"schedule": "zbv"}}),
    (4, 2, 2, False, 0, {"pipeline": {"schedule": "interleaved"}, "activation_checkpointing": {"mode": "full"}}),
    (8, 4, 2, True, 1, {}),
]


@pytest.mark.parametrize(("size", "pp", "tp", "sequence", "stage", "more"), choice(CASES, CASES[:1]))
def test_a_gpt_of_layers_in_stages_trains_as_one_process(world, size, pp, tp, sequence, stage, more):
    losses, before, updates = reference()
    seen = set()
    for found, values in world(size).run(train, pp, tp, sequence, stage, more):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in values.items():
            assert (value - before[name] - updates[name]).norm() <= 2e-3 * updates[name].norm(), name
        seen |= values.keys()
    assert seen == set(updates)


def test_a_topology_and_a_configuration_that_differ_are_refused(world):
    world(1).run(differing)


def differing() -> None:
    model = built(PipeModelDataParallelTopology(1, 1, 1), False)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 2, but the PipelineModule has 1"):
        mizzen.initialize(model=model, config=settings(0, tensor_parallel_size=2))
