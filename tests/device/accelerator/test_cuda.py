"""The CUDA accelerator against a GPU: numbers of memory, order of streams, timers, types, and no context too early."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from mizzen.accelerator import Timer, create_accelerator
from mizzen.accelerator.streams import hold
from mizzen.diagnose import report
from mizzen.errors import DeviceError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

MIB = 2**20


@pytest.fixture(scope="module")
def gpu():
    return create_accelerator("cuda")


def alone(code, **environment):
    """Run code in a fresh process; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_finding_the_gpu_neither_initialises_it_nor_breaks_a_fork():
    said = alone(
        """
        import os, torch
        from mizzen.accelerator import get_accelerator, survey
        accelerator = get_accelerator()
        survey()
        print(accelerator.name, torch.cuda.is_initialized(), accelerator.memory().allocated, flush=True)
        child = os.fork()
        if child == 0:
            total = torch.ones(3, device=accelerator.device(0)).sum().item()
            os._exit(0 if total == 3 else 1)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert said.splitlines() == ["cuda False 0", "0"]


def test_a_uuid_selects_a_device():
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    said = alone(
        """
        from mizzen.accelerator import get_accelerator
        accelerator = get_accelerator()
        accelerator.set_device(0)
        print(accelerator.device_count(), accelerator.capacity().total > 0, accelerator.describe().name)
        """,
        CUDA_VISIBLE_DEVICES=uuid,
    )
    assert said == f"1 True {torch.cuda.get_device_name(0)}"


def test_hidden_gpus_are_named_as_the_reason():
    said = alone(
        """
        from mizzen.accelerator import create_accelerator, get_accelerator
        from mizzen.errors import DeviceError
        print(get_accelerator().name)
        try:
            create_accelerator("cuda")
        except DeviceError as error:
            print(error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert said.splitlines()[0] == "cpu"
    assert "CUDA_VISIBLE_DEVICES=''" in said.splitlines()[1]


def test_devices(gpu):
    assert gpu.unavailable() is None
    gpu.set_device(0)
    assert gpu.current_device() == 0 and gpu.device() == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match=f"device {gpu.device_count()} of cuda"):
        gpu.set_device(gpu.device_count())


def test_memory_numbers(gpu):
    gpu.empty_cache()
    gpu.reset_peak()
    before = gpu.memory()
    assert before.peak == before.allocated
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=gpu.device())
    during = gpu.memory()
    assert during.allocated - before.allocated == 64 * MIB
    assert during.reserved >= during.allocated
    del block
    after = gpu.memory()
    assert after.allocated == before.allocated
    assert after.peak == during.allocated
    assert after.reserved == during.reserved
    gpu.empty_cache()
    assert gpu.memory().reserved < during.reserved
    gpu.reset_peak()
    assert gpu.memory().peak == before.allocated


def test_capacity_counts_what_is_reserved_as_taken(gpu):
    gpu.empty_cache()
    before = gpu.capacity()
    assert 0 < before.available <= before.total
    assert before.total == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.02)
    block = torch.empty(2048 * MIB, dtype=torch.uint8, device=gpu.device())
    assert before.available - gpu.capacity().available >= 1024 * MIB
    del block
    gpu.empty_cache()


def test_types_that_are_said_to_be_supported_compute(gpu):
    major, minor = torch.cuda.get_device_capability()
    assert gpu.supports(torch.float32) and gpu.supports(torch.float64) and gpu.supports(torch.float16)
    assert gpu.supports(torch.bfloat16) == (major >= 8)
    assert gpu.supports(torch.float8_e4m3fn) == ((major, minor) >= (8, 9))
    assert not gpu.supports(torch.float8_e4m3fnuz)


def test_float8_really_multiplies_where_it_is_said_to(gpu):
    if not gpu.supports(torch.float8_e4m3fn):
        pytest.skip("this GPU has no float8")
    left = torch.ones(16, 32, device=gpu.device()).to(torch.float8_e4m3fn)
    right = torch.ones(16, 32, device=gpu.device()).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=gpu.device())
    product = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert torch.all(product == 32)


def test_deterministic_algorithms_do_not_make_a_type_unsupported():
    fresh = create_accelerator("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        assert fresh.supports(torch.float16) and fresh.supports(torch.float64)
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_state(gpu):
    untouched = gpu.rng_state()
    assert untouched.device.type == "cpu" and untouched.dtype == torch.uint8
    gpu.seed(11)
    first = torch.rand(8, device=gpu.device())
    state = gpu.rng_state()
    second = torch.rand(8, device=gpu.device())
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=gpu.device()), second)
    gpu.seed(11)
    assert torch.equal(torch.rand(8, device=gpu.device()), first)
    gpu.set_rng_state(untouched)


def test_pinned_memory(gpu):
    pinned = gpu.pin_memory(torch.arange(1000.0))
    assert pinned.is_pinned() and gpu.pin_memory(pinned).data_ptr() == pinned.data_ptr()
    assert torch.equal(pinned.to(gpu.device(), non_blocking=True).cpu(), torch.arange(1000.0))


def test_a_side_stream_waits_and_is_waited_for(gpu):
    side, main = gpu.stream(priority=-1), gpu.current_stream()
    source = torch.zeros(MIB, device=gpu.device())
    torch.cuda._sleep(1)
    assert (source * 2).sum().item() == 0  # loads the kernels, which would make the host wait below
    gpu.synchronize()
    torch.cuda._sleep(400_000_000)
    source.fill_(3.0)
    side.wait_stream(main)
    with side:
        assert gpu.current_stream() == side
        doubled = source * 2
        done = side.record_event()
    assert gpu.current_stream() == main
    assert not done.query()
    main.wait_event(done)
    total = doubled.sum()
    hold(doubled, main)
    assert total.item() == 6 * MIB
    assert done.query() and side.query()


def test_memory_that_is_held_is_not_reused_before_the_stream_is_done(gpu):
    side = gpu.stream()
    gpu.synchronize()
    block = torch.full((MIB,), 5.0, device=gpu.device())
    address = block.data_ptr()
    side.wait_stream(gpu.current_stream())
    with side:
        torch.cuda._sleep(100_000_000)
        copy = block.clone()
    hold(block, side)
    del block
    other = torch.full((MIB,), 9.0, device=gpu.device())
    assert other.data_ptr() != address
    side.synchronize()
    assert torch.all(copy == 5.0)


def test_a_timer_measures_the_device_and_waits_only_when_read(gpu):
    timer, begin, end = Timer(gpu), gpu.event(timing=True), gpu.event(timing=True)
    torch.cuda._sleep(1)
    gpu.synchronize()
    begin.record()
    for _ in range(3):
        with timer:
            torch.cuda._sleep(100_000_000)
    end.record()
    assert not timer.ready()
    seconds = timer.read()
    assert timer.ready()
    end.synchronize()
    assert 0.9 * begin.elapsed_time(end) < seconds * 1000 <= 1.001 * begin.elapsed_time(end)
    assert timer.read() == 0.0


def test_a_lap_may_begin_on_one_stream_and_end_on_another(gpu):
    timer, side = Timer(gpu), gpu.stream()
    torch.cuda._sleep(50_000_000)
    timer.start()
    with side:
        timer.stop()
    timer.read()
    assert timer.ready()


def test_it_says_what_it_is(gpu):
    info = gpu.describe()
    assert info.name == torch.cuda.get_device_name(0)
    assert info.capability == torch.cuda.get_device_capability(0)
    assert info.architecture == f"sm_{info.capability[0]}{info.capability[1]}"
    assert info.versions["CUDA"] == torch.version.cuda
    assert info.versions["NCCL"].count(".") >= 2
    assert info.versions["driver"]
    assert gpu.comm_backend == "nccl"


def test_the_report_finds_the_gpu_and_that_nccl_works():
    said = alone(
        """
        import json
        from mizzen.diagnose.report import collect
        print(json.dumps(collect().as_dict()))
        """
    )
    facts = json.loads(said.splitlines()[-1])
    assert facts["communication"]["nccl"]["value"] == "works"
    assert facts["communication"]["gloo"]["value"] == "works"
    assert facts["devices"]["device 0"]["amount"] == torch.cuda.mem_get_info(0)[1]
    assert "bfloat16" in facts["devices"]["computes in"]["value"]
    assert facts["accelerators"]["cuda"]["value"] == "can be used"


def test_nccl_is_tried_without_leaving_a_process_group(gpu):
    assert report._collective("nccl", gpu.device()).value == "works"
    assert not torch.distributed.is_initialized()
