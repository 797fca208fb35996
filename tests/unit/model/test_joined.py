"""Parts of a model as one module: names and values are those of the whole."""

import torch
from torch import nn

from mizzen.model.tree import joined_module


def parts():
    """A tree cut in two: blocks, a buffer that is not saved, a module under two names, one that is not there."""
    whole = nn.Module()
    whole.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    whole.head = whole.tied = nn.Linear(2, 3)
    whole.scale = nn.Parameter(torch.ones(1))
    whole.head.register_buffer("cache", torch.zeros(1), persistent=False)
    first, second = nn.Module(), nn.Module()
    first.blocks, second.blocks = nn.Module(), nn.Module()
    first.blocks.add_module("0", whole.blocks[0])
    second.blocks.add_module("1", whole.blocks[1])
    second.head = second.tied = whole.head
    second.nothing = None
    second.scale = whole.scale
    return whole, first, second


def test_one_part_is_itself():
    module = nn.Linear(1, 1)
    assert joined_module([module]) is module


def test_names_and_objects_are_those_of_the_whole():
    whole, first, second = parts()
    together = joined_module([first, second])
    for look in ("named_parameters", "named_buffers"):
        expected = dict(getattr(whole, look)(remove_duplicate=False))
        found = dict(getattr(together, look)(remove_duplicate=False))
        assert expected.keys() == found.keys() and all(found[name] is expected[name] for name in found)
    assert together.state_dict().keys() == whole.state_dict().keys()
    together.load_state_dict({name: torch.full_like(value, 7) for name, value in whole.state_dict().items()})
    assert first.get_submodule("blocks.0").weight[0, 0] == whole.scale == 7
    together.eval()
    assert not whole.head.training
