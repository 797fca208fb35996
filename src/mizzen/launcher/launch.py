"""From the options of the command line, and what this machine is like, to a job: every decision of a launch. Pure."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from mizzen.errors import UsageError
from mizzen.launcher.backends import LaunchBackend, RemoteOptions, find_backend, split_words
from mizzen.launcher.hosts import (
    LOCAL,
    DeviceKind,
    Host,
    Hosts,
    check_affinity,
    in_allocation,
    is_number,
    limit,
    parse_cores,
    parse_hostfile,
    select,
    visible,
)
from mizzen.launcher.job import Job, Kind, Program, Supervision, exported, parse_file, with_interface

HOSTFILE: Final = "/job/hostfile"
PORT: Final = 29500
"""Where nodes meet that are started one by one, and so can be told of no other."""
PORTS: Final = range(20_000, 30_000)
"""Where nodes of one launch meet; below the ports that systems give out by themselves."""
RESTARTS: Final = 100
"""Of an elastic job, where nothing is said."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
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
class LocalMachine:
    """What a launch depends on beside its options: this machine, its files and its environment."""

    id: str
    folder: str
    python: str
    env: Mapping[str, str] = field(default_factory=dict)
    hostfile: str | None = None
    """What the hostfile holds; None where there is none."""
    files: tuple[tuple[str, str], ...] = ()
    """Path and content of the environment files, in the order in which they count."""
    devices: DeviceKind | None = None
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
class LaunchPlan:
    """A job and how it is started."""

    job: Job
    remote: RemoteOptions = RemoteOptions()
    backend: LaunchBackend | None = None
    """None runs the supervisor here."""
    node: int = 0
    """The place of this machine, where it runs one supervisor of several itself."""
    checks_ssh: bool = False
    has_fixed_port: bool = False
    """Whether the user has named the rendezvous port, so that no other may be tried."""
    pid_file: str | None = None


def plan_launch(options: LaunchOptions, machine: LocalMachine) -> LaunchPlan:
    """Decide everything, or say what does not fit."""
    _refuse(options)
    environment = _variables(options, machine)
    hosts = _hosts(options, machine)
    is_many = len(hosts) > 1 or options.force_multi or (options.no_ssh and (options.max_elastic_nodes or 1) > 1)
    is_remote = not options.no_ssh and (is_many or not _is_local(hosts[0], machine))
    if is_remote:
        environment = {**exported(machine.env, machine.devices.prefixes if machine.devices else ()), **environment}
        environment["PYTHONPATH"] = ":".join(filter(None, (machine.folder, environment.get("PYTHONPATH", ""))))
    elif options.venv_script and not options.emit:
        raise UsageError(
            f"--venv_script {options.venv_script} is for hosts that are reached from here, and this job starts on this "
            f"machine alone: source the file before, as in . {options.venv_script} && mizzen run ..."
        )
    backend = find_backend(options.launcher) if is_remote else None
    if backend is not None:
        _refuse_hosts(backend, hosts)
    is_alone = options.no_ssh and is_many and not (options.dry_run or options.emit)
    secret = machine.common_secret({**machine.env, **environment}) if is_alone else machine.secret
    environment.pop("MIZZEN_SECRET", None)
    kind: Kind = "module" if options.module else "executable" if options.no_python else "script"
    least, most = _range(options, len(hosts))
    master, port = _master(options, machine, hosts) if is_many else "", _port(options, machine, is_many)
    job = Job(
        # Nodes that are started one by one know nothing of each other but where they meet.
        id=f"{zlib.crc32(f'{master}:{port}'.encode()):08x}" if options.no_ssh and is_many else machine.id,
        program=Program(kind, options.script, options.arguments, not options.no_local_rank),
        hosts=hosts,
        folder=machine.folder,
        python=machine.python,
        environment=with_interface(environment),
        master_addr=master,
        master_port=port,
        min_nodes=least,
        max_nodes=most,
        supervision=_supervision(options, machine),
        secret=secret,
        drop_in=options.drop_in,
        follows_stdin=backend is not None and backend.name in ("ssh", "pdsh"),
        reports_to_launcher=backend is not None,
    )
    remote = RemoteOptions(
        arguments=split_words(options.launcher_args),
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
        is_root=machine.is_root,
        environment=machine.env,
    )
    # The built-in ssh says by itself which host it could not reach, pdsh is brought its job by ssh, Slurm needs none.
    checks = is_remote and not options.no_ssh_check and options.launcher.lower() not in ("ssh", "pdsh", "slurm")
    return LaunchPlan(
        job,
        remote,
        backend,
        node=_node(options, len(hosts)),
        checks_ssh=checks,
        has_fixed_port=options.master_port is not None or options.no_ssh,
        pid_file=machine.pid_file if options.save_pid else None,
    )


def with_next_port(launch: LaunchPlan, attempt: int) -> LaunchPlan:
    """A launch with another rendezvous port, for when the first was taken."""
    port = PORTS[zlib.crc32(f"{launch.job.id}/{attempt}".encode()) % len(PORTS)]
    return replace(launch, job=replace(launch.job, master_port=port))


def _refuse(options: LaunchOptions) -> None:
    filters = [f"--{name}" for name, value in (("include", options.include), ("exclude", options.exclude)) if value]
    numbers = (("num_nodes", options.num_nodes), ("num_gpus", options.num_gpus))
    counts = [f"--{name}" for name, value in numbers if value is not None]
    if options.launcher.lower() == "slurm" and options.hostfile is None:
        counts = [name for name in counts if name != "--num_gpus"]  # it says what a node has, where no file does
    rows = (
        (options.autotuning, f"--autotuning {options.autotuning}: tuning is not built yet; leave it out"),
        (not options.script, "nothing to run: name a script, as in mizzen run train.py"),
        (
            options.module and options.no_python,
            "--module and --no_python together: a module needs Python; leave one of them out",
        ),
        (
            filters and counts,
            f"{' and '.join(filters)} with {' and '.join(counts)}: filters and counts both choose; use one",
        ),
        (
            options.node_rank is not None and not options.no_ssh,
            "--node_rank goes with --no_ssh: otherwise hosts are counted",
        ),
        (options.bind_core_list and not options.bind_cores_to_rank, "--bind_core_list goes with --bind_cores_to_rank"),
    )
    for is_wrong, message in rows:
        if is_wrong:
            raise UsageError(message)


def _refuse_hosts(backend: LaunchBackend, hosts: Hosts) -> None:
    for host in hosts:
        if host.user and not backend.requirements.takes_users:
            raise UsageError(
                f"--launcher {backend.name} logs in as one user everywhere, and the hostfile says {host.login}: write "
                "`User` into ~/.ssh/config, or use --launcher ssh"
            )
        if host.is_ipv6 and not backend.requirements.takes_ipv6:
            raise UsageError(
                f"--launcher {backend.name} takes no IPv6 address for a host, and the hostfile has {host.name}: give "
                "it a name in ~/.ssh/config or /etc/hosts, or use --launcher ssh"
            )


def _variables(options: LaunchOptions, machine: LocalMachine) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, text in machine.files:
        found |= parse_file(text, path)
    if options.bind_cores_to_rank:
        check_affinity({**machine.env, **found})
    if "MIZZEN_INTERFACE" in machine.env:
        found.setdefault("MIZZEN_INTERFACE", machine.env["MIZZEN_INTERFACE"])
    return found


def _hosts(options: LaunchOptions, machine: LocalMachine) -> Hosts:
    if machine.hostfile is not None:
        hosts = parse_hostfile(machine.hostfile, options.hostfile or HOSTFILE)
        return limit(select(hosts, options.include, options.exclude), options.num_nodes, options.num_gpus)
    if options.launcher.lower() == "slurm":
        return _slurm_hosts(options, machine)
    if (options.no_ssh or options.emit) and options.num_nodes:
        slots = _here(options, machine).slots
        return tuple(Host(f"node{number}", slots) for number in range(options.num_nodes))
    if (options.num_nodes or 1) > 1:
        raise UsageError(
            f"--num_nodes {options.num_nodes}, but {options.hostfile or HOSTFILE} does not exist: name the hosts with "
            "--hostfile, or start each node by itself with --no_ssh --node_rank"
        )
    return select((_here(options, machine),), options.include, options.exclude)


def _here(options: LaunchOptions, machine: LocalMachine) -> Host:
    """This machine: the devices that are visible, or so many as were asked for."""
    kind = machine.devices
    if options.num_gpus is not None and (kind is None or options.emit):
        return Host(LOCAL, tuple(range(options.num_gpus)))
    shown = machine.env.get(kind.variable) if kind else None
    if kind is not None and shown is not None:
        slots = visible(kind.variable, shown)
        if options.num_gpus is not None and options.num_gpus > len(slots):
            raise UsageError(f"--num_gpus {options.num_gpus}: {kind.variable}={shown} shows {len(slots)}")
        return Host(LOCAL, slots[: options.num_gpus])
    count = machine.count()
    if options.num_gpus is not None and options.num_gpus > count:
        raise UsageError(f"--num_gpus {options.num_gpus}: this machine has {count}")
    return Host(LOCAL, tuple(range(count))[: options.num_gpus])


def _slurm_hosts(options: LaunchOptions, machine: LocalMachine) -> Hosts:
    """The hosts of the allocation we are in; outside of one, so many as were asked for, whose names Slurm will know."""
    given = machine.env.get("SLURM_GPUS_ON_NODE", "")
    each = options.num_gpus or (int(given) if given.isdigit() and int(given) else None)
    if each is None:
        raise UsageError("--launcher slurm without a hostfile: say with --num_gpus how many ranks each node runs")
    names = in_allocation(machine.env) or ("",) * (options.num_nodes or 1)
    hosts = tuple(Host(name, tuple(range(each))) for name in names)
    if not names[0] and (options.include or options.exclude):
        raise UsageError("--include and --exclude need names: run inside an allocation, or give a hostfile")
    return limit(select(hosts, options.include, options.exclude), options.num_nodes)


def _is_local(host: Host, machine: LocalMachine) -> bool:
    return bool(host.name) and not host.user and (host.name == LOCAL or machine.is_here(host.name))


def _range(options: LaunchOptions, nodes: int) -> tuple[int, int]:
    least, most = options.min_elastic_nodes, options.max_elastic_nodes
    if not options.elastic_training and least is None and most is None:
        return nodes, nodes
    least, most = least or 1, most or nodes
    if not 1 <= least <= most:
        raise UsageError(
            f"--min_elastic_nodes {least} and --max_elastic_nodes {most}: the first is at least 1 and not above"
        )
    if most > nodes and not options.no_ssh:
        raise UsageError(f"--max_elastic_nodes {most}: there are {nodes} hosts")
    return least, most


def _master(options: LaunchOptions, machine: LocalMachine, hosts: Hosts) -> str:
    if options.master_addr or options.emit:
        return options.master_addr  # a scheduler chooses the hosts, so only its file can tell
    if options.no_ssh and machine.hostfile is None:
        if len(hosts) == 1 and (options.max_elastic_nodes or 1) == 1:
            return "127.0.0.1"
        raise UsageError("--no_ssh: say with --master_addr where the first node is")
    if hosts[0].name == LOCAL and len(hosts) > 1:
        raise UsageError(
            "the first host is 'localhost', which means another machine on each: name it as others know it"
        )
    return machine.address(hosts[0].name) if hosts[0].name else ""


def _port(options: LaunchOptions, machine: LocalMachine, is_many: bool) -> int:
    if options.master_port is not None:
        return options.master_port
    if options.no_ssh and is_many:
        return PORT
    return PORTS[zlib.crc32(machine.id.encode()) % len(PORTS)] if is_many else 0


def _node(options: LaunchOptions, nodes: int) -> int:
    if not options.no_ssh:
        return 0
    nodes = max(nodes, options.max_elastic_nodes or 0)
    if options.node_rank is None and nodes > 1:
        raise UsageError("--no_ssh: say with --node_rank which node this is, 0 for the first")
    rank = options.node_rank or 0
    if not 0 <= rank < nodes:
        raise UsageError(f"--node_rank {rank}: the nodes are 0 to {nodes - 1}")
    return rank


def _supervision(options: LaunchOptions, machine: LocalMachine) -> Supervision:
    is_elastic = (
        options.elastic_training or options.min_elastic_nodes is not None or options.max_elastic_nodes is not None
    )
    restarts = options.max_restarts if options.max_restarts is not None else RESTARTS if is_elastic else 0
    cores = parse_cores(options.bind_core_list) if options.bind_core_list else ()
    logs = options.enable_each_rank_log
    return Supervision(
        max_restarts=restarts,
        grace=options.grace,
        hang_timeout=options.hang_timeout,
        shown=_shown(options.show),
        logs=None if logs in (None, "None") else logs,
        level="error" if options.quiet else options.log_level,
        cores=cores if options.bind_cores_to_rank else None,
    )


def _shown(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    words = [word.strip() for word in text.split(",") if word.strip() and text != "none"]
    if not all(map(is_number, words)):
        raise UsageError(f"--show {text!r}: write ranks as in 0,3, or all, or none")
    return tuple(int(word) for word in words)
