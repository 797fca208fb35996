"""Hostfiles, filters and names."""

from dataclasses import replace

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.hosts import Host, expand, in_allocation, limit, parse_hostfile, select, visible

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
