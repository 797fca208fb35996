"""The loss over a vocabulary that is shared out, on an accelerator: its memory and its value, and no whole logits.

One device stands for one of two ranks: what the ranks exchange is left out, or taken from the other half by hand.
"""

from dataclasses import replace

import pytest
import torch

from mizzen.accelerator import get_accelerator
from mizzen.kernels.head_loss import VocabularyPart, head_loss, plain_head_loss

TOKENS, WIDTH, VOCABULARY = 8192, 512, 50257
HALF = (VOCABULARY + 1) // 2


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def part(start: int, stop: int) -> VocabularyPart:
    return VocabularyPart(start, stop, VOCABULARY, HALF, enter=same, largest=same, total=same)


def inputs(dtype: torch.dtype) -> tuple:
    device = get_accelerator().device()
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, device=device, dtype=dtype) / WIDTH**0.5).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device=device)
    return hidden, weight, labels.masked_fill_(torch.arange(TOKENS, device=device) % 5 == 0, -100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_that_is_all_of_the_vocabulary_gives_the_loss_and_the_gradients(dtype):
    hidden, weight, labels = inputs(dtype)
    whole = replace(part(0, VOCABULARY), widest=VOCABULARY)
    found = head_loss(hidden, weight, labels, part=whole)
    ours = torch.autograd.grad(found, (hidden, weight))
    expected = plain_head_loss(hidden, weight, labels)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        limit = 2e-2 if dtype is torch.bfloat16 else 2e-3
        assert (one.float() - other.float()).norm() <= limit * other.float().norm()


def test_a_rank_of_two_never_has_all_logits_of_its_part():
    accelerator = get_accelerator()
    hidden, weight, labels = inputs(torch.bfloat16)
    own = weight.detach()[:HALF].clone().requires_grad_()
    del weight
    for _ in range(2):  # the first call brings workspaces along
        hidden.grad = own.grad = None
        accelerator.synchronize()
        accelerator.reset_peak()
        before = accelerator.memory().allocated
        head_loss(hidden, own, labels, rows=1024, part=part(0, HALF)).backward()
        accelerator.synchronize()
    peak = accelerator.memory().peak - before
    gradients = 2 * 2 * (hidden.numel() + own.numel())  # as they are formed in forward, and once more as they leave
    chunk = 1024 * HALF * (2 + 4 + 2)  # logits, their wide copy, and their gradient
    assert peak < gradients + 1.5 * chunk < TOKENS * HALF * 4, (peak, gradients, chunk)
