"""Parameters that code names although another module holds them: found by reading, not by running."""

import torch
from torch import nn
from torch.nn import functional

from mizzen.model.sketch import Sketch


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, rows):
        return self.up(rows) * self.scale


class Model(nn.Module):
    """Names parameters in every way that can be read, and some that cannot."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.named = nn.ModuleDict({"one": Inner()})
        self.other = nn.Linear(4, 4)
        self.asked = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.aliased = nn.Linear(4, 4)
        self.beside = [nn.Linear(4, 4)]

    def forward(self, rows):
        rows = self.helper(rows.to(self.asked.weight.dtype)).view(self.asked.weight.shape[0], -1)
        alias = self.aliased
        self.other.bias = None
        return rows @ alias.weight + self.blocks[1].up.bias.sum()

    def helper(self, rows):
        weight = self.named["one"].up.weight
        return functional.linear(functional.linear(rows, self.embed.weight), weight.t()) + self.blocks[0](rows)

    def unused(self):
        return self.never.weight


class Indexed(Model):
    def forward(self, rows):
        for place in range(3):
            rows = rows @ self.blocks[place].up.weight
        return super().forward(rows)


def users(model):
    return {each.name: each.users for each in Sketch.of(model).parameters if each.users}


def test_what_is_spelled_out_is_found():
    assert users(Model()) == {"embed.weight": ("",), "named.one.up.weight": ("",), "blocks.1.up.bias": ("",)}


def test_an_unknown_place_is_any_place_and_inherited_code_is_read():
    found = users(Indexed())
    assert {f"blocks.{number}.up.weight" for number in range(3)} <= set(found)
    assert "embed.weight" in found


class Neighbour(nn.Module):
    """Uses a module that it does not hold."""

    def __init__(self, other):
        super().__init__()
        self.own = nn.Linear(4, 4)
        object.__setattr__(self, "friend", other)

    def forward(self, rows):
        return self.own(rows) @ self.friend.weight


def test_modules_that_are_not_registered():
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, Neighbour(first), Neighbour(nn.Linear(4, 4)))
    assert users(model) == {"0.weight": ("1",)}


def test_code_that_cannot_be_read_is_left_alone():
    space = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x @ self.inner.weight", space)  # noqa: S102
    model = space["Typed"]()
    model.inner = nn.Linear(4, 4)
    assert users(model) == {}


def test_code_whose_file_is_no_python(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("'''a page\n" * 7)
    found = {"nn": nn}
    code = "class Written(nn.Linear):\n    def forward(self, rows):\n        return rows + self.weight\n"
    exec(compile(code, str(page), "exec"), found)  # noqa: S102  as a notebook or a test of a page does
    assert [each.name for each in Sketch.of(found["Written"](2, 2)).parameters] == ["weight", "bias"]
