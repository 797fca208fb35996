"""Which parts of a model are fused, what is refused, and that loss and gradients stay what they were."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from mizzen.ambient import AMBIENT
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.head import HeadSketch
from mizzen.model.sketch import Sketch
from mizzen.plan.cost import Cost
from mizzen.rewrite.compile import compile_blocks
from mizzen.rewrite.forward import ReplacedForward, restore
from mizzen.rewrite.fused import Fused
from mizzen.rewrite.fused_modules import FusedGatedLayer, FusedModule, FusedNorm, FusedRotary
from unit.rewrite.llamas import ALL, FAMILIES, KEYS, build, choose, fuse, gradients


def assert_alike(found, expected, bound=2e-6):
    assert abs(found[0] - expected[0]) <= bound * abs(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        assert (gradient - expected[1][name]).abs().max() <= bound * expected[1][name].abs().max().clamp(min=1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", [*KEYS, "all"])
def test_loss_and_every_gradient(family, key):
    model = build(family)
    expected = gradients(model)
    names = list(model.state_dict())
    fuse(model, **(ALL if key == "all" else {key: True}))
    assert_alike(gradients(model), expected)
    assert list(model.state_dict()) == names
    restore(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert gradients(model)[0] == expected[0]


@pytest.mark.parametrize("more", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_ties_and_biases(more):
    model = build(**more)
    expected = gradients(model)
    assert_alike(gradients(fuse(model, **ALL)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_near_to_the_exact_gradients_as_the_model_itself(dtype):
    exact = gradients(build().double())
    low = gradients(build().to(dtype))
    found = gradients(fuse(build().to(dtype), **ALL))

    def error(gradients):
        return sum((gradients[1][name].double() - exact[1][name]).norm() / exact[1][name].norm() for name in exact[1])

    assert error(found) < 1.2 * error(low)
    assert abs(found[0] - low[0]) < 1e-2


def test_autocast():
    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model)

    expected = run(build())
    assert_alike(run(fuse(build(), **ALL)), expected, bound=3e-2)


def test_which_modules():
    choice = choose(build(), **ALL)
    layers = [f"model.layers.{number}" for number in range(2)]
    assert choice.attentions == tuple(f"{layer}.self_attn" for layer in layers)
    assert choice.gated == tuple(f"{layer}.mlp" for layer in layers)
    assert len(choice.norms) == 5 and choice.norms[-1] == "model.norm"
    assert (choice.head.model, choice.head.path, choice.rows) == ("", "lm_head", 5)
    assert str(choice) == "the loss of lm_head over chunks of 5 tokens, 5 x RMSNorm, 2 x rotary embedding, 2 x SwiGLU"
    assert Fused().price(choice, 0) == Cost()
    assert choose(build()) is None


def test_each_gets_its_own():
    model = fuse(build(), **ALL)
    standing = {
        name: type(vars(module)["forward"]) for name, module in model.named_modules() if "forward" in vars(module)
    }
    assert standing.pop("").__name__ == "HeadLoss"
    assert set(standing.values()) == {FusedNorm, FusedRotary, FusedGatedLayer} and len(standing) == 9


def test_without_a_model_the_plan_says_what_was_asked_for():
    asked = load({"fused": {"head_loss": True, "rotary": True}})
    assert str(Fused().wants(asked, Layout(), (Sketch(()),))) == "head_loss, rotary"


def test_the_compiler_fuses_by_itself():
    model = build()
    compiled = {"compile": {"enabled": True}}
    choice = choose(model, compiled, **ALL)
    assert (choice.norms, choice.attentions, choice.gated) == ((), (), ())
    left = "left to the compiler: fused.rms_norm, fused.rotary, fused.swiglu"
    assert str(choice) == f"the loss of lm_head over chunks of 5 tokens, {left}"
    assert str(choose(model, compiled, swiglu=True)) == "left to the compiler: fused.swiglu"
    alone = Fused().wants(load({"fused": {"head_loss": True, "swiglu": True}} | compiled), Layout(), (Sketch(()),))
    assert str(alone) == "head_loss, left to the compiler: fused.swiglu"


def test_a_model_that_is_compiled_later_keeps_the_head_only(caplog, monkeypatch):
    monkeypatch.setattr(AMBIENT, "warned", set())
    model = fuse(build(), **ALL)
    expected = gradients(model)
    with caplog.at_level("INFO", logger="mizzen"):
        compile_blocks(model, {"backend": "eager"})
    assert "left to the compiler from now on" in caplog.text
    standing = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    assert len(standing) == 1 and not isinstance(standing[0], FusedModule)
    assert_alike(gradients(model), expected)
    torch.compiler.reset()


REFUSED = {
    "a chunk of nothing": (build, {"head_chunk": 5}, {}, "fused.head_chunk is about the chunks of fused.head_loss"),
    "no head": (
        lambda: nn.Linear(2, 2),
        {"head_loss": True},
        {},
        "finds no head: it looks for a model of",
    ),
    "bent logits": (
        lambda: build("Gemma2"),
        {"head_loss": True},
        {},
        r"changes its logits before the loss \(final_logit_softcapping=30.0\)",
    ),
    "scaled logits": (lambda: build("Cohere"), {"head_loss": True}, {}, r"\(logit_scale=0.0625\)"),
    "norms of another kind": (
        lambda: build("Gemma"),
        {"rms_norm": True},
        {},
        "finds no module whose class ends in RMSNorm .*; GemmaRMSNorm computes something else",
    ),
    "no norms": (lambda: nn.LayerNorm(2), {"rms_norm": True}, {}, "finds no module whose class ends in RMSNorm"),
    "another activation": (lambda: build("Gemma"), {"swiglu": True}, {}, "act_fn that is one of SiLU, SiLUActivation"),
    "no rotary": (lambda: nn.Linear(2, 2), {"rotary": True}, {}, "calls the apply_rotary_pos_emb of its file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(name):
    make, keys, sections, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        choose(make(), sections, **keys)


def test_a_model_that_would_be_compiled_as_a_whole_is_refused():
    head = HeadSketch("", "", "Linear", "ForCausalLMLoss")
    config = load({"fused": {"head_loss": True}, "compile": {"enabled": True}})
    with pytest.raises(PlanError, match="all of it would be compiled, head and loss included"):
        Fused().wants(config, Layout(), (replace(Sketch.of(nn.Linear(2, 2)), head=head),))


def test_models_in_stages_and_those_that_are_cut_are_not_refused():
    for layout in (Layout(tp=2), Layout(pp=2)):
        keys = {"swiglu": True, "head_loss": True}
        assert Fused().wants(load({"fused": keys}), layout, (Sketch.of(build()),)) is not None


def test_a_head_that_is_none_of_torchs():
    class Louder(nn.Linear):
        pass

    Louder.__name__ = "Linear"  # as adapters name theirs
    model = build()
    model.lm_head = Louder(32, 61, bias=False)
    with pytest.raises(PlanError, match="the head is a .*Linear, no nn.Linear"):
        fuse(model, head_loss=True)
    model.loss_function = lambda *args, **kwargs: 0
    with pytest.raises(PlanError, match="the model's loss is <lambda>, not ForCausalLMLoss"):
        choose(model, head_loss=True)


@pytest.mark.parametrize("make", ["copied", "pickled"])
def test_copies_stand_on_their_own(make):
    model = fuse(build(), **ALL)
    expected = gradients(model)
    other = copy.deepcopy(model) if make == "copied" else pickle.loads(pickle.dumps(model))
    assert_alike(gradients(other), expected)
    for module in other.modules():
        if isinstance(standing := vars(module).get("forward"), FusedModule):
            assert standing.module is module
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert gradients(other)[0] == expected[0]
    restore(other)
    assert not any(isinstance(vars(module).get("forward"), ReplacedForward) for module in other.modules())
