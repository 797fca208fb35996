"""What a host has, by the kernel's own lists."""

import pytest

from mizzen.launcher.devices import count_devices, find_devices
from mizzen.launcher.serve import given_devices


@pytest.fixture
def nvidia(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.fixture
def amd(tmp_path):
    for node, number in ((0, "0"), (1, "51234"), (2, "51235")):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{number}\n")
    return tmp_path


def test_devices_are_counted_without_torch(nvidia):
    found = find_devices({}, nvidia)
    assert found is not None and found.variable == "CUDA_VISIBLE_DEVICES"
    assert count_devices({}, nvidia) == 2


def test_a_processor_node_of_amd_is_no_device(amd):
    found = find_devices({}, amd)
    assert found is not None and found.variable == "HIP_VISIBLE_DEVICES"
    assert count_devices({}, amd) == 2


def test_the_environment_may_ask_for_another_kind(nvidia, tmp_path):
    assert find_devices({"MIZZEN_ACCELERATOR": "cpu"}, nvidia) is None
    found = find_devices({"DS_ACCELERATOR": "xpu"}, tmp_path)
    assert found is not None and found.variable == "ZE_AFFINITY_MASK"
    assert find_devices({}, tmp_path / "nothing") is None


def test_slots_are_those_that_slurm_has_given(nvidia):
    """Without cgroups it numbers devices as the host does, and others may belong to another job."""
    for given, devices in (("4,6,7", (4, 7)), ("4,6", (0, 2)), ("NoDevFiles", (0, 2)), (None, (0, 2))):
        env = {"CUDA_VISIBLE_DEVICES": given} if given else {}
        assert given_devices((0, 2), env, nvidia) == devices
