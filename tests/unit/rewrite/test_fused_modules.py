"""Modules are taken for what they compute, whatever their names say, and other models stay as they are."""

import pytest
import torch
from torch import nn

from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.rewrite.fused_modules import (
    FusedGatedLayer,
    FusedNorm,
    FusedRotary,
    check,
    replace,
    trouble_of_gated,
    trouble_of_norm,
    trouble_of_rotary,
)
from unit.rewrite.llamas import batch, build, choose, fuse, transformers


class ShiftedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RightRMSNorm(ShiftedRMSNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class NamelessRMSNorm(RightRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.tiny = vars(self).pop("eps")


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1.0) * self.up_proj(x))


def attention(function):
    names = {"apply_rotary_pos_emb": function, "nn": nn}
    exec(  # a file of its own: the function is found among its globals
        "class Attention(nn.Module):\n    def forward(self, q):\n        return apply_rotary_pos_emb(q, q, q, q)\n",
        names,
    )
    return names["Attention"]()


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    return q * cos.unsqueeze(1) + q.flip(-1) * sin.unsqueeze(1), k


CHECKS = {
    "right": (RightRMSNorm, FusedNorm, trouble_of_norm, None),
    "shifted": (ShiftedRMSNorm, FusedNorm, trouble_of_norm, "ShiftedRMSNorm computes something else than weight"),
    "nameless": (NamelessRMSNorm, FusedNorm, trouble_of_norm, "epsilon under none of variance_epsilon, eps"),
    "torch": (lambda: nn.RMSNorm(8), FusedNorm, trouble_of_norm, "RMSNorm computes something else"),
    "clipped": (Clipped, FusedGatedLayer, trouble_of_gated, "Clipped computes something else than down_proj"),
    "positions": (
        lambda: attention(lambda q, k, cos, sin, position_ids=None, unsqueeze_dim=1: (q, k)),
        *(FusedRotary, trouble_of_rotary, "other arguments than Llama's"),
    ),
    "nothing": (lambda: attention(None), FusedRotary, trouble_of_rotary, "other arguments than Llama's"),
    "another turn": (lambda: attention(interleaved), FusedRotary, trouble_of_rotary, "in another way than Llama"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_a_module_computes_decides(name):
    make, kind, trouble_of, message = CHECKS[name]
    module = make()
    sketch = Sketch.of(module).modules[0]
    if message is None:
        check([sketch], trouble_of)
        replace([module], kind)
        assert isinstance(vars(module)["forward"], kind)
        return
    with pytest.raises(PlanError, match=f"fused: .*{message}"):
        check([sketch], trouble_of)
    assert "forward" not in vars(module)


def test_a_forward_of_somebody_elses_is_not_thrown_away():
    model = build()
    vars(model.model.norm)["forward"] = lambda hidden: hidden
    with pytest.raises(PlanError, match="LlamaRMSNorm of this model has been given another forward"):
        fuse(model, rms_norm=True)


@pytest.mark.parametrize("family", ["Glm", "Qwen3Next", "Olmo2"])
def test_relatives_that_differ(family):
    """Some round in another place, which fits; what computes something else is refused, never changed."""
    sizes = {"pad_token_id": 0} if family == "Glm" else {}
    if family == "Qwen3Next":
        sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
        sizes |= {"shared_expert_intermediate_size": 8, "layer_types": ["full_attention"] * 2}
    model = build(family, **sizes)
    with torch.no_grad():
        expected = model(**batch()).loss
    if family == "Olmo2":
        fuse(model, rms_norm=True, swiglu=True, rotary=True)
    else:
        for key in {"Glm": ("rotary",), "Qwen3Next": ("rms_norm", "rotary")}[family]:
            with pytest.raises(PlanError, match="computes something else|another way"):
                fuse(model, **{key: True})
    with torch.no_grad():
        assert torch.allclose(model(**batch()).loss, expected, rtol=1e-5)


def test_other_models_of_the_class_are_left_alone(monkeypatch):
    file = transformers.models.llama.modeling_llama
    model, other = build(), build()
    before = file.apply_rotary_pos_emb
    fuse(model, rotary=True)
    assert file.apply_rotary_pos_emb is before
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return before(*args, **kwargs)

    monkeypatch.setattr(file, "apply_rotary_pos_emb", spy)
    with torch.no_grad():
        expected = other(**batch()).loss
        assert len(calls) == 2
        assert model(**batch()).loss == expected
        assert len(calls) == 2, "the fused model asked the function of the file"


def test_the_random_stream_is_not_touched():
    torch.manual_seed(5)
    expected = torch.rand(1)
    model = build()
    torch.manual_seed(5)
    choose(model, rms_norm=True, rotary=True, swiglu=True)
    fuse(model, rms_norm=True, rotary=True, swiglu=True)
    assert torch.rand(1) == expected


def test_keywords():
    model = fuse(build(), rms_norm=True, swiglu=True)
    hidden, layer = torch.randn(2, 3, 32), model.model.layers[0]
    assert torch.equal(layer.mlp(x=hidden), layer.mlp(hidden))
    assert torch.equal(model.model.norm(hidden_states=hidden), model.model.norm(hidden))
