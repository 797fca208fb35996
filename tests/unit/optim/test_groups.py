"""Parameter groups from everything that users give as `model_parameters`."""

import pytest
import torch
from torch import nn

from mizzen.ambient import AMBIENT
from mizzen.errors import UsageError
from mizzen.optim.build import build_optimizer, param_groups, tell_slips


class Tied(nn.Module):
    """A head that shares its weight with an embedding, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


NAMES = ["embed.weight", "body.weight", "body.bias"]


@pytest.fixture
def model():
    return Tied()


def names_in(model, groups):
    """The names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


@pytest.mark.parametrize(
    "give",
    [
        lambda model: None,
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: filter(lambda parameter: parameter.requires_grad, model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.parameters()}],
        lambda model: [{"params": list(model.named_parameters())}],
        lambda model: [*model.parameters(), model.head.weight],
    ],
)
def test_all_trained_parameters_once(model, give):
    groups, placed = param_groups(model, give(model))
    assert names_in(model, groups) == [NAMES]
    assert placed == dict.fromkeys(NAMES, 0)


def test_groups_keep_their_keys_and_places(model):
    given = [
        {"params": [model.body.bias], "weight_decay": 0.0, "name": "no decay"},
        {"params": list(model.frozen.parameters()), "lr": 0.5},
        {"params": model.body.weight, "lr": 0.25},
    ]
    groups, placed = param_groups(model, iter(given))
    assert names_in(model, groups) == [["body.bias"], [], ["body.weight"]]
    assert placed == {"body.bias": 0, "body.weight": 2}
    assert [{key: value for key, value in group.items() if key != "params"} for group in groups] == [
        {"weight_decay": 0.0, "name": "no decay"},
        {"lr": 0.5},
        {"lr": 0.25},
    ]
    optimizer = build_optimizer("AdamW", {"lr": 0.1}, groups, device_type="cpu")
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.25]


@pytest.mark.parametrize("give", [lambda model: [], lambda model: model.frozen.parameters()])
def test_nothing_to_train_is_one_empty_group(model, give):
    groups, placed = param_groups(model, give(model))
    assert groups == [{"params": []}] and placed == {}
    build_optimizer("AdamW", {}, groups, device_type="cpu").step()


def test_the_groups_of_an_optimizer_are_groups(model):
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    groups, placed = param_groups(model, optimizer.param_groups)
    assert placed == dict.fromkeys(NAMES, 0)
    assert groups[0]["lr"] == 0.5 and "param_names" not in groups[0]
    assert len(optimizer.param_groups[0]["params"]) == 5


def test_a_tied_parameter_is_in_the_group_that_has_it(model):
    groups, placed = param_groups(model, [{"params": model.head.weight}, {"params": model.body.parameters()}])
    assert placed == {"embed.weight": 0, "body.weight": 1, "body.bias": 1}


def test_one_in_two_groups_is_refused(model):
    with pytest.raises(UsageError, match="embed.weight is in group 0 and in group 1: keep one"):
        param_groups(model, [{"params": [model.embed.weight]}, {"params": [model.head.weight]}])


def test_one_of_another_model_is_refused(model):
    stranger = nn.Linear(3, 3)
    with pytest.raises(
        UsageError,
        match=r"entry 1 of group 0, of shape \[3, 3\], is no parameter of the model; of that shape the model has "
        r"frozen.weight, body.weight",
    ):
        param_groups(model, [model.body.bias, stranger.weight])
    with pytest.raises(UsageError, match=r"entry 0 of group 1, of shape \[7\], is no parameter of the model\. Take"):
        param_groups(model, [{"params": []}, {"params": [nn.Parameter(torch.zeros(7))]}])


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda model: model.body.weight, "model_parameters is one Parameter; give an iterable"),
        (lambda model: {"params": []}, "model_parameters is one dict; give an iterable"),
        (lambda model: [{"params": []}, model.body.weight], "mixes 1 groups with 1 single parameters"),
        (lambda model: [{"param": []}], "group 0 has no 'params', only param"),
        (lambda model: [{"params": ["body"]}], "entry 0 of group 0 is a str, no parameter"),
        (lambda model: model.modules(), "entry 0 of group 0 is a Tied, no parameter"),
    ],
)
def test_what_is_no_parameters(model, give, message):
    with pytest.raises(UsageError, match=message):
        param_groups(model, give(model))


def test_a_slip_in_a_key_of_a_group_is_told_and_a_key_of_the_user_s_is_not(model, caplog):
    AMBIENT.warned.clear()
    slip = {"params": [model.body.weight], "weight_decy": 0.1, "name": "body", "max_momentum": 1}
    optimizer = torch.optim.SGD([slip, {"params": [model.body.bias], "momentum": 0.5}], lr=0.1)
    tell_slips(optimizer)
    tell_slips(optimizer)
    said = "parameter group 0 has a key 'weight_decy', which SGD does not read: did you mean 'weight_decay'?"
    assert caplog.messages == [said]
