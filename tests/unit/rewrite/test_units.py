"""Which modules are taken one by one: those that repeat and are called, or those the user names."""

import pytest
from torch import nn

from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch
from mizzen.rewrite.forward import called_blocks, in_words


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, *items: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(items)
        self.head = nn.Linear(2, 2)


def paths(model, *choice):
    return [unit.path for unit in called_blocks(Sketch.of(model), choice, key="compile.blocks")]


def test_repeated_modules_or_those_that_are_named():
    model = Model(Layer(), Layer())
    assert paths(model) == ["layers.0", "layers.1"]
    assert paths(model, "head", "layers.1") == ["layers.1", "head"]
    assert paths(Model(Layer())) == []


def test_a_name_that_fits_nothing_is_refused_under_its_key():
    with pytest.raises(PlanError, match=r"^compile.blocks: 'Leyer' is neither a class nor .* did you mean 'Layer'"):
        paths(Model(Layer()), "Leyer")


@pytest.mark.parametrize("container", [nn.ModuleList, lambda items: nn.ModuleDict(zip("ab", items, strict=True))])
def test_a_list_is_never_called_and_so_refused(container):
    model = Model(*(container([Layer(), nn.Linear(2, 2)]) for _ in range(2)))
    with pytest.raises(PlanError, match=r"'layers.0' is a Module(List|Dict), .* name the modules to take in compile.b"):
        paths(model)


def test_a_sequence_is_called():
    assert paths(Model(nn.Sequential(Layer()), nn.Sequential(Layer()))) == ["layers.0", "layers.1"]


def test_words():
    units = called_blocks(Sketch.of(Model(Layer(), Layer(), Layer())), (), key="")
    assert in_words(units, among=3) == "3 blocks (Layer)"
    assert in_words(units[:1], among=3) == "1 of 3 blocks (Layer)"
    assert in_words(units[:1], among=1) == "1 block (Layer)"
