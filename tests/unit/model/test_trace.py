"""What a run without values sees of a model: where activations and parameters are used, and what happens on the way."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mizzen.model.flow import Use
from mizzen.model.trace import LENGTHS, flow_of


class Pooled(nn.Module):
    """Sums over tokens, between two layers of a width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(37, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, tokens):
        return self.two(self.one(self.table(tokens)).mean(1))


@pytest.mark.parametrize("width", LENGTHS[:3])
def test_a_length_is_never_a_number_of_features(width):
    (two,) = [layer for layer in flow_of(Pooled(width)).layers if layer.path == "two"]
    assert len(two.reads["one"].reduced) == 1
    assert not two.reads["one"].reduced & {width}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(16)), nn.Dropout(0.1)

    def forward(self, hidden):
        return self.drop(hidden * self.scale)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(37, 16), Inner(), nn.Linear(16, 37)

    def forward(self, tokens):
        hidden = self.inner(self.table(tokens))
        return self.head(hidden + hidden.roll(1, 1) * self.inner.scale)


def test_places_where_activations_and_parameters_are_used():
    uses = set(flow_of(Outer()).uses)
    assert {use.used for use in uses if use.parameter == "inner.scale"} == {("", "inner"), ("",)}
    assert {use.used for use in uses if use.parameter == "head.bias"} == {("", "head")}
    assert Use("", ("", "table"), ("", "inner"), frozenset({"inner"})) in uses
    (returned,) = [use for use in uses if use.made == ("", "inner", "inner.drop")]
    assert returned.used == ("",) and returned.passed == {"inner", "inner.drop"}


def test_operations_that_draw_and_in_which_tokens_meet():
    operations = flow_of(Outer()).operations
    drawing = {each.place for each in operations if each.draws}
    assert drawing == {("", "inner", "inner.drop")}
    (meeting,) = [each for each in operations if each.mixes]
    assert (meeting.name, meeting.place, meeting.after) == ("roll", ("",), "table")
    assert meeting.reads == {"table", "inner.scale"}


class Changed(nn.Module):
    """Changes what a module has returned, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(37, 16), Inner(), Inner()

    def forward(self, tokens):
        hidden = self.first(self.table(tokens))
        hidden += 1
        return self.second(hidden)


def test_what_was_changed_in_place_is_no_longer_what_was_returned():
    (given,) = [use for use in flow_of(Changed()).uses if use.used == ("", "second") and not use.parameter]
    assert (given.made, given.passed) == (("",), {"second"})


class Fused(nn.Module):
    """A fused layer and an adapter, of whose sum the runs are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.low, self.high = nn.Linear(16, 32), nn.Linear(16, 2), nn.Linear(2, 32)
        self.down = nn.Linear(16, 16)

    def forward(self, given):
        gate, value = (self.base(given) + self.high(self.low(given)) * 0.5).split(16, -1)
        return self.down(functional.silu(gate) * value)


def test_a_layer_and_its_adapter_have_the_runs_of_their_sum():
    layers = flow_of(Fused()).by_path()
    assert layers["base"].runs == layers["high"].runs == (16, 16)
    assert layers["low"].runs == ()
