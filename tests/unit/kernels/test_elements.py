"""RMSNorm, rotary embeddings and SwiGLU: against transformers' own code, and against their plain twins."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from mizzen.kernels.rms_norm import plain_rms_norm, rms_norm
from mizzen.kernels.rotary import plain_rotary, rotary
from mizzen.kernels.swiglu import swiglu
from unit.kernels.compare import assert_close, results

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def llama():
    return pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (1, 1), (4, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype, shape):
    torch.manual_seed(0)
    inputs, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = results(lambda x, w: plain_rms_norm(x, w, 1e-3), inputs, weight)
    assert_close(results(lambda x, w: rms_norm(x, w, 1e-3), inputs, weight), expected, ULP[dtype])


@pytest.mark.parametrize("autocast", [False, True])
def test_rms_norm_of_two_dtypes(autocast):
    inputs, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = results(lambda x, w: plain_rms_norm(x, w, 1e-5), inputs, weight)
        found = results(lambda x, w: rms_norm(x, w, 1e-5), inputs, weight)
    assert found[0].dtype is torch.float32
    assert_close(found, expected, 2e-2)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_plain_norm_is_llamas(dtype):
    norm = llama().LlamaRMSNorm(8, eps=1e-4).to(dtype)
    nn.init.normal_(norm.weight)
    inputs = torch.randn(2, 3, 8).to(dtype)
    assert torch.equal(plain_rms_norm(inputs, norm.weight, 1e-4), norm(inputs))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("place", [1, 2])
def test_the_plain_rotary_is_llamas(dtype, place):
    torch.manual_seed(0)
    shapes = {1: [(2, 3, 5, 8), (2, 1, 5, 8)], 2: [(2, 5, 3, 8), (2, 5, 1, 8)]}[place]
    query, key = (torch.randn(shape).to(dtype) for shape in shapes)
    cosine, sine = (torch.randn(2, 5, 8).to(dtype) for _ in range(2))
    expected = llama().apply_rotary_pos_emb(query, key, cosine, sine, unsqueeze_dim=place)
    assert all(map(torch.equal, plain_rotary(query, key, cosine, sine, place), expected))
    assert all(map(torch.equal, rotary(query, key, cosine, sine, unsqueeze_dim=place), expected))


def test_the_plain_swiglu_is_llamas():
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2)
    layer, inputs = llama().LlamaMLP(config), torch.randn(3, 8)
    assert torch.equal(layer.down_proj(swiglu(layer.gate_proj(inputs), layer.up_proj(inputs))), layer(inputs))


def test_nothing_of_triton_is_imported_before_a_gpu_asks():
    words = "import sys, mizzen, mizzen.kernels.head_loss, mizzen.kernels.rotary, mizzen.kernels.swiglu, mizzen.order"
    code = f"{words}; sys.exit('mizzen.kernels.triton_code' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
