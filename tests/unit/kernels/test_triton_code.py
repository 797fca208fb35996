"""The Triton kernels against their plain twins, in Triton's interpreter on a CPU. On a GPU: tests/device/kernels."""

import pytest
import torch

from mizzen.kernels.head_loss import plain_slopes
from mizzen.kernels.masters import plain_keep_writes
from mizzen.kernels.quantize import BLOCK, plain_pack, plain_unpack
from mizzen.kernels.rotary import plain_rotary
from mizzen.kernels.swiglu import plain_swiglu
from unit.kernels.compare import assert_close, awkward_rows, results


@pytest.fixture(scope="module")
def code():
    """The kernels in Triton's interpreter, where Triton is installed and told to interpret."""
    pytest.importorskip("triton")
    from mizzen.kernels import triton_code

    if type(triton_code._swiglu).__name__ != "InterpretedFunction":
        pytest.skip("set TRITON_INTERPRET=1 to run the kernels on a CPU")
    return triton_code


INTERPRETED = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("shape", [(3, 701), (1,), (2, 5, 1024)], ids=str)
def test_swiglu(code, dtype, shape):
    torch.manual_seed(0)
    gate, up, incoming = (torch.randn(shape).to(dtype) for _ in range(3))
    expected = results(plain_swiglu, gate, up)
    torch.manual_seed(1)
    incoming = torch.randn(shape).to(dtype)
    assert_close([code.swiglu(gate, up), *code.swiglu_backward(incoming, gate, up)], expected, INTERPRETED[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 14), (1, 33, 2, 6), (2, 1, 1, 2), (1, 2, 3, 128)], ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("tables", ["same", "wider", "shared"])
def test_rotary(code, dtype, shape, strided, tables):
    torch.manual_seed(0)
    batch, heads, length, size = shape
    inputs = torch.randn(shape).to(dtype)
    if strided:
        inputs = torch.randn(batch, length, heads, size).to(dtype).transpose(1, 2)
    table = (1 if tables == "shared" else batch, length, size)
    cosine, sine = (torch.randn(table).to(torch.float32 if tables == "wider" else dtype) for _ in range(2))
    expected = results(lambda x: plain_rotary(x, x, cosine, sine)[0], inputs)
    torch.manual_seed(1)
    incoming = torch.randn(expected[0].shape).to(expected[0].dtype)
    found = code.rotate(inputs, cosine, sine, dtype=expected[0].dtype, back=False)
    back = code.rotate(incoming, cosine, sine, dtype=dtype, back=True)
    assert found.stride() == expected[0].stride() or not strided
    assert_close([found, back], expected, INTERPRETED[dtype])


@pytest.mark.parametrize("dtype", INTERPRETED, ids=str)
@pytest.mark.parametrize("shape", [(6, 37), (1, 1), (3, 9001)], ids=str)
@pytest.mark.parametrize("writes", [False, True])
def test_cross_entropy(code, dtype, shape, writes):
    torch.manual_seed(0)
    logits, labels = torch.randn(shape).mul(4).to(dtype), torch.randint(0, shape[1], shape[:1])
    labels[1::3] = -100
    expected, found = torch.empty(shape[0]), torch.empty(shape[0])
    slopes = plain_slopes(logits.clone(), labels, expected, ignore_index=-100, writes=writes)
    other = logits.clone()
    code.cross_entropy_(other, labels, found, ignore_index=-100, writes=writes)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert_close([other], [slopes], INTERPRETED[dtype])


def test_cross_entropy_with_forbidden_words_and_wrong_labels(code):
    logits = torch.randn(3, 20000)
    logits[:, :9000] = -torch.inf
    found = torch.empty(3)
    code.cross_entropy_(logits.clone(), torch.tensor([9500, 20000, -1]), found, ignore_index=-100, writes=True)
    assert torch.allclose(found[0], torch.logsumexp(logits[0], 0) - logits[0, 9500])
    assert found[1:].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 127, 128, 1001, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_messages_have_the_bits_of_the_plain_ones(code, bits, count, dtype):
    values = awkward_rows(count).to(dtype)
    expected = plain_pack(values, bits)
    found = torch.full_like(expected, 77)
    code.pack(values, found, bits=bits, block=BLOCK)
    assert torch.equal(found, expected)
    back = torch.full((len(values), count), 7.0)
    code.unpack(found, back, bits=bits, block=BLOCK)
    assert torch.equal(back, plain_unpack(expected, count, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_stays_so(code, bits):
    values = torch.zeros(2, 2 * BLOCK)
    values[0, 3], values[1, BLOCK] = float("nan"), float("inf")
    messages, back = torch.empty_like(plain_pack(values, bits)), torch.empty(2, 2 * BLOCK)
    code.pack(values, messages, bits=bits, block=BLOCK)
    code.unpack(messages, back, bits=bits, block=BLOCK)
    assert not back[0, :BLOCK].isfinite().any() and not back[1, BLOCK:].isfinite().any()
    assert not back[0, BLOCK:].any() and not back[1, :BLOCK].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_that_follow_writes(code, dtype):
    torch.manual_seed(0)
    masters = torch.randn(2500)
    values, expected = masters.to(dtype), masters.clone()
    values[::3].mul_(0.5)
    plain_keep_writes(values, expected)
    code.keep_writes(values, masters)
    assert torch.equal(masters, expected)
