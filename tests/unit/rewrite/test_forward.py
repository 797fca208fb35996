"""What stands in the place of a module's forward is taken away again, one kind or all, however deep."""

import torch
from torch import nn

from mizzen.rewrite.forward import ReplacedForward, restore
from mizzen.rewrite.fused_modules import FusedGatedLayer
from mizzen.rewrite.recompute import Keeping, Recomputed


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def stacked() -> Mlp:
    """A fused layer that is also computed again, as a choice of small blocks makes it."""
    module = Mlp()
    vars(module)["forward"] = FusedGatedLayer(module)
    vars(module)["forward"] = Recomputed(module.forward, Keeping())
    return module


def test_both_work_together():
    module, plain, inputs = stacked(), Mlp(), torch.randn(3, 4)
    for each in (module, plain):
        each(inputs).sum().backward()
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad)


def test_all_kinds_go():
    module = stacked()
    restore(module)
    assert "forward" not in vars(module)


def test_one_kind_goes():
    module = stacked()
    restore(module, Recomputed)
    assert isinstance(vars(module)["forward"], FusedGatedLayer)
    restore(module, Recomputed)
    assert isinstance(vars(module)["forward"], FusedGatedLayer)
    restore(module, FusedGatedLayer)
    assert "forward" not in vars(module)


def test_somebody_elses_stays():
    module = Mlp()
    vars(module)["forward"] = mine = lambda x: x
    vars(module)["forward"] = ReplacedForward(mine)
    restore(nn.ModuleList([module]))
    assert vars(module)["forward"] is mine
