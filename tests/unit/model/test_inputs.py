"""Tensors are found and changed wherever they are in a batch; all else is kept."""

from collections import OrderedDict, namedtuple

import torch

from mizzen.model.inputs import change_tensors

Pair = namedtuple("Pair", ["left", "right"])


def test_every_tensor_is_changed_and_the_structure_kept():
    batch = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Pair(torch.ones(3), None), "c": 4}
    changed = change_tensors(batch, lambda tensor: tensor + 1)
    assert changed["a"][0].tolist() == [2.0]
    assert changed["a"][1][0].tolist() == [2.0, 2.0]
    assert changed["a"][1][1] == "text"
    assert isinstance(changed["a"][1], tuple)
    assert isinstance(changed["b"], Pair)
    assert (changed["b"].right, changed["c"]) == (None, 4)
    assert batch["a"][0].tolist() == [1.0]


def test_kinds_of_mappings_stay():
    changed = change_tensors(OrderedDict(x=torch.ones(1)), torch.neg)
    assert isinstance(changed, OrderedDict)
    assert changed["x"].item() == -1


def test_what_is_no_structure_is_returned_itself():
    thing = object()
    assert change_tensors(thing, torch.neg) is thing
    assert change_tensors("text", torch.neg) == "text"
