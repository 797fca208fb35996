"""Who this process is, from every launcher's variables, and what is said when they do not add up."""

import json

import pytest

from mizzen.comm import discover
from mizzen.comm.discover import Mpi, find_world, with_store_address
from mizzen.environment import World
from mizzen.errors import CommError, ConfigError, MissingExtra

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
AZUREML = OPENMPI | {"AZUREML_EXPERIMENT_ID": "x"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NODELIST": "gpu[07-10]"
}  # fmt: skip


def where(env, port=29500):
    world = with_store_address(find_world(env), env, port)
    return world.rank, world.size, world.local_rank, world.local_size, world.master_addr, world.master_port


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (TORCHRUN, (3, 8, 1, 2, "node0", 1234)),
        (SLURM, (3, 8, 1, 2, "gpu07", 29500)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "77"}, (3, 8, 1, 2, "head", 77)),
        (OPENMPI, (3, 8, 1, 2, None, 29500)),
        (MPICH, (3, 8, 1, 2, None, 29500)),
        (OPENMPI | {"MASTER_ADDR": "head"}, (3, 8, 1, 2, "head", 29500)),
        (AZUREML | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:9000"}, (3, 8, 1, 2, "10.0.0.4", 6105)),
        (AZUREML | {"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, (3, 8, 1, 2, "10.0.0.5", 54965)),
        (OPENMPI | {"SM_TRAINING_ENV": json.dumps({"master_hostname": "algo-2"})}, (3, 8, 1, 2, "algo-2", 29500)),
        (OPENMPI | {"SM_TRAINING_ENV": "{}", "SM_HOSTS": '["algo-2", "algo-1"]'}, (3, 8, 1, 2, "algo-1", 29500)),
        (OPENMPI | {"SM_TRAINING_ENV": "not json"}, (3, 8, 1, 2, None, 29500)),
        ({}, (0, 1, 0, 1, None, 29500)),
        ({"WORLD_SIZE": "1"}, (0, 1, 0, 1, None, 29500)),
    ],
)  # fmt: skip
def test_every_launcher(env, found):
    assert where(env) == found


def test_torchrun_wins_over_what_mpirun_left_in_the_environment():
    assert find_world(TORCHRUN | OPENMPI | SLURM).source == "torchrun"


def test_a_slurm_batch_script_without_srun_is_one_process():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-4]"}
    assert find_world(batch) == World()


def test_srun_with_pmi2_keeps_slurms_local_rank():
    world = find_world(SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"})
    assert (world.source, world.local_rank) == ("slurm", 1)


def test_mpirun_of_mpich_inside_an_allocation_is_mpich():
    # Hydra starts one proxy per host by srun, so that SLURM_PROCID is the host's number.
    world = find_world(SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"} | MPICH)
    assert (world.source, world.rank, world.size, world.local_rank) == ("mpich", 3, 8, 1)


def test_arguments_say_who_we_are():
    world = find_world({"MASTER_ADDR": "head", "MASTER_PORT": "99"}, rank=1, size=2)
    assert world == World(1, 2, 0, 1, "head", 99, "arguments")


def test_arguments_win_over_variables_that_speak_of_another_world():
    world = find_world(TORCHRUN | {"LOCAL_RANK": "5"}, rank=0, size=2)
    assert (world.rank, world.size, world.local_rank, world.master_addr, world.source) == (
        0,
        2,
        5,
        "node0",
        "arguments",
    )


def test_arguments_that_repeat_the_variables_keep_the_local_rank():
    world = find_world(OPENMPI, rank=3, size=8)
    assert (world.local_rank, world.local_size, world.source) == (1, 2, "arguments")


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ({"RANK": "2"}, {}, "RANK=2 is set, but not WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, {}, "WORLD_SIZE=4 is set, but not RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, {}, "rank 4 of 4: ranks are 0 to 3"),
        (OPENMPI, {"launchers": False}, "Open MPI says that this is rank 3 of 8, but auto_mpi_discovery is off"),
        ({}, {"rank": 2, "size": 2}, "rank=2 and world_size=2 were passed: pass both"),
        ({}, {"rank": 1}, "rank=1 and world_size=-1 were passed: pass both"),
        ({}, {"size": 2}, "rank=-1 and world_size=2 were passed: pass both"),
    ],
)
def test_contradictions_are_named(env, options, message):
    with pytest.raises(CommError) as error:
        find_world(env, **options)
    assert message in str(error.value)


def test_no_master_is_named():
    with pytest.raises(CommError, match="RANK=1 and WORLD_SIZE=2 are set, but not MASTER_ADDR"):
        where({"RANK": "1", "WORLD_SIZE": "2"})
    with pytest.raises(CommError, match="nothing says where the ranks meet: set MASTER_ADDR, or pass init_method"):
        with_store_address(find_world({}, rank=1, size=2), {}, 29500)


def test_launchers_of_one_rank_are_no_reason_to_refuse():
    assert find_world({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, launchers=False).size == 1


class Communicator:
    """Two ranks of MPI in one process: what rank 0 broadcasts is kept for rank 1."""

    sent = None

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Split_type(self, kind):
        return Communicator(0, 1)

    def Free(self):
        pass

    def allgather(self, value):
        return ["first-host", "second-host"]

    def bcast(self, value, root):
        if self.rank == root:
            Communicator.sent = value
        return Communicator.sent


class Library:
    COMM_TYPE_SHARED = 1

    def __init__(self, rank, size):
        self.COMM_WORLD = Communicator(rank, size)

    def get_vendor(self):
        return "Other MPI", (4, 1, 0)


def world_of(rank):
    return World(rank=rank, size=2, local_rank=rank, local_size=2, source="openmpi")


def test_mpi_knows_better_who_shares_a_host(monkeypatch):
    monkeypatch.setattr(discover.importlib, "import_module", lambda name: Library(1, 2))
    world = Mpi.connect(world_of(1)).world
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 0, 1)


def test_an_mpi4py_of_another_mpi_is_told_from_a_job_of_one_rank(monkeypatch):
    monkeypatch.setattr(discover.importlib, "import_module", lambda name: Library(0, 1))
    with pytest.raises(CommError, match=r"started 2 ranks, but mpi4py, which is built for Other MPI, sees 1"):
        Mpi.connect(world_of(1))


def test_no_mpi4py_names_the_extra(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")

    monkeypatch.setattr(discover.importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=r"a job of 2 ranks started by mpirun needs 'mpi4py'.*mizzen\[mpi\]"):
        Mpi.connect(world_of(1))


def test_an_mpi4py_that_does_not_load_is_not_called_absent(monkeypatch):
    def broken(name):
        raise ImportError("libmpi.so.12: cannot open shared object file")

    monkeypatch.setattr(discover.importlib, "import_module", broken)
    with pytest.raises(CommError, match=r"mpi4py is installed, but does not load: libmpi\.so\.12"):
        Mpi.connect(world_of(1))


def test_rank_0_opens_the_meeting_and_all_learn_of_it():
    asked = []

    def open_here(world, hosts):
        asked.append((world.rank, hosts))
        return "10.0.0.1", 4711

    for rank in (0, 1):
        world = Mpi(Communicator(rank, 2), world_of(rank)).agree(open_here, "host")
        assert (world.rank, world.master_addr, world.master_port) == (rank, "10.0.0.1", 4711)
    assert asked == [(0, ("first-host", "second-host"))]


@pytest.mark.parametrize("error", [CommError("no port is free"), ConfigError("MIZZEN_TIMEOUT", "no port is free")])
def test_if_rank_0_cannot_open_it_nobody_waits(error):
    def open_here(world, hosts):
        raise error

    for rank in (0, 1):
        with pytest.raises(type(error), match="no port is free"):
            Mpi(Communicator(rank, 2), world_of(rank)).agree(open_here, "host")
