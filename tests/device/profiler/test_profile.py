"""Profiles on an accelerator: its own kernels are counted, times are read late, and the allocator is recorded."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import mizzen
from mizzen.accelerator import get_accelerator
from mizzen.profiler.count import Count
from mizzen.profiler.tree import grow
from parity.programs import Case, build, micro_batches


class Attention(nn.Module):
    def forward(self, query, key):
        return functional.scaled_dot_product_attention(query, key, key, is_causal=True)


def test_fused_attention_is_counted(device):
    query, key = (torch.randn(2, 4, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")
    model = Attention()
    count = Count(model, get_accelerator())
    with count.open():
        model(query, key).sum().backward()
    tree = grow(model, count.read())
    product = 2 * 2 * 4 * 128 * 128 * 64
    assert (tree.forward, tree.backward) == (2 * product, 5 * product)
    assert tree.seconds > 0


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 64, 128, dtype=torch.bfloat16))

    def forward(self, x, ends):
        return functional.grouped_mm(x, self.experts, offs=ends)


def test_grouped_products_are_counted(device):
    model = Experts().to(device)
    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 64], dtype=torch.int32, device=device)
    count = Count(model, get_accelerator())
    with count.open():
        model(x, ends).backward(torch.ones(64, 128, device=device, dtype=torch.bfloat16))
    tree = grow(model, count.read())
    assert (tree.forward, tree.backward) == (2 * 64 * 64 * 128, 4 * 64 * 64 * 128)


def reports(folder, **extra):
    case = Case(2, 1, 2, 0.5, "tied", "bf16")
    config = case.config | {"wall_clock_breakdown": True, "memory_breakdown": True} | extra
    engine, *_ = mizzen.initialize(model=build(case), config=config)
    found = [
        engine.train_batch(iter([tokens.to(engine.device) for tokens in micro_batches(case, step, 0)]))
        for step in range(6)
    ]
    engine.destroy()
    return found


def test_times_come_a_step_late_at_most_and_the_share_of_the_device_is_known(tmp_path):
    found = reports(tmp_path, flops_profiler={"enabled": True, "output_file": str(tmp_path / "profile.txt")})
    assert all(report.measures["elapsed_time_ms_backward"] > 0 for report in found[2:] if report.phases)
    assert any(report.phases for report in found)
    assert found[-1].measures["tflops"] > 0 and found[-1].measures["memory_peak"] > 0
    assert "Profile Summary" in (tmp_path / "profile.txt").read_text()


def test_a_snapshot_of_the_allocator(tmp_path):
    if get_accelerator().name != "cuda":
        pytest.skip("needs CUDA")
    section = {"memory_snapshot": {"enabled": True, "start_step": 2, "output_path": str(tmp_path)}}
    reports(tmp_path, profile=section)
    with (tmp_path / "rank0.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert snapshot["device_traces"][0]
