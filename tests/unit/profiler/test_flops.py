"""The profiler by hand, and the page that it prints."""

import pytest
import torch
from torch import nn

from mizzen.errors import UsageError
from mizzen.profiler.flops import FlopsProfiler
from mizzen.profiler.model_profile import get_model_profile
from mizzen.profiler.render import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from mizzen.profiler.step import peak_of


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5)))


FORWARD = 2 * 4 * 8 * 16 * 2


def test_a_model_in_one_call(capsys, tmp_path):
    model = small().train()
    file = tmp_path / "deep" / "profile.txt"
    found = get_model_profile(model, (4, 8), as_string=False, output_file=str(file))
    assert found == (FORWARD, FORWARD // 2, sum(parameter.numel() for parameter in model.parameters()))
    assert model.training and capsys.readouterr().out == ""
    text = file.read_text()
    assert "(0): Linear(144 = 51.43% Params, 512 MACs = 50.00% MACs" in text
    assert "bwd flops per GPU (not seen: 2 x fwd + 0 x fwd):" in text
    assert get_model_profile(model, args=[torch.ones(4, 8)], print_profile=False) == ("2.05 K", "1.02 KMACs", "280")
    assert get_model_profile(model, kwargs={"input": torch.ones(4, 8)}, detailed=False) is not None
    out = capsys.readouterr().out
    assert "Aggregated Profile" in out and "Detailed Profile" not in out


def test_depth_and_top_modules(capsys):
    get_model_profile(small(), (4, 8), module_depth=1, top_modules=2)
    out = capsys.readouterr().out
    assert "depth 1:" in out and "depth 0:" not in out and "depth 2:" not in out
    assert "params      - {'Linear': '144', 'Sequential': '136'}" in out
    assert "(2): Sequential(" in out and "Dropout" not in out


def test_modules_are_left_out():
    flops, _, parameters = get_model_profile(
        small(), (4, 8), print_profile=False, as_string=False, ignore_modules=[nn.Linear], warm_up=0
    )
    assert (flops, parameters) == (0, 280)


def test_generate():
    class Talks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def generate(self, x, times):
            for _ in range(times):
                x = self.layer(x)
            return x

    flops, _, _ = get_model_profile(
        Talks(), args=[torch.ones(1, 8), 3], print_profile=False, as_string=False, mode="generate"
    )
    assert flops == 3 * 2 * 8 * 8


def test_starting_stopping_and_adding_up(capsys):
    model, x = small(), torch.ones(4, 8)
    profiler = FlopsProfiler(model, recompute_fwd_factor=1.0)
    with pytest.raises(UsageError, match="nothing was counted"):
        profiler.get_total_flops()
    for _ in range(2):
        profiler.start_profile()
        model(x)
        profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * FORWARD and profiler.get_total_flops(True) == "4.1 K"
    assert profiler.get_total_macs(True) == "2.05 KMACs" and profiler.get_total_duration() > 0
    assert profiler.get_total_duration(True).endswith("s") and profiler.get_total_params(True) == "280"
    profiler.print_model_profile(profile_step=7, detailed=False)
    out = capsys.readouterr().out
    assert "at step 7" in out and "(not seen: 2 x fwd + 1 x fwd):" in out and "12.29 K" in out
    profiler.print_model_aggregated_profile(module_depth=0)
    assert capsys.readouterr().out.startswith("Top 1 kinds of modules")
    profiler.reset_profile()
    profiler.start_profile()
    with pytest.raises(UsageError, match="twice"):
        profiler.start_profile()
    with pytest.raises(UsageError, match="stop_profile"):
        profiler.reset_profile()
    profiler.end_profile()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "exactly one"),
        ({"input_shape": (1, 8), "args": [1]}, "exactly one"),
        ({"input_shape": ()}, "with its batch"),
        ({"input_shape": (1, 8), "mode": "backward"}, "'forward' or 'generate'"),
    ],
)
def test_what_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        get_model_profile(small(), **given)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match="a model is wanted"):
        FlopsProfiler("model")
    with pytest.raises(UsageError, match="a model is wanted"):
        get_model_profile("model", (1, 8))


def test_numbers_in_words():
    assert [number_to_string(number) for number in (0, 7, 1500, 2.5e6, 1e9, 3e12)] == [
        "0 ",
        "7 ",
        "1.5 K",
        "2.5 M",
        "1 G",
        "3 T",
    ]
    assert number_to_string(1500, units="M", precision=4) == "0.0015 M"
    assert macs_to_string(2e9) == "2 GMACs" and bytes_to_string(2048.0, "KB") == "2.05 KB"
    assert flops_to_string(1.5e12) == "1.5 TFLOPS" and flops_to_string(1.5e12, "GFLOPS") == "1500 GFLOPS"
    assert params_to_string(7e9) == "7 G" and params_to_string(7e9, "B") == "7 B" and params_to_string(12) == "12"
    assert duration_to_string(0.0021) == "2.1 ms" and duration_to_string(0.0021, "us") == "2100 us"
    assert duration_to_string(3.0) == "3 s" and duration_to_string(2e-8) == "0 s"


def test_known_devices():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.4 and peak_of("NVIDIA H100 PCIe") == 756.0
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312.0 and peak_of("NVIDIA L4") == 121.0
    assert peak_of("NVIDIA H200") == 989.4 and peak_of("AMD Instinct MI300X") == 1307.4
    assert peak_of("some processor") is None
