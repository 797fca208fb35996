"""Whether a module or parameter was exchanged, added or taken away."""

import pytest
import torch
from torch import nn

from mizzen.model.tree import ModelTree


def model():
    made = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    made[1][0].weight = made[0].weight
    return made


CHANGES = {
    "another module": lambda made: made.__setitem__(0, nn.Linear(2, 2)),
    "another below": lambda made: made[1].__setitem__(1, nn.GELU()),
    "one more": lambda made: made.append(nn.ReLU()),
    "one less": lambda made: made.__delitem__(1),
    "one twice": lambda made: made[1].__setitem__(1, made[1][0]),
    "another parameter": lambda made: setattr(made[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a further one": lambda made: made.register_parameter("scale", nn.Parameter(torch.ones(2))),
    "one where none was": lambda made: setattr(made[0], "bias", nn.Parameter(torch.ones(2))),
    "none where one was": lambda made: setattr(made[1][0], "bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_once(name):
    made = model()
    tree = ModelTree(made)
    assert tree.is_unchanged()
    CHANGES[name](made)
    assert not tree.is_unchanged()
    tree.record()
    assert tree.is_unchanged()


def test_values_and_flags_are_no_change():
    made = model()
    tree = ModelTree(made)
    made.double().eval().requires_grad_(False)
    assert tree.is_unchanged()
    assert list(tree.parameters) == ["0.weight", "1.0.weight", "1.0.bias"]
