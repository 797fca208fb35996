import os
import threading
from types import SimpleNamespace

import psutil
import pytest

from mizzen.accelerator import host

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 GiB, 48 of them free, and 16 cores with two threads each, whose files a test writes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 32 if logical else 16)
    monkeypatch.setattr(host, "_affinity", lambda: list(range(32)))

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def topology(cpus):
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 16},{cpu % 16 + 16}" for cpu in cpus
    }


def test_a_machine_without_control_groups_is_what_psutil_says(machine):
    root = machine({})
    assert host.capacity(root) == host.Capacity(total=64 * GIB, available=48 * GIB)
    assert host.cores(root) == 16
    assert host.numa_nodes(root) == 1


def test_memory_limit_of_version_2_with_reclaimable_cache(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/pod/job",
            "sys/fs/cgroup/pod/job/memory.max": "max",
            "sys/fs/cgroup/pod/memory.max": 8 * GIB,
            "sys/fs/cgroup/pod/memory.current": 5 * GIB,
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
        }
    )
    assert host.capacity(root) == host.Capacity(total=8 * GIB, available=5 * GIB)


def test_the_tightest_of_nested_limits_counts(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/pod/job",
            "sys/fs/cgroup/pod/job/memory.max": 4 * GIB,
            "sys/fs/cgroup/pod/job/memory.current": 0,
            "sys/fs/cgroup/pod/memory.max": 16 * GIB,
            "sys/fs/cgroup/pod/memory.current": 15 * GIB,
        }
    )
    assert host.capacity(root) == host.Capacity(total=4 * GIB, available=1 * GIB)


def test_memory_limit_of_version_1_whose_path_is_not_mounted(machine):
    root = machine(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 8 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
        }
    )
    assert host.capacity(root) == host.Capacity(total=8 * GIB, available=6 * GIB)


def test_no_limit_in_version_1_is_a_huge_number_and_changes_nothing(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 63 * GIB,
        }
    )
    assert host.capacity(root) == host.Capacity(total=64 * GIB, available=48 * GIB)


def test_a_group_that_is_over_its_limit_has_nothing_free(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        }
    )
    assert host.capacity(root).available == 0


def test_threads_of_one_core_count_once(machine, monkeypatch):
    root = machine(topology(range(32)))
    assert host.cores(root) == 16
    monkeypatch.setattr(host, "_affinity", lambda: [0, 16, 3])
    assert host.cores(root) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys/fs/cgroup/pod/cpu.max": "350000 100000"}, 3),
        ({"sys/fs/cgroup/pod/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/pod/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "800000 100000"}, 8),
        ({"sys/fs/cgroup/pod/cpu.max": "max 100000"}, 16),
    ],
)
def test_quota_of_version_2(machine, files, expected):
    root = machine({**topology(range(32)), "proc/self/cgroup": "0::/pod", **files})
    assert host.cores(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [(400000, 4), (-1, 16)])
def test_quota_of_version_1(machine, quota, expected):
    root = machine(
        {
            **topology(range(32)),
            "proc/self/cgroup": "5:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
        }
    )
    assert host.cores(root) == expected


def test_memory_domains_and_processor(machine):
    nodes = {f"sys/devices/system/node/node{node}/cpulist": "0-7" for node in range(4)}
    root = machine({**nodes, "proc/cpuinfo": "processor : 0\nmodel name : A Fast One @ 3 GHz"})
    assert host.numa_nodes(root) == 4
    assert host.processor(root) == "A Fast One @ 3 GHz"


def test_cores_of_a_rank_are_near_one_another():
    two = [tuple(range(8)), tuple(range(8, 16))]
    assert [host.share_of(two, rank, 4) for rank in range(4)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    ]
    assert [host.share_of(two, rank, 3) for rank in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8, 16))]
    assert host.share_of(two, 0, 1) == tuple(range(16))
    four = [(0,), (1,), (2,), (3,)]
    assert [host.share_of(four, rank, 2) for rank in range(2)] == [(0, 1), (2, 3)]
    assert [host.share_of([(0, 1)], rank, 4) for rank in range(4)] == [(0,), (0,), (1,), (1,)]


def test_a_rank_has_its_part_of_the_cores_unless_it_was_bound(machine, monkeypatch):
    nodes = {
        f"sys/devices/system/node/node{node}/cpulist": f"{8 * node}-{8 * node + 7},{8 * node + 16}-{8 * node + 23}"
        for node in range(2)
    }
    root = machine({**nodes, **topology(range(32))})
    monkeypatch.setattr(host, "_is_bound", lambda allowed: len(allowed) < 32)
    assert host.own_cores(0, 1, root) == tuple(range(16))
    assert [host.own_cores(rank, 4, root) for rank in (1, 2)] == [(4, 5, 6, 7), (8, 9, 10, 11)]
    monkeypatch.setattr(host, "_affinity", lambda: [2, 3, 18])
    assert host.own_cores(1, 4, root) == (2, 3)


def test_a_thread_that_is_bound_leaves_others_alone():
    allowed = os.sched_getaffinity(0)
    first, seen = min(allowed), []
    thread = threading.Thread(target=lambda: (host.bind_thread((first,)), seen.append(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    assert seen == [{first}] and os.sched_getaffinity(0) == allowed


def test_a_processor_without_a_model_has_at_least_a_family(machine):
    assert host.processor(machine({"proc/cpuinfo": "processor : 0\nCPU implementer : 0x41"}))


def test_the_peak_is_the_kernels_and_absent_where_it_keeps_none(machine):
    root = machine({})
    assert host.resident(root).peak is None
    root = machine({"proc/self/status": f"Name: python\nVmHWM:\t{32 * GIB // 1024} kB"})
    assert host.resident(root).peak == 32 * GIB
    assert host.resident(root).allocated == host.resident(root).reserved > 0


def test_resetting_the_peak_tells_the_kernel(machine):
    root = machine({"proc/self/clear_refs": "untouched"})
    host.reset_peak(root)
    assert (root / "proc/self/clear_refs").read_text() == "5"


def test_a_peak_that_cannot_be_reset_is_said_once(machine, monkeypatch):
    said = []
    monkeypatch.setattr(host, "warn_once", lambda message, key: said.append(message))
    root = machine({"proc/self/clear_refs/is_a_folder": ""})
    host.reset_peak(root)
    assert len(said) == 1 and "cannot be reset" in said[0]


def test_this_machine_answers():
    assert 1 <= host.cores() <= (psutil.cpu_count() or 1)
    assert host.numa_nodes() >= 1
    assert host.capacity().total <= psutil.virtual_memory().total
