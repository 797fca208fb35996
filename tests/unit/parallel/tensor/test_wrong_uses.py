"""Wrong uses of tensor parallelism, and what is said of each before a rank exists."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from mizzen.api import sketch_of
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.engine import prepare
from mizzen.engine.prepare import choose_optimizer, warn_of_slow_links, with_optimizer_groups
from mizzen.environment import World
from mizzen.errors import MizzenError
from mizzen.order import ORDER
from mizzen.plan.build import build
from parity.decoders import Decoder


class Between(nn.Module):
    """A parameter that features meet in a way nobody can see."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(torch.ones(8))

    def forward(self, given):
        return self.down((self.up(given).unflatten(-1, (3, 8)) * self.gain).flatten(-2))


class Normed(nn.Module):
    """A norm over all features between two layers, and a layer with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.tiny = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, given):
        return self.tiny(self.two(functional.layer_norm(self.one(given), (32,))))


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, nothing, that, can, be, guessed):
        return self.two(functional.relu(self.one(nothing)))


def split_already() -> nn.Module:
    model = Decoder()
    weight = model.blocks[0].mlp.up.weight
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    return model


def planned(model: nn.Module, world: int, section: dict, config: dict) -> None:
    """What `mizzen plan` does."""
    settings = load({"train_batch_size": 24, "tensor_parallel": {"autotp_size": 2, **section}, **config})
    sketch = sketch_of(model, settings)
    if settings.optimizer is not None:
        sketch = with_optimizer_groups(sketch, model, choose_optimizer(None, settings, model, sketch))
    build(settings, world, sketch, ORDER)


def rules(*specs: dict, **more) -> dict:
    return {"partition_config": {"layer_specs": list(specs), **more}}


def sized(size) -> dict:
    return {"autotp_size": size}


COLUMN, ROW, SKIP = ({"partition_type": kind} for kind in ("column", "row", "skip"))
WRONG = {
    "sizes": [
        (
            Decoder,
            3,
            sized(3),
            {},
            "4 heads, 2 of them with keys and values, cannot be shared out among 3 .* take 2 or 4",
        ),
        (Decoder, 8, sized(8), {}, "cannot be shared out among 8 tensor-parallel ranks; take 4"),
        (Decoder, 3, {}, {}, "world size 3 is not a multiple of .* use 2 or 4 ranks, or tp=1 or 3"),
        (Decoder, 2, sized(-1), {}, "autotp_size: -1 is below the least allowed value, 0"),
        (Decoder, 2, sized(True), {}, "autotp_size: true is not a whole number"),
        (Decoder, 2, sized(1.5), {}, "autotp_size: 1.5 is not a whole number"),
        (
            Decoder,
            2,
            {"tensor_parallel": {"tp_size": 4}},
            {},
            "2 is not tensor_parallel.tensor_parallel.tp_size, 4: keep one",
        ),
        (
            Decoder,
            2,
            {},
            {"tensor_parallel_size": 2},
            "the model is split already, and tensor_parallel asks to split it over 2",
        ),
        (Decoder, 4, {}, {"train_batch_size": 3}, "train_batch_size: 3 is not a multiple of dp = 2"),
    ],
    "keys": [
        (Decoder, 2, {"autotpsize": 2}, {}, "autotpsize: unknown key; did you mean 'autotp_size'"),
        (
            Decoder,
            2,
            {"partition_config": {"layer_spec": []}},
            {},
            "layer_spec: unknown key; did you mean 'layer_specs'",
        ),
        (Decoder, 2, {"partition_config": []}, {}, r"partition_config: \[\] is not an object of keys"),
        (Decoder, 2, rules(ROW), {}, "layer_specs.0.patterns: required here, but absent"),
        (
            Decoder,
            2,
            rules({"patterns": ["up"], "partition_type": "both"}),
            {},
            '"both" is not one of .*"column", "row", "skip"',
        ),
        (Decoder, 2, rules({"patterns": ["("]}), {}, r'"\(" is not a regular expression'),
        (Decoder, 2, {"injection_policy_tuple": ["out"]}, {}, "layers are not replaced by name; use partition_config"),
        (Decoder, 2, {"replace_with_kernel_inject": True}, {}, "leave the key out of a training file"),
        (Decoder, 2, {"tensor_parallel": {"mpu": object()}}, {}, r"use initialize\(mpu=...\)"),
        (Decoder, 2, {"preset_model": "gpt9"}, {}, 'preset_model: "gpt9" is not one of .*"llama"'),
    ],
    "rules": [
        (
            Decoder,
            2,
            rules({"patterns": ["nowhere"]}),
            {},
            "the pattern 'nowhere' fits no layer; layers are embed.weight",
        ),
        (
            Decoder,
            2,
            rules({"patterns": [r"attention\.q\."], **SKIP}, {"patterns": ["out"], **ROW}),
            {},
            r"attention.out' is to be cut \(row\), but not all of the layers that belong to it are",
        ),
        (
            Decoder,
            2,
            rules({"patterns": [r"mlp\.up"], "shape": [[8, 8], -1]}),
            {},
            r"shape \[\[8, 8\], -1\] does not fit 'blocks.0.mlp.up'",
        ),
        (
            Decoder,
            2,
            rules({"patterns": ["up"], "shape": [5, -1]}),
            {},
            r"shape \[5, -1\] does not fit .*: its runs are 45 together, not 48",
        ),
        (
            Decoder,
            2,
            rules({"patterns": ["up"], "shape": [["q", "k"], -1]}),
            {},
            r'shape \[\["q", "k"\], -1\] .* runs are numbers above 0',
        ),
        (
            Normed,
            2,
            rules({"patterns": ["one"], **COLUMN}),
            {},
            "'one' is to be cut by outputs, as partition_config says, but",
        ),
        (
            Normed,
            2,
            rules({"patterns": ["tiny"], **COLUMN, "gather_output": True}),
            {},
            "'tiny' has 1 features to cut over 2",
        ),
    ],
    "models": [
        (Opaque, 2, {}, {}, r"no rule says how to cut one, two \(its forward could not be followed: TypeError"),
        (Normed, 2, {"partition_config": {"strict_mode": True}}, {}, "no rule says how to cut one"),
        (
            Between,
            2,
            {},
            {},
            r"'gain' of shape \[8\] meets features of 'up' that would be cut, and it cannot be seen how",
        ),
        (lambda: nn.LayerNorm(8), 2, {}, {}, "the model has no layer with a matrix that could be cut"),
        (split_already, 2, {}, {}, "a model that is split already: 'blocks.0.mlp.up.weight' says so"),
        (
            Decoder,
            2,
            {},
            {"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}},
            "cut along tp, and its update rule needs it whole",
        ),
    ],
}


@pytest.mark.parametrize(
    ("model", "world", "section", "config", "message"),
    [pytest.param(*each, id=f"{kind}-{number}") for kind, every in WRONG.items() for number, each in enumerate(every)],
)
def test_a_wrong_use_is_refused_in_words(model, world, section, config, message):
    with pytest.raises(MizzenError) as told:
        planned(model(), world, section, config)
    assert re.search(message, str(told.value)), str(told.value)


@pytest.mark.parametrize(("tp", "local", "is_told"), [(8, 4, True), (4, 8, False), (4, 6, True), (1, 3, False)])
def test_matrices_that_are_shared_beyond_a_node_are_warned_of(monkeypatch, tp, local, is_told):
    said: list[str] = []
    monkeypatch.setattr(prepare, "warn_once", said.append)
    warn_of_slow_links(Layout(tp=tp), World(0, 8, 0, local))
    assert [f"over {tp} ranks goes beyond a node, which has {local}" in each for each in said] == [True] * is_told
