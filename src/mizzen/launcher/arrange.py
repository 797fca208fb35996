"""From what was asked, and what this machine is like, to a job: every decision about a launch is made here. Pure."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from mizzen.errors import UsageError
from mizzen.launcher.backends import Backend, Way, find_backend, split_words
from mizzen.launcher.cores import check_affinity, parse_cores
from mizzen.launcher.devices import Devices
from mizzen.launcher.hosts import LOCAL, Host, Hosts, in_allocation, is_number, limit, parse_hostfile, select, visible
from mizzen.launcher.job import Care, Job, Program
from mizzen.launcher.variables import exported, parse_file, with_interface

HOSTFILE: Final = "/job/hostfile"
PORT: Final = 29500
"""Where nodes meet that are started one by one, and so can be told of no other."""
PORTS: Final = range(20_000, 30_000)
"""Where nodes of one launch meet; below the ports that systems give out by themselves."""
RESTARTS: Final = 100
"""Of an elastic job, where nothing is said."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user has said, one field per flag."""

    script: str = ""
    arguments: tuple[str, ...] = ()
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    min_elastic_nodes: int | None = None
    max_elastic_nodes: int | None = None
    elastic_training: bool = False
    master_addr: str = ""
    master_port: int | None = None
    node_rank: int | None = None
    launcher: str = "ssh"
    launcher_args: str = ""
    module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    drop_in: bool = False
    no_ssh: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    save_pid: bool = False
    enable_each_rank_log: str | None = None
    show: str = "0"
    bind_cores_to_rank: bool = False
    bind_core_list: str | None = None
    ssh_port: int | None = None
    venv_script: str = ""
    max_restarts: int | None = None
    grace: float = 120.0
    hang_timeout: float | None = None
    log_level: str = "info"
    quiet: bool = False
    autotuning: str | None = None
    dry_run: bool = False
    emit: Literal["slurm", "k8s"] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of this machine."""

    id: str
    folder: str
    python: str
    env: Mapping[str, str] = field(default_factory=dict)
    hostfile: str | None = None
    """What the hostfile holds; None where there is none."""
    files: tuple[tuple[str, str], ...] = ()
    """Path and content of the environment files, in the order in which they count."""
    devices: Devices | None = None
    count: Callable[[], int] = lambda: 1
    """How many devices this machine has. It may have to ask torch, so it is called only where it matters."""
    is_here: Callable[[str], bool] = lambda name: name == LOCAL
    """Whether a name means this machine."""
    address: Callable[[str], str] = lambda name: name
    """A host's address as others know it."""
    is_root: bool = False
    pid_file: str | None = None
    """Where --save_pid writes."""
    secret: str = field(default="", repr=False)
    """One that is fresh, for a job that is started from here."""
    common_secret: Callable[[Mapping[str, str]], str] = lambda env: ""
    """One that other nodes have, too; it may lie in a file, or be in this environment."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A job and the way to start it."""

    job: Job
    way: Way = Way()
    backend: Backend | None = None
    """None runs the supervisor here."""
    node: int = 0
    """The place of this machine, where it runs one supervisor of several itself."""
    checks_ssh: bool = False
    has_fixed_port: bool = False
    """Whether the user has named the meeting port, so that no other may be tried."""
    pid_file: str | None = None


def arrange(asked: Asked, facts: Facts) -> Launch:
    """Decide everything, or say what does not fit."""
    _refuse(asked)
    environment = _variables(asked, facts)
    hosts = _hosts(asked, facts)
    is_many = len(hosts) > 1 or asked.force_multi or (asked.no_ssh and (asked.max_elastic_nodes or 1) > 1)
    is_remote = not asked.no_ssh and (is_many or not _is_local(hosts[0], facts))
    if is_remote:
        environment = {**exported(facts.env, facts.devices.prefixes if facts.devices else ()), **environment}
        environment["PYTHONPATH"] = ":".join(filter(None, (facts.folder, environment.get("PYTHONPATH", ""))))
    elif asked.venv_script and not asked.emit:
        raise UsageError(
            f"--venv_script {asked.venv_script} is for hosts that are reached from here, and this job starts on this "
            f"machine alone: source the file before, as in . {asked.venv_script} && mizzen run ..."
        )
    backend = find_backend(asked.launcher) if is_remote else None
    if backend is not None:
        _refuse_hosts(backend, hosts)
    is_alone = asked.no_ssh and is_many and not (asked.dry_run or asked.emit)
    secret = facts.common_secret({**facts.env, **environment}) if is_alone else facts.secret
    environment.pop("MIZZEN_SECRET", None)
    least, most = _range(asked, len(hosts))
    master, port = _master(asked, facts, hosts) if is_many else "", _port(asked, facts, is_many)
    job = Job(
        # Nodes that are started one by one know nothing of each other but where they meet.
        id=f"{zlib.crc32(f'{master}:{port}'.encode()):08x}" if asked.no_ssh and is_many else facts.id,
        program=_program(asked),
        hosts=hosts,
        folder=facts.folder,
        python=facts.python,
        environment=with_interface(environment),
        master_addr=master,
        master_port=port,
        min_nodes=least,
        max_nodes=most,
        care=_care(asked, facts),
        secret=secret,
        drop_in=asked.drop_in,
        lifeline=backend is not None and backend.name in ("ssh", "pdsh"),
        is_followed=backend is not None,
    )
    way = Way(
        arguments=split_words(asked.launcher_args),
        ssh_port=asked.ssh_port,
        venv_script=asked.venv_script,
        is_root=facts.is_root,
        environment=facts.env,
    )
    # The built-in ssh says by itself which host it could not reach, pdsh is brought its job by ssh, Slurm needs none.
    checks = is_remote and not asked.no_ssh_check and asked.launcher.lower() not in ("ssh", "pdsh", "slurm")
    return Launch(
        job,
        way,
        backend,
        node=_node(asked, len(hosts)),
        checks_ssh=checks,
        has_fixed_port=asked.master_port is not None or asked.no_ssh,
        pid_file=facts.pid_file if asked.save_pid else None,
    )


def again(launch: Launch, attempt: int) -> Launch:
    """The same launch with another meeting port, for when the first was taken."""
    port = PORTS[zlib.crc32(f"{launch.job.id}/{attempt}".encode()) % len(PORTS)]
    return replace(launch, job=replace(launch.job, master_port=port))


def _refuse(asked: Asked) -> None:
    filters = [f"--{name}" for name, value in (("include", asked.include), ("exclude", asked.exclude)) if value]
    numbers = (("num_nodes", asked.num_nodes), ("num_gpus", asked.num_gpus))
    counts = [f"--{name}" for name, value in numbers if value is not None]
    if asked.launcher.lower() == "slurm" and asked.hostfile is None:
        counts = [name for name in counts if name != "--num_gpus"]  # it says what a node has, where no file does
    rows = (
        (asked.autotuning, f"--autotuning {asked.autotuning}: tuning is not built yet; leave it out"),
        (not asked.script, "nothing to run: name a script, as in mizzen run train.py"),
        (
            asked.module and asked.no_python,
            "--module and --no_python together: a module needs Python; leave one of them out",
        ),
        (
            filters and counts,
            f"{' and '.join(filters)} with {' and '.join(counts)}: filters and counts both choose; use one",
        ),
        (
            asked.node_rank is not None and not asked.no_ssh,
            "--node_rank goes with --no_ssh: otherwise hosts are counted",
        ),
        (asked.bind_core_list and not asked.bind_cores_to_rank, "--bind_core_list goes with --bind_cores_to_rank"),
    )
    for is_wrong, message in rows:
        if is_wrong:
            raise UsageError(message)


def _refuse_hosts(backend: Backend, hosts: Hosts) -> None:
    for host in hosts:
        if host.user and not backend.needs.takes_users:
            raise UsageError(
                f"--launcher {backend.name} logs in as one user everywhere, and the hostfile says {host.login}: write "
                "`User` into ~/.ssh/config, or use --launcher ssh"
            )
        if host.is_ipv6 and not backend.needs.takes_ipv6:
            raise UsageError(
                f"--launcher {backend.name} takes no IPv6 address for a host, and the hostfile has {host.name}: give "
                "it a name in ~/.ssh/config or /etc/hosts, or use --launcher ssh"
            )


def _variables(asked: Asked, facts: Facts) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, text in facts.files:
        found |= parse_file(text, path)
    if asked.bind_cores_to_rank:
        check_affinity({**facts.env, **found})
    if "MIZZEN_INTERFACE" in facts.env:
        found.setdefault("MIZZEN_INTERFACE", facts.env["MIZZEN_INTERFACE"])
    return found


def _hosts(asked: Asked, facts: Facts) -> Hosts:
    if facts.hostfile is not None:
        hosts = parse_hostfile(facts.hostfile, asked.hostfile or HOSTFILE)
        return limit(select(hosts, asked.include, asked.exclude), asked.num_nodes, asked.num_gpus)
    if asked.launcher.lower() == "slurm":
        return _slurm_hosts(asked, facts)
    if (asked.no_ssh or asked.emit) and asked.num_nodes:
        slots = _here(asked, facts).slots
        return tuple(Host(f"node{number}", slots) for number in range(asked.num_nodes))
    if (asked.num_nodes or 1) > 1:
        raise UsageError(
            f"--num_nodes {asked.num_nodes}, but {asked.hostfile or HOSTFILE} does not exist: name the hosts with "
            "--hostfile, or start each node by itself with --no_ssh --node_rank"
        )
    return select((_here(asked, facts),), asked.include, asked.exclude)


def _here(asked: Asked, facts: Facts) -> Host:
    """This machine: the devices that are visible, or so many as were asked for."""
    kind = facts.devices
    if asked.num_gpus is not None and (kind is None or asked.emit):
        return Host(LOCAL, tuple(range(asked.num_gpus)))
    shown = facts.env.get(kind.variable) if kind else None
    if kind is not None and shown is not None:
        slots = visible(kind.variable, shown)
        if asked.num_gpus is not None and asked.num_gpus > len(slots):
            raise UsageError(f"--num_gpus {asked.num_gpus}: {kind.variable}={shown} shows {len(slots)}")
        return Host(LOCAL, slots[: asked.num_gpus])
    count = facts.count()
    if asked.num_gpus is not None and asked.num_gpus > count:
        raise UsageError(f"--num_gpus {asked.num_gpus}: this machine has {count}")
    return Host(LOCAL, tuple(range(count))[: asked.num_gpus])


def _slurm_hosts(asked: Asked, facts: Facts) -> Hosts:
    """The hosts of the allocation we are in; outside of one, so many as were asked for, whose names Slurm will know."""
    given = facts.env.get("SLURM_GPUS_ON_NODE", "")
    each = asked.num_gpus or (int(given) if given.isdigit() and int(given) else None)
    if each is None:
        raise UsageError("--launcher slurm without a hostfile: say with --num_gpus how many ranks each node runs")
    names = in_allocation(facts.env) or ("",) * (asked.num_nodes or 1)
    hosts = tuple(Host(name, tuple(range(each))) for name in names)
    if not names[0] and (asked.include or asked.exclude):
        raise UsageError("--include and --exclude need names: run inside an allocation, or give a hostfile")
    return limit(select(hosts, asked.include, asked.exclude), asked.num_nodes)


def _is_local(host: Host, facts: Facts) -> bool:
    return bool(host.name) and not host.user and (host.name == LOCAL or facts.is_here(host.name))


def _range(asked: Asked, nodes: int) -> tuple[int, int]:
    least, most = asked.min_elastic_nodes, asked.max_elastic_nodes
    if not asked.elastic_training and least is None and most is None:
        return nodes, nodes
    least, most = least or 1, most or nodes
    if not 1 <= least <= most:
        raise UsageError(
            f"--min_elastic_nodes {least} and --max_elastic_nodes {most}: the first is at least 1 and not above"
        )
    if most > nodes and not asked.no_ssh:
        raise UsageError(f"--max_elastic_nodes {most}: there are {nodes} hosts")
    return least, most


def _master(asked: Asked, facts: Facts, hosts: Hosts) -> str:
    if asked.master_addr or asked.emit:
        return asked.master_addr  # a scheduler chooses the hosts, so only its file can tell
    if asked.no_ssh and facts.hostfile is None:
        if len(hosts) == 1 and (asked.max_elastic_nodes or 1) == 1:
            return "127.0.0.1"
        raise UsageError("--no_ssh: say with --master_addr where the first node is")
    if hosts[0].name == LOCAL and len(hosts) > 1:
        raise UsageError(
            "the first host is 'localhost', which means another machine on each: name it as others know it"
        )
    return facts.address(hosts[0].name) if hosts[0].name else ""


def _port(asked: Asked, facts: Facts, is_many: bool) -> int:
    if asked.master_port is not None:
        return asked.master_port
    if asked.no_ssh and is_many:
        return PORT
    return PORTS[zlib.crc32(facts.id.encode()) % len(PORTS)] if is_many else 0


def _node(asked: Asked, nodes: int) -> int:
    if not asked.no_ssh:
        return 0
    nodes = max(nodes, asked.max_elastic_nodes or 0)
    if asked.node_rank is None and nodes > 1:
        raise UsageError("--no_ssh: say with --node_rank which node this is, 0 for the first")
    rank = asked.node_rank or 0
    if not 0 <= rank < nodes:
        raise UsageError(f"--node_rank {rank}: the nodes are 0 to {nodes - 1}")
    return rank


def _program(asked: Asked) -> Program:
    kind: Literal["script", "module", "executable"] = (
        "module" if asked.module else "executable" if asked.no_python else "script"
    )
    return Program(kind, asked.script, asked.arguments, not asked.no_local_rank)


def _care(asked: Asked, facts: Facts) -> Care:
    is_elastic = asked.elastic_training or asked.min_elastic_nodes is not None or asked.max_elastic_nodes is not None
    restarts = asked.max_restarts if asked.max_restarts is not None else RESTARTS if is_elastic else 0
    cores = parse_cores(asked.bind_core_list) if asked.bind_core_list else ()
    logs = asked.enable_each_rank_log
    return Care(
        max_restarts=restarts,
        grace=asked.grace,
        hang_timeout=asked.hang_timeout,
        shown=_shown(asked.show),
        logs=None if logs in (None, "None") else logs,
        level="error" if asked.quiet else asked.log_level,
        cores=cores if asked.bind_cores_to_rank else None,
    )


def _shown(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",") if word.strip() and text != "none"]
    if not all(map(is_number, words)):
        raise UsageError(f"--show {text!r}: write ranks as in 0,3, or all, or none")
    return tuple(int(word) for word in words)
