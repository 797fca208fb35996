"""Which blocks are computed again: decided from keys and a sketch, refused with reasons, done and undone."""

import types

import pytest
import torch
from torch import nn

from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.errors import ConfigError, PlanError
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.plan.build import build
from mizzen.plan.cost import Cost
from mizzen.plan.explain import explain
from mizzen.plan.parts import Part
from mizzen.rewrite.forward import restore
from mizzen.rewrite.recompute import Checkpointing, Keeping, Recompute, RecomputeChoice, Recomputed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inner(inputs).sin()


class Model(nn.Module):
    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


SKETCH = Sketch.of(Model())


def choose(sketch=SKETCH, layout=None, **keys):
    return Recompute().wants(load({"activation_checkpointing": keys}), layout or Layout(dp_shard=2), (sketch,))


def test_off_is_nothing():
    assert choose() is None
    assert choose(partition_activations=True, profile=True, contiguous_memory_optimization=True) is None


@pytest.mark.parametrize(
    ("keys", "numbers", "keeping", "words"),
    [
        ({"mode": "full"}, range(5), Keeping(), "5 blocks (Layer)"),
        ({"mode": "full", "every": 2}, (0, 2, 4), Keeping(), "3 of 5 blocks (Layer)"),
        ({"mode": "full", "every": 3}, (0, 3), Keeping(), "2 of 5 blocks (Layer)"),
        (
            {"mode": "selective"},
            range(5),
            Keeping(products=True),
            "5 blocks (Layer), keeping matrix products and attention",
        ),
        (
            {"mode": "full", "cpu_checkpointing": True},
            range(5),
            Keeping(on_host=True),
            "5 blocks (Layer), inputs in host memory",
        ),
        (
            {"mode": "selective", "cpu_checkpointing": True, "blocks": ["layers.1"]},
            (1,),
            Keeping(products=True, on_host=True),
            "1 block (Layer), keeping matrix products and attention, inputs in host memory",
        ),
    ],
    ids=str,
)
def test_blocks_and_words(keys, numbers, keeping, words):
    choice = choose(**keys)
    assert choice.paths == tuple(f"layers.{number}" for number in numbers)
    assert (choice.keeping, str(choice)) == (keeping, words)


def test_the_host_without_a_mode_is_for_the_calls_of_the_model_itself():
    choice = choose(cpu_checkpointing=True)
    assert choice.paths == ()
    assert str(choice) == "calls of checkpointing.checkpoint, inputs in host memory"


def test_without_a_model():
    empty = Sketch(())
    assert str(choose(empty, mode="full")) == "every block"
    assert str(choose(empty, mode="selective", every=2)) == "one block in 2, keeping matrix products and attention"


REFUSED = {
    "every without a mode": (
        {"every": 2},
        r"activation_checkpointing.every says which blocks .*mode is off: set it to full or selective",
    ),
    "blocks without a mode": ({"blocks": ["Layer"]}, "activation_checkpointing.blocks says which blocks"),
    "a block that is not there": (
        {"mode": "full", "blocks": ["layers.9"]},
        "activation_checkpointing.blocks: 'layers.9' is neither a class nor a module",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(name):
    keys, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        choose(**keys)


def test_a_model_without_repetition_is_told_to_name_blocks():
    alone = Sketch.of(Model(1))
    with pytest.raises(PlanError, match="mode is full, but no module of this model repeats: name the modules"):
        choose(alone, mode="full")
    assert choose(alone, mode="full", blocks=["Layer"]).paths == ("layers.0",)


def test_parts_of_inputs_need_tensor_parallel_ranks_and_are_not_built():
    with pytest.raises(PlanError, match="partition_activations over tp=2: .* not built yet; leave the key out"):
        choose(partition_activations=True, layout=Layout(dp_shard=2, tp=2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "sometimes"}, r'activation_checkpointing.mode: "sometimes" is not one of'),
        ({"every": 0}, "activation_checkpointing.every: 0 is below the least allowed value, 1"),
        ({"blocks": [""]}, "activation_checkpointing.blocks.0: an empty string is not a name"),
        ({"granularity": "full"}, "activation_checkpointing.granularity: unknown key"),
    ],
    ids=str,
)
def test_wrong_keys(keys, message):
    with pytest.raises(ConfigError, match=message):
        load({"activation_checkpointing": keys})


def test_the_plan_says_it():
    config = {"train_batch_size": 2, "activation_checkpointing": {"mode": "selective"}, "compile": {"enabled": True}}
    lines = explain(build(load(config), 2, SKETCH, ORDER)).splitlines()
    assert [line for line in lines if line.startswith("  ")][:3] == [
        "  1. recompute: 5 blocks (Layer), keeping matrix products and attention",
        "  2. compile: 5 blocks (Layer) one by one by inductor",
        "  3. shard: ZeRO stage 0 over dp=2 in 1 bucket, sums in float32",
    ]


def test_activations_are_not_part_of_the_price():
    assert Recompute().price(choose(mode="full"), 0) == Cost()


def apply(model, *paths, **keeping):
    choice = RecomputeChoice(paths, Keeping(**keeping), "")
    parts = (Part(model),)
    assert Recompute().apply(parts, choice, None) == parts
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), Recomputed)]


def test_blocks_are_changed_in_place_and_keep_their_names():
    model = Model()
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    assert apply(model, "layers.1", "layers.3") == ["layers.1", "layers.3"]
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == names


def test_paths_of_other_parts_are_left_to_them():
    assert apply(Model(2), "layers.1", "layers.7") == ["layers.1"]


def test_applying_again_replaces():
    model = Model()
    apply(model, "layers.0", "layers.1")
    assert apply(model, "layers.1", products=True) == ["layers.1"]
    standing = vars(model.layers[1])["forward"]
    assert standing.keeping == Keeping(products=True)
    assert not isinstance(standing.__wrapped__, Recomputed)


def test_restoring_gives_every_block_its_own_forward_back():
    model = Model()
    apply(model, "layers.0", "layers.1")
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_else_has_put_there_is_called_and_comes_back():
    model = Model()
    calls = []

    def louder(self, inputs):
        calls.append(inputs)
        return Layer.forward(self, inputs) * 2

    mine = vars(model.layers[0])["forward"] = types.MethodType(louder, model.layers[0])
    apply(model, "layers.0")
    model(torch.ones(1, 4)).sum().backward()
    assert len(calls) == 2, "not computed again"
    restore(model)
    assert vars(model.layers[0])["forward"] is mine


@pytest.mark.parametrize("told", [None, Keeping()], ids=["silent", "told"])
def test_the_first_to_say_how_inputs_are_kept_is_heard(told):
    Checkpointing.current().keeping = told
    apply(Model(), on_host=True)
    assert Checkpointing.current().keeping == (told or Keeping(on_host=True))


def test_blocks_alone_say_nothing_about_calls():
    apply(Model(), "layers.0", products=True)
    assert Checkpointing.current().keeping is None
