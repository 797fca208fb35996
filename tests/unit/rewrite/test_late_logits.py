"""Logits that are read are the model's own, whoever reads them and however."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from mizzen.errors import UsageError
from mizzen.rewrite.head import LateLogits


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def late(head, hidden=None) -> LateLogits:
    hidden = torch.ones(2, 3, 4, requires_grad=True) if hidden is None else hidden
    return LateLogits(hidden, head.weight, head)


def test_facts_cost_nothing(head):
    logits = late(head)
    assert isinstance(logits, torch.Tensor) and torch.is_tensor(logits)
    assert (logits.shape, logits.size(-1), logits.dim(), logits.ndim, logits.numel(), len(logits)) == (
        (2, 3, 6),
        *(6, 3, 3, 36, 2),
    )
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, torch.device("cpu"), True)
    assert logits.is_floating_point() and not logits.is_cuda
    assert not logits.is_computed


USES = {
    "detach": lambda x: x.detach(),
    "index": lambda x: x[0, 1:],
    "argmax": lambda x: x.argmax(-1),
    "arithmetic": lambda x: 2 * x + x,
    "right operand": lambda x: torch.ones(6) * x,
    "float": lambda x: x.double(),
    "to": lambda x: x.to("cpu", torch.float64),
    "function": lambda x: functional.log_softmax(x, -1),
    "list": lambda x: torch.cat([x, x]),
    "keyword": lambda x: torch.mul(input=x, other=x),
    "iteration": lambda x: torch.stack(list(x)),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "nested": lambda x: torch.stack([torch.tensor(row) for row in x.tolist()]),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "contiguous": lambda x: x.contiguous(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "out": lambda x: torch.add(x.detach(), 1, out=torch.empty(2, 3, 6)),
}


@pytest.mark.parametrize("name", USES)
def test_any_use_is_one_of_the_logits(head, name):
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    logits, use = late(head, hidden), USES[name]
    found = use(logits)
    assert logits.is_computed
    assert type(found) is torch.Tensor
    assert torch.equal(found, use(head(hidden)))


def test_the_whole_tensor_can_be_pickled_saved_copied_and_printed(head):
    with torch.no_grad():
        hidden = torch.randn(2, 3, 4)
        expected = head(hidden)
        assert torch.equal(pickle.loads(pickle.dumps(late(head, hidden))), expected)
        file = io.BytesIO()
        torch.save(late(head, hidden), file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), expected)
        assert torch.equal(copy.deepcopy(late(head, hidden)), expected)
        assert repr(late(head, hidden)) == repr(expected)


def test_they_are_computed_once(head):
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    logits = late(head)
    first = logits + 0
    logits.mul_(3)
    assert torch.allclose(logits + 0, 3 * first)
    assert len(calls) == 1


def test_gradients_flow(head):
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    expected = torch.autograd.grad(head(hidden).pow(2).sum(), (hidden, head.weight))
    found = torch.autograd.grad(late(head, hidden).pow(2).sum(), (hidden, head.weight))
    assert all(map(torch.equal, found, expected))


def test_precision_and_graph_are_those_of_the_call(head):
    with torch.autocast("cpu", torch.bfloat16):
        low = late(head)
        expected = head(low.hidden)
    assert low.dtype is torch.bfloat16
    assert torch.equal(low + 0, expected) and (low + 0).dtype is torch.bfloat16
    with torch.no_grad():
        free = late(head)
    assert not free.requires_grad and not (free + 0).requires_grad
    graph = late(head)
    with torch.no_grad():
        graph.sum()
    assert graph.computed().requires_grad


def test_a_head_that_has_changed_since_is_named(head):
    logits, read = late(head), late(head)
    before = read + 0
    with torch.no_grad():
        head.weight.data.mul_(1.01)  # as a step does it, past autograd's counters
    with pytest.raises(UsageError, match="the head has changed since .* read them before step()"):
        logits.sum()
    assert torch.equal(read + 0, before)


def test_weights_that_are_no_numbers_have_not_changed(head):
    with torch.no_grad():
        head.weight.fill_(torch.nan)
    assert late(head).isnan().all()


def test_code_below_python_gets_the_values(head):
    logits = late(head)
    target = torch.empty(2, 3, 6)
    torch.ops.aten.copy_.default(target, logits)
    assert torch.equal(target, head(logits.hidden))
