"""Joining the world for real: by variables, arguments, files and torchrun, and every way in which it fails."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mizzen.comm as comm
from mizzen.accelerator import get_accelerator
from mizzen.ambient import AMBIENT
from mizzen.comm import join, rendezvous
from mizzen.comm.join import init_distributed
from mizzen.comm.rendezvous import open_store
from mizzen.comm.report import comm_log
from mizzen.environment import World
from mizzen.errors import CommError, ConfigError, DeviceError, UsageError

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")


def total():
    value = torch.tensor([float(comm.get_rank() + 1)])
    comm.all_reduce(value)
    return value.item()


def forget(*names):
    for name in names or ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def attempt(**options):
    """The error that joining ends with."""
    try:
        init_distributed(timeout=timedelta(seconds=4), **options)
    except CommError as error:
        return str(error)
    return ""


def by_variables():
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = init_distributed()
    again = init_distributed(timeout=timedelta(minutes=3))
    assert again is found and AMBIENT.world is found
    limit = comm.set_patience().timeout
    return found, total(), dist.get_backend(), dict(os.environ) == before, limit, get_accelerator().current_device()


def test_by_the_variables_of_torchrun(world):
    results = world(3, init=False).run(by_variables)
    assert [found.rank for found, *_ in results] == [0, 1, 2]
    for found, added, backend, untouched, limit, device in results:
        assert (found.size, found.local_rank, found.source) == (3, found.rank, "torchrun")
        assert (added, backend, untouched, limit, device) == (6.0, "gloo", True, 180.0, found.rank)


def adopt():
    group = dist.group.WORLD
    found = init_distributed(dist_init_required=False)
    return found.rank, found.size, found.local_rank, dist.group.WORLD is group, total()


def test_an_existing_process_group_is_adopted(world):
    assert world(2).run(adopt) == [(0, 2, 0, True, 3.0), (1, 2, 1, True, 3.0)]


def by_arguments(port):
    rank = int(os.environ["RANK"])
    forget()
    found = init_distributed(rank=rank, world_size=3, init_method=f"tcp://localhost:{port}", verbose=False)
    return found.local_rank, found.local_size, found.source, total()


def test_by_arguments_the_local_rank_is_counted_out(world, port):
    assert world(3, init=False).run(by_arguments, port) == [(rank, 3, "arguments", 6.0) for rank in range(3)]


def by_file(path):
    rank = int(os.environ["RANK"])
    forget()
    init_distributed("gloo", rank=rank, world_size=2, init_method=f"file://{path}")
    return total()


def test_by_file(world, tmp_path):
    assert world(2, init=False).run(by_file, str(tmp_path / "store")) == [3.0, 3.0]


def alone(no_network):
    forget()
    if no_network:
        socket.socket = None  # whoever wants one fails
    found = init_distributed()
    return found, total(), comm.get_world_size()


def test_one_process_without_variables_is_a_world_of_one(world):
    assert world(1, init=False).run(alone, True) == [(World(), 1.0, 1)]


def again_after_the_end():
    sums = []
    for _ in range(3):
        init_distributed()
        sums.append(total())
        comm.destroy_process_group()
    return sums


def again_while_the_first_is_late():
    sums = []
    for _ in range(2):
        init_distributed()
        sums.append(total())
        if not comm.get_rank():
            time.sleep(0.3)  # the other one is at the store of the world that ends
        comm.destroy_process_group()
    return sums


def test_who_joins_again_at_the_store_of_the_former_world_waits_for_the_next(world):
    assert world(2, init=False).run(again_while_the_first_is_late) == [[3.0] * 2] * 2


def test_a_world_can_be_joined_again(world):
    assert world(2, init=False).run(again_after_the_end) == [[3.0] * 3] * 2


def with_limit(minutes):
    os.environ["DEEPSPEED_TIMEOUT"] = minutes
    init_distributed()
    return comm.set_patience().timeout, dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_the_limit_comes_from_the_environment(world):
    assert world(2, init=False).run(with_limit, "7") == [(420.0, timedelta(minutes=7))] * 2


@pytest.mark.parametrize("variable", ["MIZZEN_TIMEOUT", "DEEPSPEED_TIMEOUT"])
@pytest.mark.parametrize("text", ["x", "nan", "-1", "inf"])
def test_a_wrong_limit_is_named_by_its_variable(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"^{variable}: .*'{text}', which is not a number of minutes"):
        init_distributed()


def logging_config():
    init_distributed(config={"comms_logger": {"enabled": True}})
    total()
    return list(comm_log().records)


def test_the_config_turns_the_log_on(world):
    assert world(2, init=False).run(logging_config) == [["all_reduce"]] * 2


class Recorded:
    """A backend of somebody else's, of one rank."""

    name = "recorded"
    world = None

    def initialize(self, world, *, timeout, init_method=None, device=None):
        self.world = world

    def is_initialized(self):
        return self.world is not None

    def store(self):
        return None

    def group(self, handle):
        from mizzen.comm.backend import Group

        return Group("all", (0,), 0, "all ranks")


def registered():
    forget()
    comm.register_backend("recorded", Recorded)
    found = init_distributed("recorded")
    return found, dist.is_initialized(), comm.is_initialized(), comm.get_rank(), init_distributed() is found


def test_a_registered_backend_is_initialized_instead(world):
    assert world(1, init=False).run(registered) == [(World(master_port=29500), False, True, 0, True)]


class Gpus:
    """An accelerator that only counts."""

    name, comm_backend, visible_devices = "cuda", "nccl", "CUDA_VISIBLE_DEVICES"

    def __init__(self, count):
        self.count, self.current = count, None

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index

    def current_device(self):
        return self.current

    def device(self, index):
        return torch.device("cuda", index)


@pytest.mark.parametrize(
    ("count", "visible", "backend", "found"),
    [
        (4, None, None, ("cpu:gloo,cuda:nccl", torch.device("cuda", 3))),
        (4, None, "nccl", ("cpu:gloo,cuda:nccl", torch.device("cuda", 3))),
        (1, "GPU-7", None, ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))),
        (1, None, "gloo", ("gloo", None)),
    ],
)
def test_the_device_of_a_rank(monkeypatch, count, visible, backend, found):
    gpus = Gpus(count)
    monkeypatch.setattr(join, "get_accelerator", lambda: gpus)
    monkeypatch.setattr(join, "environ", lambda: {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    world = World(rank=7, size=8, local_rank=3, local_size=4)
    assert join.take_device(world, backend) == found
    assert gpus.current == (3 if count == 4 else 0)


def test_more_ranks_than_devices_fail_on_every_rank_of_the_host(monkeypatch):
    monkeypatch.setattr(join, "get_accelerator", lambda: Gpus(2))
    for local_rank in range(4):
        with pytest.raises(DeviceError, match="one of 4 on its host, but it sees 2 cuda devices: start at most 2"):
            join.take_device(World(rank=local_rank, size=4, local_rank=local_rank, local_size=4), None)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def short_of_one():
    os.environ["WORLD_SIZE"] = "3"
    return attempt()


def test_the_missing_rank_is_named_on_every_rank(world):
    texts = world(2, init=False).run(short_of_one)
    assert texts[0] == texts[1]
    assert "3 ranks were waited for at localhost:" in texts[0] or "3 ranks were waited for at 127.0.0.1:" in texts[0]
    assert "2 have come in time" in texts[0] and "missing: rank 2." in texts[0]


def odd_size():
    os.environ["WORLD_SIZE"] = "2" if os.environ["RANK"] == "0" else "3"
    return attempt()


def test_a_wrong_world_size_is_named_on_every_rank(world):
    texts = world(2, init=False).run(odd_size)
    assert texts[0] == texts[1] and "rank 0 expects 2 ranks" in texts[0] and "rank 1 on" in texts[0]


def no_rank_0():
    return attempt() if os.environ["RANK"] == "1" else None


def test_a_missing_rank_0_is_named(world):
    text = world(2, init=False).run(no_rank_0)[1]
    assert "rank 1 of 2 waited 4 s for rank 0 at" in text and "nothing answers there" in text


@pytest.fixture
def taken():
    """A port on which something listens that says nothing."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        yield listener.getsockname()[1]


def failure(address, port, *, hosting, seconds=1.0):
    world = World(rank=0 if hosting else 1, size=2, master_addr=address, master_port=port)
    with pytest.raises(CommError) as error:
        open_store(world, timedelta(seconds=seconds), hosting=hosting)
    return str(error.value)


def test_a_busy_port(taken):
    text = failure("127.0.0.1", taken, hosting=True)
    assert f"port {taken} is taken on this host" in text and "Set MASTER_PORT or distributed_port" in text


def test_an_address_that_cannot_be_resolved():
    text = failure("no-such-host.invalid", 29500, hosting=False)
    assert "the address of rank 0, no-such-host.invalid, cannot be resolved" in text and "MASTER_ADDR" in text


def test_nothing_answers(port):
    assert f"waited 1 s for rank 0 at 127.0.0.1:{port}, and nothing answers" in failure(
        "127.0.0.1", port, hosting=False
    )


def test_something_else_listens(taken, monkeypatch):
    # TCPStore itself would wait here for ever, whatever its timeout.
    monkeypatch.setattr(rendezvous, "GRACE", timedelta(seconds=1))
    assert "what listens there is no store: check MASTER_PORT" in failure("127.0.0.1", taken, hosting=False)


def test_a_store_that_still_tries_when_time_is_up_has_reached_nothing(port, taken, monkeypatch):
    # On a busy machine TCPStore begins another round of tries, and is not back in time: as if it were so at once.
    def never(limit, call):
        raise TimeoutError("no answer within 6 s")

    monkeypatch.setattr(rendezvous, "_within", never)
    assert "for rank 0 at" in (text := failure("127.0.0.1", port, hosting=False)) and "nothing answers" in text
    assert "what listens there is no store" in failure("127.0.0.1", taken, hosting=False)


def test_rank_0_is_not_where_the_address_says(port):
    text = failure("192.0.2.254", port, hosting=True)
    assert "that address is not this host's" in text and "MASTER_ADDR must name the host where rank 0 runs" in text


def test_arguments_are_checked():
    with pytest.raises(UsageError, match="timedelta"):
        init_distributed(timeout=30)
    with pytest.raises(UsageError, match="dist_init_required is false, but no process group exists"):
        init_distributed(dist_init_required=False)
    with pytest.raises(CommError, match=r"say host and port, as in tcp://node1:29500"):
        init_distributed(rank=0, world_size=2, init_method="tcp://node1")
    with pytest.raises(CommError, match="use env://, tcp://HOST:PORT or file:///PATH"):
        init_distributed(rank=0, world_size=2, init_method="carrier-pigeon://x")


# -- torchrun itself ---------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("error", FutureWarning)
warnings.simplefilter("error", DeprecationWarning)
import torch
import mizzen.comm as comm
before = dict(os.environ)
world = comm.init_distributed()
if sys.argv[1] == "die" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
value = torch.tensor([world.rank + 1.0])
comm.all_reduce(value)
assert dict(os.environ) == before
with open(f"{sys.argv[2]}/rank{world.rank}", "w") as file:
    file.write(f"{value.item()} {world.size} {world.source} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
comm.destroy_process_group()
"""


def torchrun(folder, mode, *options):
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    command += [str(folder / "script.py"), mode, str(folder)]
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1", MIZZEN_TIMEOUT="1")
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return [(folder / f"rank{rank}").read_text() for rank in range(2)]


@pytest.mark.wide  # the test below is this and a restart
def test_under_torchrun(tmp_path):
    assert torchrun(tmp_path, "live", "--standalone") == ["3.0 2 torchrun 0"] * 2


@pytest.mark.wide
def test_restarted_by_torchrun_the_dead_are_not_called(tmp_path):
    # The agent keeps one store for all attempts; with torch's own rendezvous most such restarts fail.
    assert torchrun(tmp_path, "die", "--standalone", "--max-restarts", "1") == ["3.0 2 torchrun 1"] * 2


def test_a_store_listens_where_it_is_meant_to():
    store = open_store(World(0, 1, master_addr="127.0.0.1", master_port=0), timedelta(seconds=10), hosting=True)
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.2", store.port))
