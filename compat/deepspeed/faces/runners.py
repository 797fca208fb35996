"""Runners of jobs on several hosts: each is a back end of mizzen's launcher, asked for its command."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from deepspeed.faces.commands import plan_launch_on
from mizzen.errors import LaunchError
from mizzen.launcher.backends import RemoteCommand, find_backend
from mizzen.launcher.launch import LaunchOptions, LaunchPlan
from mizzen.launcher.start import inspect_machine

PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER = "pdsh", "openmpi", "mpich"
IMPI_LAUNCHER, SLURM_LAUNCHER, MVAPICH_LAUNCHER = "impi", "slurm", "mvapich"
FLAGS: Final = (
    *("launcher_args", "master_addr", "master_port", "ssh_port", "venv_script", "enable_each_rank_log", "log_level"),
    *("module", "no_python", "no_local_rank", "save_pid", "bind_cores_to_rank", "bind_core_list", "quiet"),
)
"""What a runner reads of its arguments; hosts and slots are chosen when it is asked for a command."""


class MultiNodeRunner:
    """One way to reach hosts. A subclass names a back end of mizzen's, or makes a command of its own."""

    launcher = ""

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Any = None) -> None:
        self.args, self.world_info_base64, self.resource_pool = args, world_info_base64, resource_pool
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.exports: dict[str, str] = {}

    @property
    def name(self) -> str:
        """What `--launcher` calls it."""
        return self.launcher or type(self).__name__

    def backend_exists(self) -> bool:
        """Whether its program is installed here."""
        return any(map(shutil.which, find_backend(self.name).requirements.programs))

    def validate_args(self) -> None:
        """Nothing: what does not fit is told when a command is made."""

    def parse_user_args(self) -> list[str]:
        """The words of the user's own program: they travel as they are."""
        return list(self.args.user_args)

    def add_export(self, key: str, var: str) -> None:
        """Give a variable to all ranks."""
        self.exports[key.strip()] = var.strip()

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Sequence[int]]) -> Any:
        """The words of the command; what it needs beside them is put into the environment."""
        launch = self._launch(environment, active_resources)
        (command,) = find_backend(self.name).commands(launch.job, launch.remote)
        return _words(command, environment)

    def _launch(self, environment: dict[str, str], active_resources: Mapping[str, Sequence[int]]) -> LaunchPlan:
        given = {name: value for name in FLAGS if (value := vars(self.args).get(name)) not in (None, "", "None")}
        own = {"script": self.user_script, "arguments": tuple(self.user_arguments), "launcher": self.name}
        options = LaunchOptions(**{**given, **own, "force_multi": True})
        machine = inspect_machine(LaunchOptions(), environment)
        exports = "".join(f"{key}={value}\n" for key, value in self.exports.items())
        return plan_launch_on(
            active_resources, options, replace(machine, files=(*machine.files, ("add_export", exports)))
        )


class PDSHRunner(MultiNodeRunner):
    """One pdsh for all hosts."""

    launcher = PDSH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Sequence[int]]) -> Any:
        """Refuse: what a job holds is no argument that everybody on a host could read, and pdsh passes no input on."""
        raise LaunchError(
            "no command of pdsh alone starts a job: its variables and its secret go to the hosts by ssh first. Start "
            "it with `mizzen run --launcher pdsh`, or take the runner of MPI or Slurm"
        )


class OpenMPIRunner(MultiNodeRunner):
    """Open MPI's mpirun."""

    launcher = OPENMPI_LAUNCHER


class MPICHRunner(MultiNodeRunner):
    """MPICH's mpirun."""

    launcher = MPICH_LAUNCHER


class IMPIRunner(MultiNodeRunner):
    """Intel's mpirun."""

    launcher = IMPI_LAUNCHER


class MVAPICHRunner(MultiNodeRunner):
    """MVAPICH's mpirun."""

    launcher = MVAPICH_LAUNCHER


class SlurmRunner(MultiNodeRunner):
    """srun."""

    launcher = SLURM_LAUNCHER


def _words(command: RemoteCommand, environment: dict[str, str]) -> list[str]:
    environment.update(command.environment)
    return list(command.words)
