import io
import json
import resource
import shutil
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.protocol import Capacity, DeviceInfo
from mizzen.ambient import AMBIENT
from mizzen.diagnose import report
from mizzen.diagnose.report import Chapter, Finding, Report, collect, render
from mizzen.errors import DeviceError

GIB = 2**30


class Gpu(Cpu):
    """Two devices with memory of their own, whose collectives are gloo's."""

    name = "gpu"
    shares_host_memory = False
    comm_backend = "vendor"

    def device_count(self):
        return 2

    def capacity(self, index=None):
        return Capacity(total=80 * GIB, available=79 * GIB)

    def describe(self, index=None):
        return DeviceInfo(f"Fast {index}", "sm_90", (9, 0), {"driver": "580.1", "NCCL": "2.28.3"})


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(AMBIENT, "accelerator", None)
    monkeypatch.delenv("MIZZEN_ACCELERATOR", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def findings(probe):
    return {each.name: each for each in report._ask(probe)}


def printed(found, width=120):
    console = Console(width=width, file=io.StringIO())
    console.print(render(found))
    return console.file.getvalue()


def test_every_probe_answers_on_this_machine():
    found = collect()
    facts = found.as_dict()
    assert list(facts) == list(dict.fromkeys(title for title, _ in report.PROBES))
    assert not [each for each in found.problems() if "unknown:" in each.value]
    assert facts["versions"]["torch"]["value"] == torch.__version__
    assert facts["accelerators"]["cpu"] == {"value": "can be used", "state": "ok", "remedy": "", "amount": None}
    assert facts["communication"]["gloo"]["value"] == "works"
    assert facts["host"]["memory"]["amount"] > 0
    assert json.loads(json.dumps(facts)) == facts


def test_collecting_leaves_no_process_group_and_can_be_repeated():
    for _ in range(2):
        assert report._collective("gloo", torch.device("cpu")) == Finding("gloo", "works")
        assert not torch.distributed.is_initialized()


def test_a_process_group_in_use_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("it is in use"))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda *_: pytest.fail("it is in use"))
    assert report._collective("gloo", torch.device("cpu")).value.startswith("not tried")


def test_a_backend_that_fails_says_why_and_leaves_nothing(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no interface\nstack of frames")

    monkeypatch.setattr(torch.distributed, "all_reduce", refuse)
    found = report._collective("gloo", torch.device("cpu"))
    assert (found.value, found.state) == ("does not work: no interface", "problem")
    assert "GLOO_SOCKET_IFNAME" in found.remedy
    assert not torch.distributed.is_initialized()


def test_a_wrong_sum_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.zero_())
    assert report._collective("gloo", torch.device("cpu")).state == "problem"


@pytest.mark.filterwarnings("ignore:Device capability")
def test_an_unknown_backend_is_a_finding_not_a_crash():
    assert report._collective("nccl-of-the-future", torch.device("cpu")).state == "problem"
    assert not torch.distributed.is_initialized()


def test_the_collectives_of_the_device_are_tried_on_it(monkeypatch):
    tried = []
    monkeypatch.setattr(AMBIENT, "accelerator", Gpu())
    monkeypatch.setattr(report, "_collective", lambda *asked: tried.append(asked) or Finding(asked[0], "works"))
    assert findings(report._communication_of_the_device)["vendor"].value == "works"
    assert tried == [("vendor", torch.device("cpu"))]


def test_a_probe_that_fails_keeps_what_it_found_and_names_the_reason():
    def _free_lunch():
        yield Finding("bread", "yes")
        raise PermissionError(13, "Permission denied", "/kitchen")

    found = findings(_free_lunch)
    assert found["bread"].value == "yes"
    assert found["free lunch"].state == "problem"
    assert "PermissionError" in found["free lunch"].value and "/kitchen" in found["free lunch"].value


def test_a_mistake_of_ours_is_not_hidden():
    def _wrong():
        yield Finding("x", {}["absent"])

    with pytest.raises(KeyError):
        report._ask(_wrong)


def test_an_accelerator_that_was_asked_for_in_vain_does_not_stop_the_report(monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cudda")
    facts = collect().as_dict()
    assert "'cudda' is unknown" in facts["devices"]["devices"]["value"]
    assert "host" in facts and facts["communication"]["gloo"]["value"] == "works"


def test_devices_are_listed_with_memory_versions_and_types(monkeypatch):
    monkeypatch.setattr(AMBIENT, "accelerator", Gpu())
    found = findings(report._devices)
    assert found["in use"] == Finding("in use", "gpu: 2 ranks fit on this host", amount=2)
    assert found["device 1"] == Finding("device 1", "Fast 1, sm_90, 80.0 GiB, 79.0 GiB free", amount=80 * GIB)
    assert (found["driver"].value, found["NCCL"].value) == ("580.1", "2.28.3")
    assert found["computes in"].value == "float32, float64, float16, bfloat16"


def test_the_host_is_one_device_however_many_ranks_it_takes(monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "6")
    monkeypatch.setattr(AMBIENT, "accelerator", Cpu())
    found = findings(report._devices)
    assert found["in use"].amount == 6
    assert [name for name in found if name.startswith("device")] == ["device 0"]


def test_a_gpu_that_torch_cannot_use_is_a_problem_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "survey", lambda: {"cuda": "torch is built without CUDA: install another", "cpu": None})
    monkeypatch.setattr(report, "GPU_NODES", (tmp_path / "nvidiactl",))
    assert findings(report._accelerators)["cuda"].state == "absent"
    (tmp_path / "nvidiactl").touch()
    found = findings(report._accelerators)["cuda"]
    assert (found.state, found.remedy) == ("problem", "torch is built without CUDA: install another")


def test_packages_have_a_version_or_a_way_to_get_them(monkeypatch):
    def version(name):
        if name == "pytorch-lightning":
            return "2.6.6"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    found = findings(report._packages)
    assert found["lightning"] == Finding("lightning", "2.6.6")
    assert (found["wandb"].state, found["wandb"].remedy) == ("absent", "pip install 'mizzen[wandb]'")
    names = "tensorboard wandb comet-ml mpi4py transformers accelerate peft lightning torchao triton"
    assert set(found) == set(names.split())


def test_every_extra_that_a_remedy_names_exists():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    for package in report.PACKAGES:
        if "mizzen[" in package.remedy:
            extra = package.remedy.split("[")[1].split("]")[0]
            assert any(each.startswith(package.distributions[0]) for each in extras[extra]), package


@pytest.mark.parametrize(("free", "state"), [(511 * 2**20, "problem"), (512 * 2**20, "ok")])
def test_little_shared_memory_is_a_problem(monkeypatch, tmp_path, free, state):
    monkeypatch.setattr(report, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=GIB, free=free))
    found = findings(report._shared_memory)["shared memory"]
    assert found.state == state and found.amount == GIB
    assert ("--shm-size" in found.remedy) == (state == "problem")


def test_no_shared_memory_folder_is_only_said(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "SHARED_MEMORY", tmp_path / "none")
    assert findings(report._shared_memory)["shared memory"].state == "absent"


def test_a_temporary_folder_is_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert "FileNotFoundError" in findings(report._temporary_folder)["temporary folder"].value
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert findings(report._temporary_folder)["temporary folder"].value.startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**20))
    assert "TMPDIR" in findings(report._temporary_folder)["temporary folder"].remedy


@pytest.mark.parametrize(
    ("soft", "value", "state"),
    [(256, "at most 256", "problem"), (65536, "at most 65536", "ok"), (resource.RLIM_INFINITY, "unlimited", "ok")],
)
def test_open_files(monkeypatch, soft, value, state):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    found = findings(report._open_files)["open files"]
    assert (found.value, found.state) == (value, state)


def test_locked_memory_matters_with_infiniband_only(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 * 1024, 64 * 1024))
    monkeypatch.setattr(report, "INFINIBAND", tmp_path / "none")
    found = findings(report._locked_memory)
    assert (found["InfiniBand"].state, found["locked memory"].state) == ("absent", "ok")
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(report, "INFINIBAND", tmp_path)
    found = findings(report._locked_memory)
    assert found["InfiniBand"].value == "mlx5_0"
    assert found["locked memory"].value == "at most 64.0 KiB" and "memlock" in found["locked memory"].remedy


def test_a_containers_limit_is_told_from_the_machines_memory(monkeypatch):
    monkeypatch.setattr(report.host, "capacity", lambda: Capacity(total=8 * GIB, available=GIB))
    monkeypatch.setattr(report.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    value = findings(report._memory)["memory"].value
    assert value == "8.0 GiB, 1.0 GiB free (a container's limit; the machine has 64.0 GiB)"


def test_the_print_has_every_finding_and_each_remedy_once_problems_first():
    mine = Report(
        (
            Chapter(
                "tools", (Finding("saw", "none", "absent", "buy both"), Finding("axe", "none", "absent", "buy both"))
            ),
            Chapter("roof", (Finding("tiles", "[red]broken[/red]", "problem", "mend it"), Finding("[b]beams", "fine"))),
        )
    )
    text = printed(mine)
    assert "[red]broken[/red]" in text and "[b]beams" in text and "fine" in text
    assert text.count("buy both") == 1 and "saw, axe" in text
    assert text.index("mend it") < text.index("buy both")
    assert [each.name for each in mine.problems()] == ["tiles"]
    assert [each.name for each in mine.remedies()] == ["saw", "axe", "tiles"]


def test_nothing_to_do_prints_no_such_chapter():
    assert "what to do" not in printed(Report((Chapter("roof", (Finding("beams", "fine"),)),)))


def test_no_torch_distributed_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    found = findings(report._communication)
    assert found["torch.distributed"].state == "problem" and "gloo" not in found


def test_device_errors_are_among_what_a_probe_may_raise():
    assert issubclass(DeviceError, report.PROBE_ERRORS)
