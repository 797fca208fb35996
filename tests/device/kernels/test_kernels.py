"""The kernels on a GPU against their plain twins on the same GPU: values, gradients, strides, and memory."""

import gc

import pytest
import torch

from mizzen.accelerator import get_accelerator
from mizzen.kernels.gpu import gpu_code
from mizzen.kernels.head_loss import head_loss, plain_head_loss
from mizzen.kernels.masters import keep_writes, plain_keep_writes
from mizzen.kernels.quantize import pack, plain_pack, plain_unpack, unpack
from mizzen.kernels.rms_norm import plain_rms_norm, rms_norm
from mizzen.kernels.rotary import plain_rotary, rotary
from mizzen.kernels.swiglu import plain_swiglu, swiglu
from unit.kernels.compare import awkward_rows

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(BOUND)


@pytest.fixture(autouse=True)
def cuda(device):
    if device.type != "cuda":
        pytest.skip("the kernels are for CUDA devices")


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=get_accelerator().device()).to(dtype)


def results(function, *tensors):
    """Outputs and gradients, for an incoming gradient that is no constant."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    incoming = [torch.randn(output.shape, device=output.device).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, incoming)]


def assert_close(found, expected, bound):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (one.double() - other.double()).abs().max() <= bound * other.double().abs().max()


def test_the_kernels_are_there():
    assert gpu_code(normal(1)) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 701), (1,), (2, 1000, 513)], ids=str)
def test_swiglu(dtype, shape):
    gate, up = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    assert_close(results(swiglu, gate, up), results(plain_swiglu, gate, up), BOUND[dtype])


def test_swiglu_of_slices():
    both = normal(17, 3, 64, dtype=torch.bfloat16)
    gate, up = both[..., :32], both[..., 32:]
    assert_close([swiglu(gate, up)], [plain_swiglu(gate, up)], 2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 32, 65, 64), (1, 3, 7, 14), (3, 1, 1, 2), (2, 5, 100, 256)], ids=str)
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("tables", ["same", "wider", "shared"])
def test_rotary(dtype, shape, place, tables):
    """Queries lie as attention has them: (batch, length, heads, head), seen with heads first."""
    batch, heads, length, size = shape
    query, key = normal(batch, length, heads, size, dtype=dtype), normal(batch, length, 1, size, dtype=dtype)
    if place == 1:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    table = (1 if tables == "shared" else batch, length, size)
    cosine, sine = (normal(*table, dtype=torch.float32 if tables == "wider" else dtype) for _ in range(2))
    found = results(lambda q, k: rotary(q, k, cosine, sine, place), query, key)
    expected = results(lambda q, k: plain_rotary(q, k, cosine, sine, place), query, key)
    assert_close(found, expected, BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 100, 2048), (7, 33), (4, 16, 8192)], ids=str)
def test_rms_norm(dtype, shape):
    inputs, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
    found = results(lambda x, w: rms_norm(x, w, 1e-5), inputs, weight)
    assert_close(found, results(lambda x, w: plain_rms_norm(x, w, 1e-5), inputs, weight), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(37, 24, 61, 10), (512, 256, 32768, 0), (300, 128, 50257, 128)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_head_loss(dtype, sizes, reduction):
    tokens, width, vocabulary, rows = sizes
    hidden, weight = normal(tokens, width, dtype=dtype), normal(vocabulary, width).mul(0.1).to(dtype)
    bias = normal(vocabulary, dtype=dtype)
    labels = torch.randint(0, vocabulary, (tokens,), device=hidden.device)
    labels[::5] = -100

    def fused(hidden, weight, bias):
        return head_loss(hidden, weight, labels, bias, reduction=reduction, rows=rows)

    def plain(hidden, weight, bias):
        return plain_head_loss(hidden, weight, labels, bias, reduction=reduction)

    found, expected = results(fused, hidden, weight, bias), results(plain, hidden, weight, bias)
    assert torch.allclose(found[0], expected[0], rtol=1e-4)
    assert_close(found[1:], expected[1:], 2 * BOUND[dtype])


def test_a_label_that_does_not_exist_is_no_number():
    hidden, weight = normal(4, 8, dtype=torch.bfloat16), normal(32, 8, dtype=torch.bfloat16)
    labels = torch.tensor([1, 32, 3, 4], device=hidden.device)
    assert head_loss(hidden, weight, labels).isnan()


def peak(function) -> int:
    """Bytes above what was there before: forward and backward of one loss."""
    hidden, weight = normal(8192, 512, dtype=torch.bfloat16), normal(32768, 512, dtype=torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    labels = torch.randint(0, 32768, (8192,), device=hidden.device)
    for _ in range(2):  # the first call brings workspaces along
        hidden.grad = weight.grad = None
        gc.collect()
        accelerator = get_accelerator()
        accelerator.synchronize()
        accelerator.reset_peak()
        before = accelerator.memory().allocated
        function(hidden, weight, labels).backward()
        accelerator.synchronize()
    return accelerator.memory().peak - before


def test_the_peak_of_memory_is_that_of_a_chunk():
    """Logits of 8192 x 32768: 0.5 GiB in bf16, 1 GiB in fp32, and as much again for their gradients."""
    fused, plain = peak(lambda *args: head_loss(*args, rows=1024)), peak(plain_head_loss)
    chunk, gradients = 1024 * 32768 * 2, 2 * (8192 + 32768) * 512 * 2
    assert fused < 2 * chunk + 2 * gradients
    assert fused < plain / 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 127, 128, 1001, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_messages_have_the_bits_of_the_plain_ones(bits, count, dtype):
    values = awkward_rows(count).to(get_accelerator().device()).to(dtype)
    values = torch.where(values.isfinite(), values, 0)  # what is beyond fp16
    messages = pack(values, bits)
    assert torch.equal(messages, plain_pack(values, bits))
    assert torch.equal(unpack(messages, count, bits), plain_unpack(messages, count, bits))


def test_quantized_blocks_that_are_not_finite_stay_so():
    values = torch.zeros(2, 256, device=get_accelerator().device())
    values[0, 3], values[1, 128] = float("nan"), float("inf")
    for bits in (4, 8):
        back = unpack(pack(values, bits), 256, bits)
        assert not back[0, :128].isfinite().any() and not back[1, 128:].isfinite().any()
        assert not back[0, 128:].any() and not back[1, :128].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_take_what_was_written_and_nothing_else(dtype):
    masters = torch.cat([normal(3_000_001), normal(1000) * 1e-6, normal(1000) * 1e4])
    ties = torch.arange(256, device=masters.device, dtype=torch.int32) * 0x8000 + 0x3F000000  # halfway in bf16
    masters = torch.cat([masters, ties.view(torch.float32)])
    values, before = masters.to(dtype), masters.clone()
    keep_writes(values, masters)
    assert torch.equal(masters, before)  # a master rounded is not a write: its low bits stay
    values[::7].mul_(0.5)
    expected = before.clone()
    plain_keep_writes(values, expected)
    keep_writes(values, masters)
    assert torch.equal(masters, expected) and not torch.equal(masters, before)


def test_masters_are_compared_without_memory():
    masters = normal(1 << 24)
    values = masters.to(torch.bfloat16)
    keep_writes(values, masters)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    keep_writes(values, masters)
    assert torch.cuda.max_memory_allocated() == before
