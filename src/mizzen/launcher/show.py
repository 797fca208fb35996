"""What a launch would do, in words for a person: what each rank runs where, and the exact commands. Pure."""

import shlex
from collections.abc import Iterator

from mizzen.launcher.arrange import Launch
from mizzen.launcher.backends import VARIABLE, Command, interpreter
from mizzen.launcher.variables import is_plain


def describe(launch: Launch) -> str:
    """Both forms: what is meant, and what is typed."""
    return "\n".join(_lines(launch))


def _lines(launch: Launch) -> Iterator[str]:
    job = launch.job
    world = sum(len(host.slots) for host in job.hosts)
    yield f"{world} ranks on {len(job.hosts)} host{'s' * (len(job.hosts) > 1)}, in {job.folder}"
    first = 0
    for host in job.hosts:
        last = first + len(host.slots) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        yield f"  {host.name or '(named by Slurm)'}: {ranks}, devices {_slots(host.slots)}"
        first = last + 1
    bound = ["numactl", "-C", "CORES"] if job.care.cores is not None else []
    yield f"each rank runs:\n  {shlex.join([*bound, *job.program.words(job.python, 0)])}"
    if bound:
        given = f"cores {_slots(job.care.cores)}" if job.care.cores else "all cores"
        yield f"where CORES are its share of {given} of its host; `-m` follows where all of them are near one memory"
    if job.drop_in:
        yield "which finds the drop-in before whatever is installed"
    if job.environment:
        yield "with:"
        for name, value in sorted(job.environment.items()):
            yield f"  {name}={shlex.quote(value)}" if is_plain(name) else f"  {name} (its value is not shown)"
    yield "started by:"
    yield from (f"  {line}" for line in _typed(launch))
    yield "The job, with all arguments and values, is no argument of these: others could read it."


def _slots(slots: tuple[int, ...]) -> str:
    return ",".join(map(str, slots))


def _typed(launch: Launch) -> Iterator[str]:
    if launch.backend is None:
        yield shlex.join((*interpreter(launch.job, launch.way), "--node", str(launch.node), "@FILE"))
        return
    for command in launch.backend.commands(launch.job, launch.way):
        yield _line(command)


def _line(command: Command) -> str:
    shown = {name: "JOB" if name == VARIABLE else shlex.quote(value) for name, value in command.environment.items()}
    variables = [f"{name}={value}" for name, value in shown.items()]
    return " ".join([*variables, shlex.join(command.words)])
