"""Hostfiles, filters and names; what a host has, by the kernel's own lists; which cores a rank gets."""

from dataclasses import replace

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.hosts import (
    Host,
    NumaNode,
    check_affinity,
    count_devices,
    expand,
    find_devices,
    in_allocation,
    limit,
    numa_nodes,
    numactl,
    parse_cores,
    parse_hostfile,
    physical,
    select,
    shares,
    visible,
)
from mizzen.launcher.node_main import given_devices

HOSTS = (Host("w0", (0, 1, 2, 3)), Host("w1", (0, 1)), Host("w-2.net", (0,)))


def test_a_hostfile():
    text = "# comment\n\nw0 slots=4\n  w1\tslots=2   # two\nw-2.net slots=1 max_slots=9\n"
    assert parse_hostfile(text, "hosts") == HOSTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w0 slots=2\nw0 slots=2\n", "hosts, line 2: host 'w0' is there twice"),
        ("\nw0\n", "hosts, line 2: 'w0' is not `name slots=N`"),
        ("w0 slots=two\n", "line 1: 'w0 slots=two' is not"),
        ("w0 slots=2 gpus=3\n", "is not `name slots=N`"),
        ("w0 slots=0\n", "slots=0: a host without slots"),
        ("-oProxyCommand=evil slots=1\n", "'-oProxyCommand=evil' is no host name"),
        ("w0;reboot slots=1\n", "is no host name"),
        ("-oProxyCommand=evil@w0 slots=1\n", "'-oProxyCommand=evil' is no name of a user"),
        ("@w0 slots=1\n", "'' is no name of a user"),
        ("node1..lan slots=1\n", "'node1..lan' is no host name.*one '.' between two"),
        (f"{'a' * 64}.lan slots=1\n", "is no host name"),
        (f"{'.'.join(['a' * 50] * 6)} slots=1\n", "is no host name"),
        ("fe80::1%eth0 slots=1\n", "is no host name"),
        ("[::1 slots=1\n", "is no host name"),
        ("::1 slots=1\n[0:0::1] slots=1\n", "line 2: host '::1' is there twice"),
        ("ann@w0 slots=1\nw0 slots=1\n", "line 2: host 'w0' is there twice"),
        ("# nothing\n", "no host in it"),
        (f"w0 slots={'9' * 5000}\n", "line 1: slots of w0 are above 9,999: write how many"),
        ("w0 slots=10000\n", "slots of w0 are above 9,999"),
    ],
)
def test_a_wrong_hostfile_is_named_with_its_line(text, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parse_hostfile(text, "hosts")


@pytest.mark.parametrize(
    ("include", "left"),
    [
        ("w0", "w0:0,1,2,3"),
        ("w0@w1:1", "w0:0,1,2,3 w1:1"),
        ("w1:1@w0:2,0", "w0:0,2 w1:1"),
        ("w0:1@w0:3,1", "w0:1,3"),
        ("", "w0:0,1,2,3 w1:0,1 w-2.net:0"),
    ],
)
def test_include(include, left):
    assert " ".join(map(str, select(HOSTS, include))) == left


@pytest.mark.parametrize(
    ("exclude", "left"),
    [("w0", "w1:0,1 w-2.net:0"), ("w0:0,3@w1", "w0:1,2 w-2.net:0"), ("w-2.net:0", "w0:0,1,2,3 w1:0,1")],
)
def test_exclude(exclude, left):
    assert " ".join(map(str, select(HOSTS, exclude=exclude))) == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        ("w0", "w1", "together"),
        ("w9", "", "unknown host 'w9'; known: w0, w1, w-2.net"),
        ("w0:9", "", "w0 has no slot 9; it has 0, 1, 2, 3"),
        ("w0:", "", "'' is no slot number"),
        ("w0:-1", "", "'-1' is no slot number"),
        ("", "w0@w1@w-2.net", "leaves no slot"),
    ],
)
def test_a_wrong_filter_says_what_there_is(include, exclude, said):
    with pytest.raises(UsageError, match=said):
        select(HOSTS, include, exclude)


def test_counts():
    assert limit(HOSTS, 2, 2) == (Host("w0", (0, 1)), Host("w1", (0, 1)))
    with pytest.raises(UsageError, match="--num_nodes 4: there are 3 hosts"):
        limit(HOSTS, 4)
    with pytest.raises(UsageError, match="--num_gpus 3: w1 has 2 slots"):
        limit(HOSTS, None, 3)


def test_visible_devices():
    assert visible("CUDA_VISIBLE_DEVICES", " 2,3") == (2, 3)
    for value, said in (("", "hides every device"), ("GPU-1f", "only numbers")):
        with pytest.raises(UsageError, match=said):
            visible("CUDA_VISIBLE_DEVICES", value)


@pytest.mark.parametrize(
    ("names", "expanded"),
    [
        ("gpu[03-05,9],login1", ["gpu03", "gpu04", "gpu05", "gpu9", "login1"]),
        ("a[1-2]b[0-1]", ["a1b0", "a1b1", "a2b0", "a2b1"]),
        ("node1", ["node1"]),
        ("", []),
    ],
)
def test_how_slurm_writes_names(names, expanded):
    assert list(expand(names)) == expanded
    assert list(in_allocation({"SLURM_JOB_NODELIST": names})) == expanded


@pytest.mark.parametrize(
    "names", ["n[a-b]", "n[1-x", "n[1-x]", "n1]", "n[[1]", "n[]", "n[3-1]", "n[1-]", f"n[1-{'9' * 5000}]"]
)
def test_a_list_of_nodes_that_cannot_be_read(names):
    with pytest.raises(UsageError, match="cannot be read: write it as in gpu"):
        expand(names)


def test_numbers_of_any_length_are_refused_in_words():
    with pytest.raises(UsageError, match="is no slot number"):
        select(HOSTS, f"w0:{'9' * 5000}")
    with pytest.raises(UsageError, match="only numbers can be given out"):
        visible("CUDA_VISIBLE_DEVICES", "9" * 5000)


def test_users_and_addresses():
    hosts = parse_hostfile("ann@w0 slots=2\n[2001:db8::1] slots=2\nbob@2001:DB8:0::2 slots=1\n", "hosts")
    assert [host.login for host in hosts] == ["ann@w0", "2001:db8::1", "bob@2001:db8::2"]
    assert str(hosts[1]) == "[2001:db8::1]:0,1"
    assert select(hosts, "w0:1@[2001:db8::1]:0@[2001:db8::2]") == (
        replace(hosts[0], slots=(1,)),
        replace(hosts[1], slots=(0,)),
        hosts[2],
    )
    assert select(hosts, exclude="2001:db8:0::1@w0") == (hosts[2],)
    with pytest.raises(UsageError, match=r"unknown host '2001:db8::9'; known: w0, 2001:db8::1"):
        select(hosts, "[2001:db8::9]:0")
    with pytest.raises(UsageError, match="unknown host 'x'"):
        select(hosts, "x:0:1:2")


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


def test_lists():
    assert parse_cores("1,3-5,7") == (1, 3, 4, 5, 7)
    for text in ("3-1", "1,1", "1-3,2", "a", "1-", ""):
        with pytest.raises(UsageError, match="--bind_core_list"):
            parse_cores(text)


def test_shares():
    assert shares(range(5), 2) == [(0, 1), (2, 3)]
    with pytest.raises(UsageError, match="2 cores for 3 ranks"):
        shares((0, 1), 3)


def test_the_words_of_numactl():
    two = (NumaNode(0, (0, 1)), NumaNode(1, (2, 3)))
    assert numactl((2, 3), two) == ("numactl", "-C", "2,3", "-m", "1")
    assert numactl((1, 2), two) == ("numactl", "-C", "1,2")
    assert numactl((0,), (NumaNode(0, (0, 1)),)) == ("numactl", "-C", "0")
    assert numactl((0,), (NumaNode(0, (0, 1)), NumaNode(1, ()))) == ("numactl", "-C", "0")


def test_only_one_hand_on_the_wheel():
    with pytest.raises(UsageError, match="KMP_AFFINITY"):
        check_affinity({"KMP_AFFINITY": "compact"})


def test_what_the_kernel_says(tmp_path):
    for node, cores in (("node0", "0-1,4"), ("node1", "")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == (NumaNode(0, (0, 1, 4)), NumaNode(1, ()))
    for core, siblings in ((0, "0,2"), (1, "1"), (2, "0,2")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert physical((2, 1, 0), tmp_path) == (0, 1)
