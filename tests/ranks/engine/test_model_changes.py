"""A model that is changed after `initialize` trains as in a plain loop that does the same, or is refused by name."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import mizzen
from breadth import choice, chosen
from mizzen.errors import MizzenError, UsageError

STEPS, WHEN, RANKS = 3, 1, 2
MOMENTS = ("before forward", "before step")
INSIDE = "before forward of the module itself"


class Net(nn.Module):
    """A convolution, a tied matrix, and a frozen scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, images):
        hidden = functional.relu(self.conv(images)).flatten(1)
        return self.head(functional.relu(self.second(self.first(hidden)))) * self.scale


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(RANKS * 2, 2, 4, 4, generator=generator), torch.randn(RANKS * 2, 3, generator=generator)


def loss_of(output, targets):
    return functional.mse_loss(output.float(), targets)


# Each changes a model in training. `copy` does the same to a plain one, whose optimizer knows its parameters.


def to_double_and_back(model, copy):
    model.double().float()


def to_channels_last(model, copy):
    model.to(memory_format=torch.channels_last)


def into_shared_memory(model, copy):
    model.share_memory()


def from_a_vector(model, copy):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9 + 0.01, model.parameters())


def by_data(model, copy):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def transposed(model, copy):
    model.first.weight.data = model.first.weight.data.t()


def by_state_dict(model, copy):
    state = {name: value * 0.9 for name, value in model.state_dict().items()}
    state["second.weight"] = state["first.weight"]
    model.load_state_dict(state, assign=not copy)


def by_a_parameter(model, copy):
    value = model.head.weight.detach() * 0.5
    if copy:
        model.head.weight.data.copy_(value)
    else:
        model.head.weight = nn.Parameter(value)


def by_a_module(model, copy):
    torch.manual_seed(1)
    head = nn.Linear(16, 3)
    if copy:
        model.head.load_state_dict(head.state_dict())
    else:
        model.head = head


def by_a_wrapper(model, copy):
    if not copy:
        model.head = nn.Sequential(model.head, nn.Dropout(0.0))


def clamped(model, copy):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamped_by_data(model, copy):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


TAKEN_OVER = (
    to_double_and_back,
    to_channels_last,
    into_shared_memory,
    from_a_vector,
    by_data,
    transposed,
    by_state_dict,
    by_a_parameter,
    by_a_module,
    by_a_wrapper,
    clamped,
    clamped_by_data,
)


REPLACED = (by_state_dict, by_a_parameter, by_a_module)


def values_of(model):
    """Values by name, without the name that `by_a_wrapper` puts in."""
    return {name.replace(".0.", "."): each.detach().float().clone() for name, each in model.named_parameters()}


def config_of(stage, **sections):
    return {
        "train_batch_size": RANKS * 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "progress": {"enabled": False},
        **sections,
    }


def train(stage, change, moment, **sections):
    """Train, with a change in the middle."""
    engine, *_ = mizzen.initialize(model=Net(), config=config_of(stage, **sections))
    dtype = engine.module.conv.weight.dtype
    for step in range(STEPS):
        images, targets = (each[engine.global_rank * 2 :][:2] for each in batch(step))
        if step == WHEN and moment != "before step":
            change(engine.module, False)
        model = engine.module if step == WHEN and moment == INSIDE else engine
        engine.backward(loss_of(model(images.to(dtype)), targets))
        if step == WHEN and moment == "before step":
            change(engine.module, False)
        assert engine.step().applied
    values = values_of(engine.module)
    engine.destroy()
    return values


def trained(stage, changes, **sections):
    return {
        (change.__name__, moment): train(stage, change, moment, **sections)
        for change in changes
        for moment in (*MOMENTS, *([INSIDE] if change in REPLACED else []))
        if not (change is transposed and moment == "before step")  # what is transposed has another gradient
    }


def plain(change, moment, low=None):
    """One process; with a lower dtype, fp32 masters beside the parameters, which take over what is written to these."""
    model = Net().to(low or torch.float32)
    parameters = [each for each in model.parameters() if each.requires_grad]
    masters = [each.detach().float().clone() if low else each for each in parameters]
    for master, each in zip(masters, (each for each in Net().parameters() if each.requires_grad), strict=True):
        master.data.copy_(each)
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)

    def changed():
        change(model, True)
        for master, each in zip(masters, parameters, strict=True) if low else ():
            master.copy_(torch.where(each != master.to(low), each.detach().float(), master))

    for step in range(STEPS):
        images, targets = batch(step)
        if step == WHEN and moment != "before step":
            changed()
        shares = []
        for rank in range(RANKS):
            output = model(images[rank * 2 :][:2].to(low or torch.float32))
            shares.append(torch.autograd.grad(loss_of(output, targets[rank * 2 :][:2]), parameters))
        for master, gradients in zip(masters, zip(*shares, strict=True), strict=True):
            master.grad = torch.stack([gradient.float() for gradient in gradients]).mean(0)
        if step == WHEN and moment == "before step":
            changed()
        optimizer.step()
        for master, each in zip(masters, parameters, strict=True) if low else ():
            each.data.copy_(master)
    return values_of(model)


def compare(ranks, low=None):
    first, second = ranks
    for (name, moment), values in first.items():
        for parameter, value in plain(globals()[name], moment, low).items():
            assert torch.allclose(values[parameter], value, rtol=1e-4, atol=1e-6), (name, moment, parameter)
            assert torch.equal(second[name, moment][parameter], values[parameter]), (name, moment, parameter)


def at(stage, changes):
    """Of changes those that this run makes at a stage: `make test` makes each at one of them."""
    return chosen(changes, list(changes)[stage::3])


@pytest.mark.in_parts
@pytest.mark.parametrize("stage", choice([0, 1, 2], [0, 2]))
def test_a_model_that_was_changed_trains_as_in_a_plain_loop(world, stage):
    compare(world(RANKS).run(trained, stage, at(stage, TAKEN_OVER)))


@pytest.mark.in_parts
@pytest.mark.parametrize("stage", choice([0, 1, 2], [0, 2]))
def test_what_is_written_to_weights_that_have_masters_holds(world, stage):
    changes = at(stage, (clamped, clamped_by_data, from_a_vector, by_data, by_state_dict, by_a_parameter))
    compare(world(RANKS).run(trained, stage, changes, bf16={"enabled": True}), torch.bfloat16)


def moved_before_a_checkpoint(stage, folder):
    """Parameters that were moved, and then loaded or saved."""
    engine, *_ = mizzen.initialize(model=Net(), config=config_of(stage, bf16={"enabled": True}))
    engine.save_checkpoint(folder, "first")
    before = values_of(engine.module)
    by_data(engine.module, False)
    by_a_parameter(engine.module, False)
    engine.load_checkpoint(folder, "first")
    loaded = values_of(engine.module)
    by_data(engine.module, False)
    clamped_by_data(engine.module, False)
    by_a_parameter(engine.module, False)
    written = values_of(engine.module)
    engine.save_checkpoint(folder, "second")
    engine.load_checkpoint(folder, "first")
    engine.load_checkpoint(folder, "second")
    weight = engine.module.head.weight
    assert torch.equal(mizzen.zero.safe_get_full_fp32_param(weight), weight.float())
    return before, loaded, written, values_of(engine.module)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_has_what_the_model_has(world, stage, tmp_path):
    for before, loaded, written, again in world(RANKS).run(moved_before_a_checkpoint, stage, str(tmp_path)):
        for name, value in before.items():
            assert torch.equal(loaded[name], value), name
            assert torch.equal(again[name], written[name]), name


def back_and_forth(stage, *, moves):
    """Train, and evaluate in another dtype in between."""
    engine, *_ = mizzen.initialize(model=Net(), config=config_of(stage))
    one_step(engine)
    if moves:
        engine.module.double()
        with torch.no_grad():
            assert engine(batch(0)[0].double()).dtype == torch.float64
        engine.module.float()
    one_step(engine)
    return values_of(engine.module)


def with_and_without(stage):
    return back_and_forth(stage, moves=True), back_and_forth(stage, moves=False)


def test_a_model_may_be_evaluated_in_another_dtype(world):
    for moved, stayed in world(RANKS).run(with_and_without, 2):
        assert all(torch.equal(moved[name], stayed[name]) for name in stayed)


# What cannot be trained is refused, by its name and on every rank.


def to_half(model, optimizer):
    model.half()


def another_shape(model, optimizer):
    model.conv.bias.data = model.conv.bias.data[:2]


def larger_head(model, optimizer):
    model.head = nn.Linear(16, 5)


def frozen_head(model, optimizer):
    model.head = nn.Linear(16, 3).requires_grad_(False)


def added_module(model, optimizer):
    model.further = nn.Linear(2, 2)


def added_parameter(model, optimizer):
    model.register_parameter("shift", nn.Parameter(torch.zeros(3)))


def bias_where_none_was(model, optimizer):
    model.second.bias = nn.Parameter(torch.zeros(16))


def removed_module(model, optimizer):
    model.head = nn.Identity()


def untied(model, optimizer):
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())


def two_of_one(model, optimizer):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def tied_to_another(model, optimizer):
    model.head.bias = model.conv.bias


def joined(model, optimizer):
    optimizer.add_param_group({"params": [model.scale], "lr": 0.1})


def joined_below(model, optimizer):
    optimizer.optimizer.add_param_group({"params": [model.scale.requires_grad_()]})


def joined_a_group(model, optimizer):
    optimizer.param_groups[0]["params"].append(model.scale)


REFUSED = {
    to_half: "'.*' has become a float16 tensor of shape .*; its engine trains a float32 tensor of shape",
    another_shape: r"'conv.bias' has become a float32 tensor of shape \[2\] on cpu; its engine trains .* \[4\]",
    larger_head: r"'head.weight' has become a float32 tensor of shape \[5, 16\]",
    frozen_head: "'head.weight' was replaced by one that needs no gradient",
    added_module: "'further.weight' and 1 more came to the model after initialize",
    added_parameter: "'shift' came to the model after initialize",
    bias_where_none_was: "'second.bias' came to the model",
    removed_module: "'head.weight' is no longer in the model",
    untied: "'second.weight' came to the model",
    two_of_one: "'first.weight', 'second.weight' were one parameter",
    tied_to_another: "'head.bias' is no longer in the model",
    joined: "'scale' cannot join the optimizer after initialize.*lr 0 until then; or make a new engine",
    joined_below: "'scale' cannot join the optimizer after initialize",
    joined_a_group: "'scale' cannot join the optimizer after initialize",
}


def one_step(engine, step=0):
    images, targets = (each[engine.global_rank * 2 :][:2] for each in batch(step))
    engine.backward(loss_of(engine(images), targets))
    return engine.step()


def refusals(stage, changes):
    """What each change raises, in the forward after it and in the step."""
    found = {}
    for change in changes:
        for moment in MOMENTS:
            engine, optimizer, *_ = mizzen.initialize(model=Net(), config=config_of(stage))
            one_step(engine)
            try:
                if moment == "before forward":
                    change(engine.module, optimizer)
                    one_step(engine)
                else:
                    images, targets = (each[:2] for each in batch(1))
                    engine.backward(loss_of(engine(images), targets))
                    change(engine.module, optimizer)
                    engine.step()
                found[change, moment] = "nothing"
            except UsageError as error:
                found[change, moment] = str(error)
    return {(change.__name__, moment): words for (change, moment), words in found.items()}


@pytest.mark.in_parts
@pytest.mark.parametrize("stage", choice([0, 1, 2], [0, 2]))
def test_a_change_that_cannot_be_trained_is_refused_on_every_rank(world, stage):
    changes = at(stage, REFUSED)
    first, second = world(RANKS).run(refusals, stage, changes)
    assert first == second
    for change in changes:
        words = REFUSED[change]
        for moment in MOMENTS:
            assert re.match(words, first[change.__name__, moment]), (change, moment, first[change.__name__, moment])


def own_head(model, rank):
    torch.manual_seed(rank)
    model.head = nn.Linear(16, 3)


def on_one_rank(model, rank):
    if rank == 0:
        by_data(model, False)


def moved_on_one_rank(model, rank):
    if rank == 0:
        to_double_and_back(model, False)


def parted(stage, change):
    engine, *_ = mizzen.initialize(model=Net(), config=config_of(stage))
    one_step(engine)
    change(engine.module, engine.global_rank)
    for moment in range(2):
        try:
            one_step(engine, 1 + moment)
        except MizzenError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (own_head, "on some ranks than on others: the ranks are not about to do the same: the values of 'head.bias'"),
        (on_one_rank, "parameters were moved or replaced, and have other values on some ranks than on others"),
        (moved_on_one_rank, "nothing"),
    ],
)
def test_ranks_that_change_a_model_in_different_ways_are_told(world, stage, change, words):
    for found in world(RANKS).run(parted, stage, change):
        assert words in found, found


def replace_at_stage_3():
    """What another module, or one more, raises where parameters are sharded."""
    found = []
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    for change in (larger_head, removed_module, added_module, by_a_module):
        engine, optimizer, *_ = mizzen.initialize(model=Net(), config=config_of(3, zero_optimization=zero))
        one_step(engine)
        change(engine.module, None)
        for act in (one_step, lambda engine: engine.step()):
            try:
                act(engine)
                found.append("nothing")
            except UsageError as error:
                found.append(str(error))
    return found


def test_a_module_that_replaces_a_sharded_one_is_refused(world):
    words = ["'head.weight' was replaced in the model, with its module"] * 2
    words += ["'head.weight' is no longer in the model"] * 2 + ["'further.weight' and 1 more came to the model"] * 2
    words += ["'head.weight' was replaced in the model, with its module"] * 2
    for found in world(RANKS).run(replace_at_stage_3):
        for start, error in zip(words, found, strict=True):
            assert error.startswith(start), error
