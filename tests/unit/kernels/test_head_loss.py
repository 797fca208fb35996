"""The loss without logits against the one with them: value and every gradient, in every dtype and shape."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mizzen.kernels.head_loss import CHUNK_BYTES, MOST_CHUNKS, head_loss, plain_head_loss, rows_of

BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Of the largest element: a few roundings of the dtype."""


def inputs(dtype=torch.float64, *, shape=(3, 7), width=13, vocabulary=29, bias=True, trained=True):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, width, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, dtype=torch.float64)
    offset = torch.randn(vocabulary, dtype=torch.float64) if bias else None
    tensors = [None if each is None else each.to(dtype).requires_grad_(trained) for each in (hidden, weight, offset)]
    labels = torch.randint(0, vocabulary, shape)
    labels.view(-1)[::4] = -100
    return *tensors, labels


def both(tensors, labels, *, factor=3.7, **keys):
    """(loss, gradients...) of the plain function and of the fused one."""
    hidden, weight, bias = tensors
    wanted = [each for each in tensors if each is not None and each.requires_grad]
    for function in (plain_head_loss, head_loss):
        options = {key: value for key, value in keys.items() if key != "rows" or function is head_loss}
        loss = function(hidden, weight, labels, bias, **options)
        yield loss, *torch.autograd.grad(loss * factor, wanted)


def distance(found, expected):
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-300)).item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 1, 5, 21, 100])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_loss_and_gradients(dtype, rows, reduction):
    *tensors, labels = inputs(dtype)
    expected, found = both(tensors, labels, rows=rows, reduction=reduction)
    assert found[0].dtype is expected[0].dtype is torch.promote_types(dtype, torch.float32)
    assert distance(found[0], expected[0]) < max(1e-6, BOUND[dtype] / 100) or dtype is torch.float64
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert distance(one, other) < BOUND[dtype]


@pytest.mark.parametrize(
    "keys",
    [
        {"shape": (1, 1)},
        {"shape": (17,), "bias": False},
        {"shape": (2, 3, 5), "width": 1},
        {"vocabulary": 2, "bias": False},
        {"width": 64, "vocabulary": 257},
    ],
    ids=str,
)
def test_shapes(keys):
    *tensors, labels = inputs(**keys)
    expected, found = both(tensors, labels.masked_fill(labels == -100, 0), rows=4)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_inputs_that_are_not_contiguous():
    *tensors, labels = inputs()
    hidden, weight, bias = tensors
    strided = hidden.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    wide = torch.cat([weight.detach(), weight.detach()], 1)[:, :13].requires_grad_()
    expected = list(both((hidden, weight, bias), labels))[0]
    found = list(both((strided, wide, bias), labels.T.contiguous().T, rows=4))[1]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)


def test_another_label_may_be_the_ignored_one():
    *tensors, labels = inputs()
    expected, found = both(tensors, labels.masked_fill(labels == -100, 7), ignore_index=7, rows=6)
    assert distance(found[0], expected[0]) < 1e-12
    assert all(distance(one, other) < 1e-11 for one, other in zip(found[1:], expected[1:], strict=True))


def test_nothing_counts():
    """As torch has it: no loss, and no gradient that would spoil those of other batches."""
    *tensors, labels = inputs(torch.float32)
    expected, found = both(tensors, torch.full_like(labels, -100), rows=4)
    assert expected[0].isnan() and found[0].isnan()
    assert not any(gradient.any() for gradient in (*expected[1:], *found[1:]))
    assert head_loss(tensors[0], tensors[1], torch.full_like(labels, -100), reduction="sum") == 0


def test_a_label_that_does_not_exist_is_an_error():
    hidden, weight, _, labels = inputs()
    with pytest.raises((IndexError, RuntimeError)):
        head_loss(hidden, weight, labels.masked_fill(labels == -100, 29))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_only_wanted_gradients_come(frozen):
    *tensors, labels = inputs()
    for place in frozen:
        tensors[place].requires_grad_(False)
    expected, found = both(tensors, labels, rows=4)
    assert len(found) == 4 - len(frozen)
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 1e-11


def test_without_gradients_there_is_no_graph():
    hidden, weight, bias, labels = inputs(torch.float32)
    with torch.no_grad():
        loss = head_loss(hidden, weight, labels, bias, rows=4)
    assert not loss.requires_grad
    assert torch.allclose(loss, plain_head_loss(hidden, weight, labels, bias))
    assert not head_loss(*(each.detach() for each in (hidden, weight)), labels).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low_hidden", [False, True])
def test_autocast(dtype, low_hidden):
    """fp32 weights and gradients, products in the lower dtype, whatever the hidden states come in."""
    hidden, weight, bias, labels = inputs(torch.float32)
    hidden = hidden.detach().to(dtype if low_hidden else torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype):
        expected, found = both((hidden, weight, bias), labels, rows=5)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert distance(one, other) < BOUND[dtype]


def test_a_factor_is_not_rounded_to_the_dtype_of_the_gradients():
    """1/3 in bf16 is off by 1/512, which would be the error of every gradient of the model."""
    *tensors, labels = inputs(torch.bfloat16, shape=(64, 8))
    exact, _ = both(
        [each.detach().double().requires_grad_() for each in tensors], labels, factor=1 / 3, reduction="sum"
    )
    _, found = both(tensors, labels, factor=1 / 3, reduction="sum")
    slope = (found[1].double() * exact[1]).sum() / exact[1].square().sum()
    assert abs(slope - 1) < 5e-4


def test_fp16_sums_leave_its_range_only_with_the_loss_scale():
    """The same label for all tokens and large hidden states: 4096 * 40 is more than fp16 can hold, the mean is not."""
    hidden = torch.full((4096, 4), 40.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.long)
    head_loss(hidden, weight, labels, rows=2048).backward()
    assert torch.allclose(weight.grad[0], torch.full((4,), -35.0, dtype=torch.float16), rtol=1e-3)


def test_backward_twice():
    *tensors, labels = inputs()
    loss = head_loss(tensors[0], tensors[1], labels, tensors[2], rows=4)
    first = torch.autograd.grad(2 * loss, tensors, retain_graph=True)
    again = torch.autograd.grad(2 * loss, tensors)
    assert all(map(torch.equal, first, again))
    graph = torch.autograd.grad(head_loss(tensors[0], tensors[1], labels), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        graph[0].sum().backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(23, 8, dtype=torch.float64)
        self.mix = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, tokens, function):
        return function(self.mix(self.embed(tokens)).tanh(), self.embed.weight, tokens.roll(-1, 1))


def fused(hidden, weight, labels):
    return head_loss(hidden, weight, labels, rows=3)


@pytest.mark.parametrize("way", ["plain", "recomputed", "compiled"])
def test_a_tied_model(way):
    model, tokens = Tied(), torch.arange(14).reshape(2, 7)
    other = copy.deepcopy(model)
    model(tokens, plain_head_loss).backward()
    if way == "recomputed":
        loss = checkpoint(other, tokens, fused, use_reentrant=False)
    elif way == "compiled":
        loss = torch.compile(other, backend="eager")(tokens, fused)
    else:
        loss = other(tokens, fused)
    loss.backward()
    for one, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one.grad, expected.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"),
    [
        (16384, 32768, 2048),  # as many as fit
        (16384, 131072, 1024),  # 512 would fit, but then there are too many chunks
        (100, 32768, 100),
        (1, 10**9, 1),
        (4000, 10**8, 256),
    ],
)
def test_how_many_tokens_make_a_chunk(tokens, vocabulary, rows):
    assert rows_of(tokens, vocabulary) == rows
    assert -(-tokens // rows) <= MOST_CHUNKS
    assert rows * vocabulary * 4 <= CHUNK_BYTES or rows <= -(-tokens // MOST_CHUNKS) + 128


MEASURE = """
import re, sys, torch
from mizzen.kernels.head_loss import head_loss, plain_head_loss
hidden, weight = torch.randn(2048, 16, requires_grad=True), torch.randn(16384, 16, requires_grad=True)
labels = torch.randint(0, 16384, (2048,))
def peak():  # that of ru_maxrss would be the one of the process that has started this one
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1])
head_loss(hidden[:8], weight, labels[:8]).backward()
before = peak()
loss = head_loss(hidden, weight, labels, rows=64) if sys.argv[1] == "fused" else plain_head_loss(hidden, weight, labels)
loss.backward()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_logits_never_exist(python):
    """2048 x 16384 in fp32 are 128 MiB; a chunk of 64 has 4 MiB of them."""
    found = {name: int(python("-c", MEASURE, name).stdout) >> 10 for name in ("plain", "fused")}
    assert found["plain"] > 2 * 128
    assert found["fused"] < 64
