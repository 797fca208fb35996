"""Names of kernels and files, and the anatomy of a step on the CPU."""

import pytest
import torch
from bench.anatomy import examine, family, render, short


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, int>", "optimizer"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "casts and copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>", "fills"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float", "sums and norms"),
        ("triton_red_fused__to_copy_mul_3", "compiled"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collectives"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>",
            "element-wise",
        ),
    ],
)
def test_what_a_kernel_does(kernel, expected):
    assert family(kernel) == expected


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "/opt/torch/.venv/lib/python3.12/site-packages/transformers/masking_utils.py",
            "transformers/masking_utils.py",
        ),
        ("/home/me/repo/src/mizzen/engine/update.py", "mizzen/engine/update.py"),
        ("/home/me/.gpu-site/deepspeed/runtime/utils.py", "deepspeed/runtime/utils.py"),
        ("/home/me/train.py", "train.py"),
        ("~", "~"),
    ],
)
def test_files_are_named_from_their_library_on(file, expected):
    assert short(file) == expected


def test_a_step_is_taken_apart():
    weight = torch.ones(64, 64, requires_grad=True)

    def step():
        (weight @ weight).sum().backward()

    found = examine(step, 3)
    shown = {name: calls for name, calls, *_ in found["operators"]}
    assert shown["aten::mm"] == "3"
    assert found["busy_ms"] > 0 and found["wall_ms"] > 0
    assert found["waits"] == {} or torch.cuda.is_available()
    text = render("toy", found)
    assert text.startswith("## toy: ") and "aten::mm" in text
