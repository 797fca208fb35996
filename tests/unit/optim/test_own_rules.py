"""Lion, LAMB and Muon: each against its formula, written out in fp64."""

import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mizzen.errors import ConfigError
from mizzen.model.sketch import Sketch
from mizzen.optim.build import build_optimizer
from mizzen.optim.own_rules import Lamb, Lion, Muon, Portion, orthogonal, split_groups
from mizzen.optim.rules import view_of, why_not_apart

STEPS = 4


def start(*shape):
    return torch.linspace(-1.5, 2.0, math.prod(shape)).reshape(shape)


def gradients(*shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def train(optimizer, parameter):
    for gradient in gradients(*parameter.shape):
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def by_lion(value, lr, beta1, beta2, decay):
    value, momentum = value.double(), torch.zeros_like(value, dtype=torch.float64)
    for gradient in gradients(*value.shape):
        update = torch.sign(beta1 * momentum + (1 - beta1) * gradient.double())
        value = value - lr * decay * value - lr * update
        momentum = beta2 * momentum + (1 - beta2) * gradient.double()
    return value


def test_lion():
    parameter = nn.Parameter(start(3, 5))
    found = train(Lion([parameter], lr=0.03, betas=(0.9, 0.99), weight_decay=0.1), parameter)
    torch.testing.assert_close(found.double(), by_lion(start(3, 5), 0.03, 0.9, 0.99, 0.1), rtol=1e-5, atol=1e-6)


def by_lamb(value, *, lr, decay, corrected, low, high, beta1=0.9, beta2=0.999, eps=1e-8):
    value = value.double()
    mean, square = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate((g.double() for g in gradients(*value.shape)), 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        update = mean / (square.sqrt() + eps) + decay * value
        length = lr * (math.sqrt(1 - beta2**step) / (1 - beta1**step) if corrected else 1.0)
        norms = float(value.norm()), float(update.norm())
        coefficient = min(max(norms[0] / norms[1], low), high) if all(norms) else 1.0
        value = value - length * coefficient * update
    return value


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.3, 0.4), (5.0, 6.0)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb(corrected, low, high, decay):
    parameter = nn.Parameter(start(4, 6))
    rule = Lamb([parameter], lr=0.01, bias_correction=corrected, weight_decay=decay, min_coeff=low, max_coeff=high)
    expected = by_lamb(start(4, 6), lr=0.01, decay=decay, corrected=corrected, low=low, high=high)
    torch.testing.assert_close(train(rule, parameter).double(), expected, rtol=1e-5, atol=1e-6)


def test_lamb_takes_a_parameter_of_zeros_as_it_is():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    Lamb([parameter], lr=0.01, bias_correction=False).step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), -0.01 * 0.1 / math.sqrt(0.001)))


def test_lamb_on_ranges_of_flat_tensors_is_lamb_on_the_parameters():
    """Two parameters in three flat tensors with padding between them, as ranks would hold them."""
    whole = {"a": nn.Parameter(start(7)), "b": nn.Parameter(start(5) * 3)}
    plain = Lamb(whole.values(), lr=0.02, weight_decay=0.1)
    ranges = [[("a", 0, 4)], [("a", 4, 7), ("b", 0, 1)], [("b", 1, 5)]]

    def cut(values):
        return [torch.cat([torch.cat([values[n][low:high], torch.zeros(1)]) for n, low, high in one]) for one in ranges]

    flats = [nn.Parameter(flat) for flat in cut({name: value.detach() for name, value in whole.items()})]
    portions = {}
    for flat, one in zip(flats, ranges, strict=True):
        places, portions[flat] = 0, []
        for name, low, high in one:
            portions[flat].append(Portion(name, places, places + high - low))
            places += high - low + 1
    sharded = Lamb(flats, lr=0.02, weight_decay=0.1)
    sharded.share(portions, whole, lambda squares: None, torch.device("cpu"))
    for one, other in zip(gradients(7), gradients(5), strict=True):
        whole["a"].grad, whole["b"].grad = one.clone(), other.clone()
        for flat, gradient in zip(flats, cut({"a": one, "b": other}), strict=True):
            flat.grad = gradient
        plain.step(), sharded.step()
    for flat, expected in zip(flats, cut({name: value.detach() for name, value in whole.items()}), strict=True):
        torch.testing.assert_close(flat.detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonal_brings_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 30
    found = orthogonal(matrix)
    values = torch.linalg.svdvals(found)
    assert found.shape == matrix.shape
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found * (u @ v)).sum()) > 0.85 * min(shape)


def by_muon(value, lr, momentum, decay):
    value, memory = value.double(), torch.zeros_like(value, dtype=torch.float64)
    for gradient in (g.double() for g in gradients(*value.shape)):
        memory = momentum * memory + (1 - momentum) * gradient
        update = (1 - momentum) * gradient + momentum * memory
        rows = update.reshape(len(update), -1)
        work = rows if rows.shape[0] <= rows.shape[1] else rows.T
        work = work / (work.norm() + 1e-7)
        for _ in range(5):
            gram = work @ work.T
            work = 3.4445 * work - 4.7750 * gram @ work + 2.0315 * gram @ gram @ work
        work = work if rows.shape[0] <= rows.shape[1] else work.T
        length = lr * math.sqrt(max(1, rows.shape[0] / rows.shape[1]))
        value = value * (1 - lr * decay) - length * work.reshape(value.shape)
    return value


@pytest.mark.parametrize("shape", [(4, 6), (9, 3), (4, 2, 3, 3)])
def test_muon(shape):
    parameter = nn.Parameter(start(*shape))
    found = train(Muon([parameter], lr=0.05, momentum=0.9, weight_decay=0.1), parameter)
    expected = by_muon(start(*shape), 0.05, 0.9, 0.1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_muon_gives_the_rest_to_adamw():
    matrix, vector, twin = nn.Parameter(start(3, 4)), nn.Parameter(start(5)), nn.Parameter(start(5))
    rule = Muon([matrix, vector], lr=0.1, muon_lr=0.05, adam_lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    assert [(group["use_muon"], group["lr"]) for group in rule.param_groups] == [(True, 0.05), (False, 0.01)]
    plain = AdamW([twin], lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    for one, other in zip(gradients(3, 4), gradients(5), strict=True):
        matrix.grad, vector.grad, twin.grad = one.clone(), other.clone(), other.clone()
        rule.step(), plain.step()
    torch.testing.assert_close(matrix.detach().double(), by_muon(start(3, 4), 0.05, 0.95, 0.1), rtol=1e-4, atol=1e-5)
    assert torch.equal(vector, twin)
    assert set(rule.state[matrix]) == {"momentum_buffer"}
    assert set(rule.state[vector]) == {"step", "exp_avg", "exp_avg_sq"}


def test_two_views_of_muon_may_step_at_once():
    """The second one steps between the beginning of the first one's AdamW and its work."""
    matrix, vector, twin = nn.Parameter(start(3, 4)), nn.Parameter(start(5)), nn.Parameter(start(5))
    rule, plain = Muon([matrix, vector], lr=0.1), AdamW([twin], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    matrix.grad, vector.grad, twin.grad = gradients(3, 4)[0], gradients(5)[0], gradients(5)[0]
    views = [view_of(rule, [matrix])]

    def meanwhile(optimizer, *_):
        if views and isinstance(optimizer, AdamW):
            views.pop().step()

    handle = register_optimizer_step_pre_hook(meanwhile)
    try:
        view_of(rule, [vector]).step()
    finally:
        handle.remove()
    plain.step()
    assert not views and torch.equal(vector, twin) and not torch.equal(matrix, start(3, 4))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 4)
        self.words = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 10, bias=False)


def test_only_matrices_of_hidden_layers_are_for_muon():
    model = Language()
    sketches = Sketch.of(model).by_name()
    facts = {id(parameter): sketches[name] for name, parameter in model.named_parameters()}
    hidden, rest = split_groups([{"params": list(model.parameters()), "lr": 3.0}], facts)
    assert hidden["params"] == [model.hidden.weight] and hidden["use_muon"] and hidden["lr"] == 3.0
    assert len(rest["params"]) == 4 and not rest["use_muon"] and rest["lr"] == 3.0


def test_a_parameter_can_say_it_itself():
    model = Language()
    model.hidden.weight.use_muon = False
    model.lm_head.weight.use_muon = True
    groups = split_groups([{"params": list(model.parameters())}], {})
    assert model.lm_head.weight in set(groups[0]["params"])
    assert model.hidden.weight in set(groups[1]["params"])


def test_a_group_that_has_the_flag_stays():
    group = {"params": [nn.Parameter(start(2, 2))], "use_muon": False}
    assert split_groups([group], {}) == [group]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Lion", {"lr": -1.0}, "lr is -1; it must be at least 0"),
        ("Lion", {"betas": [0.9, 1.0]}, r"betas\[1\] is 1; it must be in \[0, 1\)"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff is 1; it must be at least 2"),
        ("Lamb", {"eps": -1e-3}, "eps is -0.001"),
        ("Muon", {"momentum": 1.0}, r"momentum is 1; it must be in \[0, 1\)"),
        ("Muon", {"ns_method": "fast"}, 'ns_method: "fast" is none of standard, gram'),
    ],
)
def test_wrong_arguments(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(name, arguments, [{"params": [nn.Parameter(start(3))]}], device_type="cpu")


class Halves:
    """A matrix whose two halves are the same, of which this is one."""

    def join(self, part):
        return torch.cat([part, part])

    def part_of(self, whole):
        return whole.chunk(2)[0]


def test_muon_makes_the_whole_of_a_cut_matrix_orthogonal_and_keeps_its_part():
    torch.manual_seed(1)
    part = nn.Parameter(torch.randn(4, 6))
    whole = nn.Parameter(torch.cat([part.detach(), part.detach()]))
    rules = Muon([part], lr=0.1), Muon([whole], lr=0.1)
    assert why_not_apart(rules[0]) == ""
    rules[0].joined = {part: Halves()}
    assert "over tensor-parallel ranks" in why_not_apart(rules[0])
    for step in range(2):
        part.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        whole.grad = torch.cat([part.grad, part.grad])
        for rule in rules:
            rule.step()
    torch.testing.assert_close(part.detach(), whole.detach()[:4])
    assert rules[0].state[part]["momentum_buffer"].shape == (4, 6)
