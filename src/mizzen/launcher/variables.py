"""Which environment variables go with a job: those with a known prefix, then those of the environment files. Pure.

The environment of this machine is an argument, and so is what the files hold.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from mizzen.errors import UsageError

PREFIXES: Final = ("NCCL", "PYTHON", "MLFLOW", "UCX", "MV2", "GLOO", "MIZZEN", "DS_ACCELERATOR", "TORCH_")
"""What a job on other machines takes along, beside what the accelerator names."""
OWN: Final = ("MIZZEN_PROGRESS", "MIZZEN_JOB", "MIZZEN_KEY", "MIZZEN_SECRET")
"""What one launch tells its own processes: it must not reach another job that is started inside."""
HERE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Which devices of this machine are shown, which says nothing about those of another."""
PLAIN: Final = ("NCCL", "PYTHON", "UCX", "MV2", "GLOO", "MIZZEN", "DS_ACCELERATOR", "TORCH_", "CUDA_", "OMP_", "LD_")
"""Names whose values are settings, so that they may be printed. Any other may be a password."""
KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FILES: Final = (".deepspeed_env", ".mizzen_env")


def exported(env: Mapping[str, str], prefixes: Iterable[str] = ()) -> dict[str, str]:
    """The variables that go along because of their names."""
    wanted = (*PREFIXES, *prefixes)
    return {key: value for key, value in env.items() if key.startswith(wanted) and key not in (*OWN, *HERE)}


def is_plain(name: str) -> bool:
    """Whether the value of a variable may be shown to whoever looks at the screen, or at a file for a scheduler."""
    return name.startswith(PLAIN) and name not in OWN


def parse_file(text: str, path: str) -> dict[str, str]:
    """`KEY=VALUE` lines; blank lines and lines that start with `#` are skipped, and a value is taken as it stands."""
    found: dict[str, str] = {}
    for number, whole in enumerate(text.split("\n"), 1):
        line = whole.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        key = key.strip().removeprefix("export ").strip()
        if not equals or not KEY.fullmatch(key):
            raise UsageError(f"{path}, line {number}: {line!r} is not KEY=VALUE")
        if "\0" in value:
            raise UsageError(f"{path}, line {number}: the value of {key} holds a zero byte, which no variable can")
        found[key] = value
    return found


def file_paths(env: Mapping[str, str], home: Path, here: Path) -> Iterator[Path]:
    """Where environment files may lie, in the order in which they are read: a later one wins."""
    other = env.get("DS_ENV_FILE")
    if other and ("/" in other or other.startswith("~")):
        yield Path(other.replace("~", str(home), 1) if other.startswith("~") else other)
        return
    for name in (other,) if other else FILES:
        yield home / name
        if here != home:
            yield here / name


def with_interface(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo and NCCL learn of the interface that MIZZEN_INTERFACE names."""
    interface = variables.get("MIZZEN_INTERFACE")
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    return {**own, **variables}
