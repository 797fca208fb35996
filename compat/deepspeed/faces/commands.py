"""Console scripts and `python -m` programs: each is a command of mizzen, told in its words."""

import argparse
import base64
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from deepspeed.faces.errors import also
from mizzen.cli.main import main
from mizzen.cli.run import split
from mizzen.environment import environ
from mizzen.errors import MizzenError, UsageError
from mizzen.launcher.hosts import Host, Hosts, parse_hostfile, select
from mizzen.launcher.launch import HOSTFILE, LaunchOptions, LaunchPlan, LocalMachine, plan_launch
from mizzen.launcher.start import execute, inspect_machine

DEEPSPEED_ENVIRONMENT_NAME: Final = ".deepspeed_env"
DLTS_HOSTFILE: Final = HOSTFILE
PDSH_MAX_FAN_OUT: Final = 1024
NUMBERS: Final = ("num_nodes", "num_gpus", "num_accelerators", "node_rank", "min_elastic_nodes", "max_elastic_nodes")
NOTHING: Final = re.compile(rf"--(?:{'|'.join(NUMBERS)})[ =]-1(?= |$)")
"""Options that say nothing, by their -1."""


def deepspeed(args: Sequence[str] | None = None) -> int:
    """`mizzen run`."""
    words = _words(args)
    return main(["run", *_said(words)] if words else ["run", "--help"])


def ds_report(args: Sequence[str] | None = None) -> int:
    """`mizzen report`."""
    hidden = ("--hide_operator_status", "--hide_errors_and_warnings")
    return main(["report", *(word for word in _words(args) if word not in hidden)])


def ds_ssh(args: Sequence[str] | None = None) -> int:
    """`mizzen ssh`."""
    return main(["ssh", *_words(args)])


def ds_elastic(args: Sequence[str] | None = None) -> int:
    """`mizzen elastic`."""
    return main(["elastic", *_words(args)])


def ds_bench(args: Sequence[str] | None = None) -> int:
    """`mizzen bench comm`, on all devices of this machine unless this is a rank already."""
    words = ["bench", "comm", *_words(args)]
    if "RANK" in environ() or "--help" in words or "-h" in words:
        return main(words)
    return main(["run", "--no_local_rank", "--module", "mizzen.cli", *words])


def ds_io(args: Sequence[str] | None = None) -> int:
    """`mizzen bench io` with one setting."""
    from deepspeed.faces.nvme import io_words  # torch, which other commands do not need

    return main(io_words(_words(args)))


def ds_nvme_tune(args: Sequence[str] | None = None) -> int:
    """`mizzen bench io`, with the best settings in the words of `aio` at the end."""
    from deepspeed.faces.nvme import generate_main, parse_sweep_arguments, sweep_main

    given = parse_sweep_arguments(_words(args))
    try:
        sweep_main(given)
        generate_main(given.log_dir)
    except MizzenError as error:
        return _told(error)
    return 0


def parse_universal(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The words of `ds_to_universal`."""
    parser = argparse.ArgumentParser(prog="ds_to_universal")
    parser.add_argument("--input_folder", required=True)
    parser.add_argument("--output_folder", required=True)
    parser.add_argument("--num_extract_workers", type=int, default=4)
    parser.add_argument("--num_merge_workers", type=int, default=2)
    for flag in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(args)


@also(ValueError)
def convert_to_universal(args: Any = None) -> NoReturn:
    """Refuse: there is nothing to convert, and nobody may take the output for written."""
    folder = vars(args).get("output_folder") if args is not None and "__dict__" in dir(args) else None
    raise UsageError(
        f"{f'{folder} is not written: ' if folder else ''}there is nothing to convert. mizzen loads its checkpoints at "
        "any layout, under the tag that they were saved with; mizzen checkpoint import makes such a checkpoint out of "
        "folders of DeepSpeed"
    )


def ds_to_universal(args: Sequence[str] | None = None) -> int:
    """Say that there is nothing to convert."""
    try:
        convert_to_universal()
    except UsageError as error:
        return _told(error)


def launch(args: Sequence[str] | None = None) -> int:
    """`python -m deepspeed.launcher.launch`: the ranks of one node, of a job whose hosts are given as one word."""
    parser = argparse.ArgumentParser(prog="deepspeed.launcher.launch", allow_abbrev=False)
    parser.add_argument("--world_info", required=True)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    for flag in ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank", "--quiet", "-q"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--bind_core_list")
    parser.add_argument("--save_pid", type=int, default=0)
    parser.add_argument("--enable_each_rank_log", default="None")
    parser.add_argument("--log_level", default="info")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = vars(parser.parse_args(_words(args)))
    quiet = given.pop("q") or given.pop("quiet")
    try:
        hosts = decode_world_info(given.pop("world_info"))
        given |= {"arguments": tuple(given["arguments"]), "save_pid": bool(given["save_pid"]), "quiet": quiet}
        return execute(
            plan_launch_on(hosts, LaunchOptions(no_ssh=True, **given), inspect_machine(LaunchOptions(), environ())),
            environ(),
        )
    except MizzenError as error:
        return _told(error)


def plan_launch_on(hosts: Mapping[str, Sequence[int]], options: LaunchOptions, machine: LocalMachine) -> LaunchPlan:
    """The launch of a job on these slots of these hosts."""
    filters = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in hosts.items())
    lines = "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in _hosts(hosts))
    return plan_launch(replace(options, include=filters, hostfile="--world_info"), replace(machine, hostfile=lines))


def _hosts(given: Mapping[str, Sequence[int]]) -> Hosts:
    """Hosts with the slots that they were given."""
    if idle := [name for name, slots in given.items() if not slots]:
        raise UsageError(f"a host without slots has no part in a job: leave {', '.join(idle)} out")
    if not given:
        raise UsageError("a job needs a host with at least one slot; none was given")
    return tuple(Host(name, tuple(slots)) for name, slots in given.items())


def decode_world_info(word: str) -> dict[str, list[int]]:
    """Host -> slots, from one word."""
    try:
        found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(word))
        return {name: slots if isinstance(slots, list) else list(range(int(slots))) for name, slots in found.items()}
    except ValueError as error:
        raise UsageError(f"--world_info {word[:60]!r} is no base64 of JSON: {error}") from error


def encode_world_info(world_info: dict[str, Any]) -> str:
    """Host -> slots, as one word."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host -> number of slots, from a file; None where there is none."""
    try:
        with open(hostfile_path, encoding="utf8") as file:
            return {host.name: len(host.slots) for host in parse_hostfile(file.read(), hostfile_path)}
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hostfile {hostfile_path} cannot be read: {error}") from error


def parse_resource_filter(
    host_info: dict[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Host -> slots that a filter leaves."""
    return {host.name: list(host.slots) for host in select(_hosts(host_info), include_str, exclude_str)}


def parse_inclusion_exclusion(resource_pool: dict[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Host -> slots that a filter leaves, from numbers of slots."""
    pool = {name: list(range(count)) for name, count in resource_pool.items()}
    return parse_resource_filter(pool, inclusion, exclusion)


def _words(args: Iterable[str] | None) -> list[str]:
    return list(sys.argv[1:] if args is None else args)


def _said(words: list[str]) -> list[str]:
    """Without the options that say nothing, in our part of the words; what the script gets is its own."""
    own, rest = map(list, split(words))
    for place in reversed(range(len(own))):
        if NOTHING.fullmatch(own[place]):
            del own[place]
        elif NOTHING.fullmatch(" ".join(own[place : place + 2])):
            del own[place : place + 2]
    return [*own, *rest]


def _told(error: MizzenError) -> int:
    sys.stderr.write(f"mizzen: error: {error}\n")
    return 2
