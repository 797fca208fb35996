"""`mizzen ssh`: run a command on all hosts of a hostfile."""

import argparse
import shlex
from pathlib import Path

from mizzen.cli.parser import Parser, examples, split_off
from mizzen.errors import UsageError
from mizzen.launcher.backends import RemoteOptions, split_words
from mizzen.launcher.hosts import parse_hostfile, select
from mizzen.launcher.launch import HOSTFILE
from mizzen.launcher.start import read_hostfile, run_everywhere

VALUED = ("-f", "-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--ssh_port", "--launcher_args")


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    parser.usage = "mizzen ssh [options] COMMAND ..."
    parser.description = (
        "Run a command on all hosts of a hostfile at once. One word is a line for the shell there; several words\n"
        "arrive as they are. Each line of output has its host before it; the exit code is the largest."
    )
    parser.epilog = examples("mizzen ssh -f hosts nvidia-smi", "mizzen ssh 'df -h /data | tail -n 1'")
    parser.add_argument("-f", "-H", "--hostfile", default=HOSTFILE, metavar="FILE", help=f"(default: {HOSTFILE})")
    parser.add_argument("-i", "--include", default="", metavar="FILTER", help="only these hosts: host@host")
    parser.add_argument("-e", "--exclude", default="", metavar="FILTER", help="all but these")
    parser.add_argument("--ssh_port", type=int, metavar="PORT", help="the port of sshd on the hosts")
    parser.add_argument("--launcher_args", default="", metavar="WORDS", help="more words for ssh")
    parser.split = lambda words: split_off(words, VALUED)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it everywhere; the largest exit code."""
    if not arguments.rest:
        raise UsageError("nothing to run: name a command, as in mizzen ssh hostname")
    path = Path(arguments.hostfile)
    text = read_hostfile(path)
    if text is None:
        raise UsageError(f"--hostfile {path}: there is no such file")
    hosts = select(parse_hostfile(text, str(path)), arguments.include, arguments.exclude)
    line = arguments.rest[0] if len(arguments.rest) == 1 else shlex.join(arguments.rest)
    way = RemoteOptions(split_words(arguments.launcher_args), arguments.ssh_port)
    return run_everywhere(hosts, line, way)
