"""Backwards of other kinds at stage 3: of inputs alone, through a gradient, past what torch sees. And other habits."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import prune

from breadth import chosen
from mizzen import zero
from ranks.parallel.zero.full.models import WIDTH, Base, Block, Flat, rows, start, values_of
from ranks.parallel.zero.full.test_access import touched


def attacked(stage: int, kind: str) -> list:
    """Gradients of inputs, before a step, between two backwards, and of a graph that a step follows."""
    engine = start(kind, stage, gradient_accumulation_steps=2)
    found = []
    for step in range(2):
        inputs = rows(step, engine.global_rank, 2).requires_grad_()
        found += torch.autograd.grad(engine(inputs), inputs)
        for micro in range(2):
            loss = engine(inputs + micro)
            found += torch.autograd.grad(loss, inputs, retain_graph=True)
            engine.backward(loss)
            engine(inputs).backward(inputs=[inputs])
            engine.step()
        found.append(torch.tensor([engine.last_step.loss, engine.last_step.grad_norm]))
    return [*found, *values_of(engine).values()]


def assert_as_at_stage_2(world, function, kinds):
    """What a function gives for each kind of model at stage 3 is what it gives at stage 2."""
    results = world(2).each(function, [(stage, kind) for kind in kinds for stage in (3, 2)])
    for kind, found, expected in zip(kinds, results[::2], results[1::2], strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda said, kind=kind: f"{kind}: {said}")


@pytest.mark.in_parts
def test_gradients_of_inputs_leave_no_trace(world):
    kinds = chosen(["Base", "Twice", "Outside", "Lora", "Checkpointed"], ["Twice", "Outside", "Checkpointed"])
    assert_as_at_stage_2(world, attacked, kinds)


class Critic(Base):
    def forward(self, data):
        return self.last(self.hidden(data))


class Plain(nn.Module):
    """A penalty alone does not come through its output."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, data):
        return self.last(torch.tanh(self.first(data)))


def penalized(stage: int, kind: type, has_loss: bool, is_held: bool = False) -> list:
    torch.manual_seed(3)
    engine = start(kind(), stage)
    found = []
    for step in range(2):
        data = rows(step, engine.global_rank).requires_grad_()
        with zero.GatheredParameters(engine.module.parameters()) if is_held else nullcontext():
            score = engine(data).sum()
            (gradient,) = torch.autograd.grad(score, data, create_graph=True)
            engine(rows(step + 5, engine.global_rank))
            with torch.no_grad():
                engine(rows(step + 6, engine.global_rank))
            engine.backward(gradient.pow(2).sum() + (score if has_loss else 0))
        report = engine.step()
        found.append(torch.tensor([report.loss, report.grad_norm]))
    return [*found, *values_of(engine).values()]


@pytest.mark.parametrize("has_loss", [True, False])
@pytest.mark.parametrize("kind", [Critic, Plain])
def test_a_penalty_on_a_gradient_is_right(world, kind, has_loss):
    cases = [(2, kind, has_loss), (3, kind, has_loss, False), (3, kind, has_loss, True)]
    wanted, *others = world(2).each(penalized, cases)
    for found in others:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def freed(kind: str) -> list[int]:
    """Bytes of whole parameters after a penalty's first backward, after the one that steps, and after the step."""
    engine = start(kind, 3)
    data = rows(0, engine.global_rank).requires_grad_()
    found = []

    def note():
        units = engine.stores[0].units
        found.append(sum(each.memory.untyped_storage().nbytes() for unit in units for each in unit.parameters.values()))

    score = engine(data).sum()
    (gradient,) = torch.autograd.grad(score, data, create_graph=True)
    note()
    engine.backward(gradient.pow(2).sum() + score)
    note()
    engine.step()
    note()
    return found


def test_whole_parameters_are_there_until_the_second_backward_and_not_after_it(world):
    for first, second, third in world(2).run(freed, "Base"):
        assert first > second == third == 0


class Adding(Block):
    def forward(self, hidden):
        hidden += 1
        return super().forward(hidden)


class Rectifying(Block):
    def forward(self, hidden):
        return super().forward(functional.relu(hidden, inplace=True))


def refusals() -> dict[str, bool]:
    """What units cannot do yet is refused, and training goes on."""
    engine = start("Base", 3)
    model, data = engine.module, rows(0, engine.global_rank).requires_grad_()
    weights = {name: torch.zeros(each.shape) for name, each in model.blocks[0].named_parameters()}
    found = {
        "torch.func of parameters": "torch.func with respect to parameters, by functional_call with another"
        in touched(lambda: torch.func.grad(_with_weights, 1)(model, dict(model.named_parameters()), data)),
        "of parameters": "grad() for 'blocks.0.up.weight'"
        in touched(lambda: torch.autograd.grad(engine(data), [model.blocks[0].up.weight])),
        "into parameters": "backward() for 'blocks.0.up.weight'"
        in touched(lambda: engine(data).backward(inputs=[model.blocks[0].up.weight])),
        "other weights of a unit": "'blocks.0.up.weight' was replaced"
        in touched(lambda: functional_call(model.blocks[0], weights, (torch.ones(2, WIDTH),))),
        "its own weights": torch.equal(functional_call(model, dict(model.named_parameters()), (data,)), engine(data)),
    }
    engine.backward(engine(data))
    found["goes on"] = engine.step().applied
    return found


def _with_weights(model, weights, data):
    return functional_call(model, weights, (data,))


def test_what_units_cannot_do_is_refused_by_name(world):
    for found in world(2).run(refusals):
        assert [what for what, holds in found.items() if not holds] == []


class ChangesInputs(Base):
    """Blocks that change their input in place, by addition."""

    def __init__(self):
        super().__init__(block=Adding)


class Rectifies(Base):
    """Blocks that change their input in place, by a function that saves its output."""

    def __init__(self):
        super().__init__(block=Rectifying)


def curved(stage: int) -> list:
    """What torch.autograd.functional gives for inputs, between two steps."""
    torch.manual_seed(3)
    engine = start(Base(), stage)
    data = rows(0, engine.global_rank)
    found = [
        torch.autograd.functional.hessian(engine, data),
        torch.autograd.functional.jacobian(engine, data),
    ]
    engine.backward(engine(data))
    report = engine.step()
    return [*found, torch.tensor([report.loss, report.grad_norm]), *values_of(engine).values()]


def test_functions_of_inputs_can_be_differentiated_twice(world):
    for one, other in zip(*world(2).each(curved, [(3,), (2,)]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def transforms(engine, data) -> list:
    """What each transform of torch.func gives for a loss as a function of its inputs."""
    single = data[:, None]
    loss, pull = torch.func.vjp(engine, data)
    plain = engine(data)
    found = [
        torch.func.grad(engine)(data),
        torch.func.vmap(engine)(single),
        *torch.func.jvp(engine, (data,), (torch.ones_like(data),)),
        torch.func.jacrev(torch.func.vmap(engine))(single),
        torch.func.jacfwd(engine)(data),
        torch.func.hessian(engine)(data[:1]),
        torch.func.vmap(torch.func.grad(engine))(single),
        *pull(torch.ones_like(loss)),
        plain,
    ]
    with torch.no_grad():
        found += [torch.func.vmap(engine)(single), torch.func.grad(engine)(data)]
    return [each.detach() for each in found]


def transformed(stage: int, kind: type | str) -> list:
    """What transforms give between two steps; then what a step gives whose loss comes out of transforms."""
    torch.manual_seed(3)
    engine = start(kind if isinstance(kind, str) else kind(), stage)
    data = rows(0, engine.global_rank)
    found = []
    for step in range(2):
        found += transforms(engine, data)
        engine.backward(engine(rows(step, engine.global_rank)))
        report = engine.step()
        found.append(torch.tensor([report.loss, report.grad_norm]))
    penalty = torch.func.grad(engine)(data).pow(2).sum()
    with torch.no_grad():
        engine(data)
    engine.backward(penalty + torch.func.vmap(engine)(data[:, None]).mean())
    report = engine.step()
    found.append(torch.tensor([report.loss, report.grad_norm]))
    return [*found, *values_of(engine).values()]


@pytest.mark.in_parts
def test_transforms_of_inputs_are_those_of_stage_2(world):
    kinds = chosen(["Base", "Twice", "Outside", "Direct", "Flat"], ["Twice", "Direct"])
    assert_as_at_stage_2(world, transformed, kinds)


def beside_transforms(*, are_there: bool) -> list:
    """Two ordinary steps, with transforms before each of them or without."""
    engine = start("Base", 3)
    for step in range(2):
        if are_there:
            transforms(engine, rows(7, engine.global_rank))
        engine.backward(engine(rows(step, engine.global_rank)))
        report = engine.step()
    return [torch.tensor([report.loss, report.grad_norm]), *values_of(engine).values()]


def test_a_step_beside_transforms_has_the_bits_of_one_without(world):
    found, wanted = (world(2).run(beside_transforms, are_there=are_there) for are_there in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(found[0], wanted[0], strict=True))


def freed_after_transforms() -> list[int]:
    """Bytes of whole parameters after a transform with gradients off, one with them, a backward, and a step."""
    engine = start("Base", 3)
    data = rows(0, engine.global_rank)
    found = []

    def note():
        units = engine.stores[0].units
        found.append(sum(each.memory.untyped_storage().nbytes() for unit in units for each in unit.parameters.values()))

    with torch.no_grad():
        torch.func.vmap(engine)(data[:, None])
    note()
    torch.func.grad(engine)(data)
    note()
    engine.backward(engine(data))
    note()
    torch.func.grad(engine)(data)
    engine.step()
    note()
    return found


def test_units_stay_whole_for_the_graph_of_a_transform_until_the_next_backward_or_step(world):
    for evaluated, differentiated, after_backward, after_step in world(2).run(freed_after_transforms):
        assert differentiated > evaluated == after_backward == after_step == 0


class Viewing(Block):
    def forward(self, hidden):
        return super().forward(hidden).view(hidden.shape)


class ChangesViews(Base):
    """Blocks whose outputs are views, changed in place by the model."""

    def __init__(self):
        super().__init__(block=Viewing)

    def hidden(self, data):
        hidden = self.first(data)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 1
        return hidden


class Wrapping(Block):
    def forward(self, hidden):
        return SimpleNamespace(hidden=super().forward(hidden))


class Objects(Base):
    """Blocks that return objects, and a model that does."""

    def __init__(self):
        super().__init__(block=Wrapping)

    def hidden(self, data):
        hidden = self.first(data)
        for block in self.blocks:
            hidden = block(hidden).hidden
        return hidden

    def forward(self, data):
        return SimpleNamespace(loss=super().forward(data))


class Viewed(Flat):
    """One unit, whose output is a view."""

    def forward(self, data):
        return self.layers(data).view(-1)


class Object(Flat):
    """One unit, whose output is an object."""

    def forward(self, data):
        return SimpleNamespace(loss=super().forward(data))


def unseen(stage: int, kind: type) -> list:
    torch.manual_seed(3)
    engine = start(kind(), stage)
    for step in range(2):
        output = engine(rows(step, engine.global_rank))
        if kind is Viewed:
            output /= 2
            output = output.pow(2).mean()
        engine.backward(output if isinstance(output, torch.Tensor) else output.loss)
        report = engine.step()
    return [torch.tensor([report.loss, report.grad_norm]), *values_of(engine).values()]


def test_no_gradient_is_lost_behind_a_view_or_in_an_object(world):
    assert_as_at_stage_2(world, unseen, [ChangesInputs, Rectifies, ChangesViews, Objects, Viewed, Object])


def habits() -> dict[str, bool]:
    """What people do to a model after initialize: each is refused by name, or changes nothing."""
    engine = start("Base", 3)
    model = engine.module
    whole = {name: torch.ones(each.shape) for name, each in model.named_parameters()}
    size = sum(each.numel() for each in model.parameters())
    before = values_of(engine)
    found = {
        "half": "cannot become torch.float16" in touched(model.half),
        "part": "half() on 'first.weight'" in touched(model.first.half),
        "assign": "'first.weight' was replaced" in touched(lambda: model.load_state_dict(whole, assign=True)),
        "to a vector": "'first.weight'" in touched(lambda: nn.utils.parameters_to_vector(model.parameters())),
        "from a vector": "'first.weight'"
        in touched(lambda: nn.utils.vector_to_parameters(torch.ones(size), model.parameters())),
        "apply": "zero_() on 'first.weight'" in touched(lambda: model.apply(_zero)),
        "average": "cannot be copied" in touched(lambda: torch.optim.swa_utils.AveragedModel(model)),
        "prune": "'first.weight'" in touched(lambda: prune.l1_unstructured(model.first, "weight", 0.5)),
        "script": "engine.compile()" in touched(lambda: torch.jit.script(model)),
    }
    model.to(memory_format=torch.channels_last)
    model.share_memory()
    model.requires_grad_(False).requires_grad_(True)
    found["nothing has changed"] = all(torch.equal(before[name], value) for name, value in values_of(engine).items())
    engine.backward(engine(rows(0, engine.global_rank)))
    engine.step()
    found["all are trained"] = not any(torch.equal(before[name], value) for name, value in values_of(engine).items())
    return found


def _zero(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


def test_habits_are_refused_by_name_or_change_nothing(world):
    for found in world(2).run(habits):
        assert [what for what, holds in found.items() if not holds] == []


def forgets(stage: int) -> bool:
    """A module forgets the gradients of any backward, and a block those of its own."""
    torch.manual_seed(3)
    engine = start("TiedBlocks", stage)
    model, data = engine.module, rows(0, engine.global_rank)
    engine(data).backward()
    model.zero_grad()
    engine.backward(engine(data))
    model.blocks[1].zero_grad()
    shared, own, other = model.extra.weight, model.blocks[1].up.weight, model.blocks[0].down.weight
    gone = not zero.safe_get_full_grad(own).any() and not zero.safe_get_full_grad(shared).any()
    return gone and bool(zero.safe_get_full_grad(other).any()) and engine.step().applied


def test_a_module_forgets_gradients_that_its_parameters_do_not_show(world):
    assert world(2).run(forgets, 3) == [True, True]
