"""Each block is compiled on its own: what is asked of torch, how many graphs that gives, and the same numbers."""

import copy
import shutil

import pytest
import setuptools  # noqa: F401  inductor wants its distutils, and finds Python's own if that was loaded first
import torch
from torch import nn
from torch._dynamo.utils import counters

from breadth import FULL
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.errors import ConfigError, PlanError, UsageError
from mizzen.model.sketch import Sketch
from mizzen.plan.cost import Cost
from mizzen.plan.parts import Part
from mizzen.rewrite.compile import Compile, compile_blocks
from mizzen.rewrite.recompute import Keeping, Recomputed


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, inputs, *, scale=None):
        found = self.drop(self.down(torch.relu(self.up(inputs))))
        return inputs + (found if scale is None else found * scale)


class Model(nn.Module):
    def __init__(self, count: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(count))

    def forward(self, inputs):
        inputs = self.start(inputs)
        for layer in self.layers:
            inputs = layer(inputs, scale=torch.ones(1))
        return inputs.pow(2).mean()


SKETCH = Sketch.of(Model())


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def choose(sketch=SKETCH, recompute=None, **keys):
    config = {"compile": {"enabled": True, **keys}, "activation_checkpointing": recompute or {}}
    return Compile().wants(load(config), Layout(), (sketch,))


def test_only_when_enabled():
    assert choose(enabled=False, mode="max-autotune", backend="eager", fullgraph=True) is None


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({}, {"backend": "inductor", "dynamic": None, "fullgraph": False}, "4 blocks (Layer) one by one by inductor"),
        (
            {"mode": "max-autotune", "dynamic": True, "fullgraph": True},
            {"backend": "inductor", "mode": "max-autotune", "dynamic": True, "fullgraph": True},
            "4 blocks (Layer) one by one by inductor (max-autotune), for changing shapes, each as one graph",
        ),
        (
            {"backend": "aot_eager", "dynamic": False, "blocks": ["layers.2"]},
            {"backend": "aot_eager", "dynamic": False, "fullgraph": False},
            "1 block (Layer) one by one by aot_eager, for fixed shapes",
        ),
    ],
    ids=str,
)
def test_what_is_asked_of_torch(keys, options, words):
    choice = choose(**keys)
    assert (choice.options(), str(choice)) == (options, words)
    assert Compile().price(choice, 0) == Cost()


def test_which_modules():
    assert choose().paths == tuple(f"layers.{number}" for number in range(4))
    assert choose(blocks=["start"]).paths == ("start",)
    alone = choose(Sketch.of(Model(1)))
    assert alone.paths == ("",)
    assert str(alone) == "the whole model, in which no block repeats, by inductor"
    assert str(choose(Sketch(()))) == "each repeated block by inductor"


RECOMPUTE = {"mode": "full"}
REFUSED = {
    "a mode of another backend": (
        {"mode": "reduce-overhead", "backend": "aot_eager"},
        "compile.mode is reduce-overhead, which only the backend inductor has; compile.backend is aot_eager",
    ),
    "a backend that forgets random numbers": (
        {"backend": "eager", "recompute": RECOMPUTE},
        "compile.enabled with activation_checkpointing.mode full: the backend eager does not promise",
    ),
    "inputs on the host": (
        {"recompute": {"mode": "selective", "cpu_checkpointing": True}},
        "activation_checkpointing.mode selective: the compiler decides itself what it keeps",
    ),
    "a block that is not there": ({"blocks": ["Layers"]}, "compile.blocks: 'Layers' is neither a class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(name):
    keys, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        choose(**keys)


def test_what_each_of_them_needs_is_not_refused_alone():
    assert choose(backend="eager").backend == "eager"
    assert choose(backend="eager", recompute={"cpu_checkpointing": True}) is not None
    assert choose(recompute=RECOMPUTE) is not None


def test_passes_over_the_graph_are_refused_and_their_switches_do_nothing():
    with pytest.raises(ConfigError, match="compile.deepcompile: refused: .*use compile.enabled"):
        load({"compile": {"deepcompile": True}})
    load({"compile": {"deepcompile": False, "passes": ["z1"], "offload_activation": True, "double_buffer": False}})


def recomputed(model, keeping):
    for layer in model.layers:
        vars(layer)["forward"] = Recomputed(layer.forward, keeping)


def test_a_backend_that_torch_does_not_have_is_refused_before_the_first_forward():
    with pytest.raises(PlanError, match="compile.backend: torch has no 3; known: .*aot_eager.*inductor"):
        compile_blocks(nn.Linear(2, 2), {"backend": 3})
    with pytest.raises(UsageError, match="torch.compile does not take .*'dynamic': 'x'"):
        compile_blocks(nn.Linear(2, 2), {"backend": "eager", "dynamic": "x"})
    with pytest.raises(PlanError, match="compile.backend: torch has no 'nosuch'; known: .*aot_eager.*inductor"):
        compile_blocks(Model(), {"backend": "nosuch"})


@pytest.mark.parametrize(
    ("keeping", "backend", "message"),
    [(Keeping(), "eager", "the backend eager does not promise"), (Keeping(on_host=True), "inductor", "host memory")],
    ids=str,
)
def test_a_model_in_use_is_refused_for_the_same_reasons(keeping, backend, message):
    model = Model()
    recomputed(model, keeping)
    with pytest.raises(UsageError, match=f"blocks that are computed again: .*{message}"):
        compile_blocks(model, {"backend": backend})
    assert compiled_in(model) == []


def compiled_in(model):
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def test_modules_are_compiled_in_place():
    model = Model()
    names = list(model.state_dict())
    parts = (Part(model),)
    assert Compile().apply(parts, choose(backend="eager", blocks=["layers.1", "start"]), None) == parts
    assert compiled_in(model) == ["start", "layers.1"]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(("count", "expected"), [(1, [""]), (2, ["layers.0", "layers.1"])])
def test_a_model_in_use_is_compiled_block_by_block(count, expected):
    model = Model(count)
    compile_blocks(model, {"backend": "eager"})
    assert compiled_in(model) == expected


def gradients(model, *, lengths=(5,), steps=2):
    """Losses, and the gradients of all steps together; with the graphs that each step has added."""
    losses, graphs = [], []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(2, lengths[step % len(lengths)], 8))
        loss.backward()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, [parameter.grad for parameter in model.parameters()], graphs


KEEPINGS = [None, Keeping(), Keeping(products=True)]


@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
def test_the_same_numbers_with_dropout_and_one_graph_for_a_block(keeping):
    model = Model(dropout=0.5)
    other = copy.deepcopy(model)
    losses, expected, _ = gradients(model)
    if keeping:
        recomputed(other, keeping)
    compile_blocks(other, {"backend": "aot_eager", "fullgraph": True})
    again, found, graphs = gradients(other)
    assert again == losses
    assert all(map(torch.equal, found, expected))
    assert graphs == [1, 1]


@pytest.mark.dear
@pytest.mark.parametrize("keeping", KEEPINGS, ids=str)
@pytest.mark.parametrize(("dynamic", "at_most"), [(None, 3), (True, 2), (False, 2)])
def test_nothing_is_compiled_after_both_lengths_were_seen(keeping, dynamic, at_most):
    """However many blocks there are. For changing shapes the first, whose input is no block's, may have its own."""
    model = Model(5)
    if keeping:
        recomputed(model, keeping)
    compile_blocks(model, {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic})
    _, _, graphs = gradients(model, lengths=(5, 9), steps=8)
    assert 1 <= graphs[1] <= at_most, "blocks do not share their graphs"
    assert graphs[2:] == [graphs[1]] * 6
    assert not counters["graph_break"]


def test_hooks_on_parameters_fire_once_for_each():
    model = Model()
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    recomputed(model, Keeping())
    compile_blocks(model, {"backend": "aot_eager"})
    gradients(model, steps=1)
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


class Masked(nn.Module):
    """Its gradient shows which units backward thinks were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs):
        return self.drop(inputs * inputs) / 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
@pytest.mark.skipif(not FULL, reason="a minute of that compiler: FULL=1")
@pytest.mark.wide
def test_inductor_drops_in_backward_what_it_has_dropped_in_forward(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    block, inputs = Masked(), torch.ones(64, requires_grad=True)
    vars(block)["forward"] = Recomputed(block.forward, Keeping())
    block.compile(fullgraph=True)
    output = block(inputs)
    output.sum().backward()
    assert torch.equal(inputs.grad, 2 * output)
    assert set(output.tolist()) == {0.0, 1.0}
