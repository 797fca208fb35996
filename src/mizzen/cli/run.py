"""`mizzen run`: start a job on this machine or on many. Parsing only; `launcher/` decides and does."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from mizzen.cli.parser import Parser, count, examples, split_off, whole, write
from mizzen.environment import environ
from mizzen.launcher.backends import NAMES
from mizzen.launcher.describe import describe, emit_k8s, emit_slurm
from mizzen.launcher.launch import HOSTFILE, LaunchOptions, plan_launch
from mizzen.launcher.start import execute, inspect_machine
from mizzen.log import LEVELS


@dataclass(frozen=True, slots=True)
class Flag:
    """One option; its first name with `_` for `-` is the field of `LaunchOptions` that it fills."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    type: Any = str
    choices: tuple[str, ...] | None = None


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 65_536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: ports are 1 to 65535")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _backend(text: str) -> str:
    if text.lower() not in NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; known: {', '.join(NAMES)}")
    return text.lower()


GROUPS: Final = (
    (
        "where",
        (
            Flag(("-H", "--hostfile"), f"lines of `name slots=N` (default: {HOSTFILE}, else this machine)", "FILE"),
            Flag(("-i", "--include"), "use only these: host[:slot,slot]@host", "FILTER"),
            Flag(("-e", "--exclude"), "use all but these", "FILTER"),
            Flag(("--num_nodes",), "use the first N hosts", "N", count),
            Flag(("--num_gpus", "--num_accelerators"), "ranks per host: devices 0 to N-1", "N", count),
        ),
    ),
    (
        "what",
        (
            Flag(("--module",), "run a module, as python -m does", type=bool),
            Flag(("--no_python",), "run a program that is no Python script", type=bool),
            Flag(("--no_local_rank",), "do not pass --local_rank=N to it", type=bool),
            Flag(("--drop-in",), "let `import deepspeed` find mizzen in this job", type=bool),
            Flag(("--venv_script",), "a file to source on each host first", "FILE"),
        ),
    ),
    (
        "how hosts are reached",
        (
            Flag(("--launcher",), f"{', '.join(NAMES)} (default: ssh)", "NAME", _backend),
            Flag(("--launcher_args",), "more words for that program, in one quoted string", "WORDS"),
            Flag(("--ssh_port",), "the port of sshd on the hosts", "PORT", _port),
            Flag(("--no_ssh_check",), "do not try the hosts first", type=bool),
            Flag(("--force_multi",), "go the way of many hosts for one host too", type=bool),
            Flag(("--no_ssh",), "run this node only; the same command is typed on each", type=bool),
            Flag(("--node_rank",), "which node this is, with --no_ssh", "N", whole),
            Flag(("--master_addr",), "where nodes meet (default: the first host)", "HOST"),
            Flag(("--master_port",), "and at which port (default: a free one; 29500 with --no_ssh)", "PORT", _port),
        ),
    ),
    (
        "supervision",
        (
            Flag(
                ("--max_restarts", "--max-restarts"), "failures after which ranks start again (default: 0)", "N", whole
            ),
            Flag(("--grace",), "seconds to save in when asked to stop (default: 120)", "S", _seconds),
            Flag(("--hang_timeout",), "seconds that a rank may wait; overrides the configuration", "S", _seconds),
            Flag(("--elastic_training",), "let nodes leave and join", type=bool),
            Flag(("--min_elastic_nodes",), "fewest nodes to go on with (default: 1)", "N", count),
            Flag(("--max_elastic_nodes",), "most nodes to use (default: all)", "N", count),
            Flag(("--bind_cores_to_rank",), "give each rank its own cores, with numactl", type=bool),
            Flag(("--bind_core_list",), "the cores to share out, as in 0-7,16-23", "LIST"),
        ),
    ),
    (
        "output",
        (
            Flag(("--show",), "ranks to show on the terminal: 0,3 or all or none (default: 0)", "RANKS"),
            Flag(("--enable_each_rank_log",), "keep each rank's output in this folder of its host", "FOLDER"),
            Flag(("--save_pid",), "note the launcher's number in a file of the temporary folder", type=bool),
            Flag(("--log_level",), "of the launcher (default: info)", choices=tuple(LEVELS)),
            Flag(("-q", "--quiet"), "the same as --log_level error", type=bool),
            Flag(("--dry-run",), "print what would run where, and stop", type=bool),
            Flag(("--emit",), "print the job as a file for a scheduler, and stop", choices=("slurm", "k8s")),
            Flag(("--autotuning",), "not built yet", choices=("tune", "run")),
        ),
    ),
)


def configure(parser: Parser) -> None:
    """Declare the arguments, in groups."""
    parser.usage = "mizzen run [options] script.py [arguments of the script]"
    parser.description = (
        "Start a script on every device of this machine, or of the hosts of a file; watch it, restart it, and end\n"
        "with its exit code. What follows the script's name is the script's own."
    )
    parser.epilog = examples(
        "mizzen run train.py --lr 0.1",
        "mizzen run --num_gpus 2 --max_restarts 3 train.py",
        "mizzen run --drop-in their_script.py --deepspeed_config config.json",
        "mizzen run --hostfile hosts --include node1:0,1@node2 train.py",
        "mizzen run --hostfile hosts --launcher slurm --dry-run train.py",
    )
    for title, flags in GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    parser.split = split
    parser.set_defaults(run=run)


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our own options, and the script with everything after it, whatever that looks like."""
    valued = {name for _, flags in GROUPS for flag in flags if flag.type is not bool for name in flag.names}
    return split_off(words, valued)


def _add(group: Any, flag: Flag) -> None:
    long = next(name for name in flag.names if name.startswith("--"))
    common: dict[str, Any] = {"dest": long[2:].replace("-", "_"), "help": flag.help, "default": argparse.SUPPRESS}
    if flag.type is bool:
        group.add_argument(*flag.names, action="store_true", **common)
    else:
        group.add_argument(*flag.names, metavar=flag.metavar, type=flag.type, choices=flag.choices, **common)


def run(arguments: argparse.Namespace) -> int:
    """Decide, then show or do."""
    options = options_of(arguments)
    launch = plan_launch(options, inspect_machine(options, environ()))
    if options.emit:
        write({"slurm": emit_slurm, "k8s": emit_k8s}[options.emit](launch.job, options))
        return 0
    if options.dry_run:
        write(describe(launch))
        return 0
    return execute(launch, environ())


def options_of(arguments: argparse.Namespace) -> LaunchOptions:
    """The words of the command line as a value."""
    known = {field.name for field in fields(LaunchOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in known}
    script, rest = (arguments.rest[0], arguments.rest[1:]) if arguments.rest else ("", ())
    return LaunchOptions(script=script, arguments=rest, **given)
