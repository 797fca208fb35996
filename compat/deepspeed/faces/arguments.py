"""What launchers and schedules read from a command line."""

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deepspeed.faces.errors import also
from mizzen.errors import UsageError
from mizzen.launcher.launch import HOSTFILE
from mizzen.optim.schedules import FLAGS, SCHEDULES, VALID_LR_SCHEDULES, add_tuning_arguments

DEEPSPEED_ENVIRONMENT_PATHS: Final = [str(Path.home()), "."]
"""Where a file of variables for the ranks is looked for."""
VALUED: Final[dict[str, tuple[type, Any]]] = {
    "-H --hostfile": (str, HOSTFILE),
    "-i --include": (str, ""),
    "-e --exclude": (str, ""),
    "--num_nodes": (int, -1),
    "--min_elastic_nodes": (int, -1),
    "--max_elastic_nodes": (int, -1),
    "--num_gpus --num_accelerators": (int, -1),
    "--master_port": (int, 29500),
    "--master_addr": (str, ""),
    "--node_rank": (int, -1),
    "--launcher": (str, "pdsh"),
    "--launcher_args": (str, ""),
    "--enable_each_rank_log": (str, "None"),
    "--autotuning": (str, ""),
    "--bind_core_list": (str, None),
    "--ssh_port": (int, None),
    "--venv_script": (str, None),
    "--log_level": (str, "info"),
}
"""Options with a value, and what they are where nobody gives them."""
SWITCHES: Final = (
    *("--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid"),
    *("--elastic_training", "--bind_cores_to_rank", "-q --quiet"),
)


def parse_args(args: Sequence[str] | None = None) -> Namespace:
    """The words of the launcher, under the names that programs read, with the script's own words apart."""
    parser = ArgumentParser(prog="deepspeed", description="Start a script on the devices of one or more hosts.")
    for words, (kind, default) in VALUED.items():
        parser.add_argument(*words.split(), type=kind, default=default)
    for words in SWITCHES:
        parser.add_argument(*words.split(), action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=REMAINDER)
    return parser.parse_args(args)


@also(RuntimeError)
def parse_num_nodes(str_num_nodes: str, elastic_training: bool) -> tuple[int, int]:
    """(least, most) nodes of `2` or, where nodes come and go, of `2:4`; -1 is no limit."""
    words = str_num_nodes.split(":")
    if len(words) > 2 or not all(word.isdigit() for word in words):
        raise UsageError(f"{str_num_nodes!r} is no number of nodes: give one, or least:most")
    if len(words) == 2 and not elastic_training:
        raise UsageError(f"{str_num_nodes!r}: a range of nodes is for --elastic_training; give one number")
    return int(words[0]), int(words[1]) if len(words) == 2 else -1


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """(host, slots) of `host:0,2`; no slots are all of them."""
    host, colon, slots = node_config.partition(":")
    if not colon:
        return host, []
    if not all(slot.isdigit() for slot in slots.split(",")):
        raise UsageError(f"{node_config!r}: slots are numbers with commas between them, as in host:0,2")
    return host, [int(slot) for slot in slots.split(",")]


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """Host -> slots of `host:0,2@other`."""
    found: dict[str, set[int]] = {}
    for each in node_config_list.split("@"):
        host, slots = parse_node_config(each)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_arguments(args: Sequence[str] | None = None) -> tuple[Namespace, list[str]]:
    """(flags of schedules, all other words)."""
    return add_tuning_arguments(ArgumentParser()).parse_known_args(args)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """(the section `scheduler` that flags ask for, None), or (None, why there is none)."""
    name = vars(args).get("lr_schedule")
    if name is None:
        return None, "--lr_schedule is not on the command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is no known schedule"
    config: dict[str, Any] = {"type": name, "params": {}}
    override_params(args, config["params"], name)
    return config, None


def override_params(args: Any, params: dict[str, Any], name: str = "") -> None:
    """Put flags that were given into the arguments of a schedule: those of that name, or all."""
    known = {flag for flag, *_ in FLAGS}
    kinds = [kind for kind in SCHEDULES if not name or kind.__name__ == name]
    own = {field for kind in kinds for field in kind.__dataclass_fields__}
    given = {flag: value for flag, value in vars(args).items() if flag in known & own and value is not None}
    params.update(given)


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Those of LRRangeTest."""
    override_params(args, params, "LRRangeTest")


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Those of OneCycle."""
    override_params(args, params, "OneCycle")


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:  # noqa: N802
    """Those of WarmupLR."""
    override_params(args, params, "WarmupLR")


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """(the highest rate of a section `scheduler`, ""), or (None, why there is none)."""
    name, params = config.get("type"), config.get("params")
    if name is None or params is None:
        return None, f"the schedule has no {'type' if name is None else 'params'}"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is no known schedule"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    if name == "WarmupCosineLR" or key not in params:
        return None, f"the arguments of {name} hold no rate"
    return params[key], ""
