"""A launch in words for a person (`--dry-run`), or as a file for a scheduler (`--emit`). Pure.

A batch script for Slurm and a JobSet for Kubernetes start `mizzen run --no_ssh` once per node, so that what the
scheduler shows is what a person would type.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from mizzen.errors import UsageError
from mizzen.launcher.backends import VARIABLE, interpreter, split_words
from mizzen.launcher.job import Job, is_plain
from mizzen.launcher.launch import PORT, LaunchOptions, LaunchPlan
from mizzen.wording import and_more, counted


def describe(launch: LaunchPlan) -> str:
    """What each rank would run where, and the exact commands that would start it."""
    return "\n".join(_lines(launch))


def _lines(launch: LaunchPlan) -> Iterator[str]:
    job = launch.job
    world = sum(len(host.slots) for host in job.hosts)
    yield f"{world} ranks on {counted(len(job.hosts), 'host')}, in {job.folder}"
    first = 0
    for host in job.hosts:
        last = first + len(host.slots) - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        yield f"  {host.name or '(named by Slurm)'}: {ranks}, devices {','.join(map(str, host.slots))}"
        first = last + 1
    bound = ["numactl", "-C", "CORES"] if job.supervision.cores is not None else []
    yield f"each rank runs:\n  {shlex.join([*bound, *job.program.words(job.python, 0)])}"
    if bound:
        given = f"cores {','.join(map(str, job.supervision.cores))}" if job.supervision.cores else "all cores"
        yield f"where CORES are its share of {given} of its host; `-m` follows where all of them are near one memory"
    if job.drop_in:
        yield "which finds the drop-in before whatever is installed"
    if job.environment:
        yield "with:"
        for name, value in sorted(job.environment.items()):
            yield f"  {name}={shlex.quote(value)}" if is_plain(name) else f"  {name} (its value is not shown)"
    yield "started by:"
    if launch.backend is None:
        yield f"  {shlex.join((*interpreter(job, launch.remote), '--node', str(launch.node), '@FILE'))}"
    for command in launch.backend.commands(job, launch.remote) if launch.backend is not None else ():
        shown = {name: "JOB" if name == VARIABLE else shlex.quote(value) for name, value in command.environment.items()}
        variables = [f"{name}={value}" for name, value in shown.items()]
        yield f"  {' '.join([*variables, shlex.join(command.words)])}"
    yield "The job, with all arguments and values, is no argument of these: others could read it."


def emit_slurm(job: Job, options: LaunchOptions) -> str:
    """A script for sbatch. Slurm warns two minutes before the end, and the job saves and stops."""
    plain, hidden = _plain_and_secret(job)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_name(job)}",
        f"#SBATCH --nodes={len(job.hosts)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={_slots(job)}",
        "#SBATCH --exclusive",
        f"#SBATCH --signal=USR1@{int(job.supervision.grace)}",
        "#SBATCH --requeue",
        *([f"#SBATCH {shlex.join(more)}"] if (more := split_words(options.launcher_args)) else []),
        "",
        f"cd {shlex.quote(job.folder)}",
        *(f"export {name}={shlex.quote(job.environment[name])}" for name in plain),
        *([f"# sbatch passes these on, or each node reads them from its file: {', '.join(hidden)}"] if hidden else []),
        "export MIZZEN_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')",
        *([f". {shlex.quote(options.venv_script)}"] if options.venv_script else []),
        "set -u",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'srun --kill-on-bad-exit=0 --mpi=none bash -c \'exec mizzen run --node_rank "$SLURM_NODEID" "$@"\' mizzen \\',
        f'  --master_addr "$first" {shlex.join(_options(job, options))} \\',
        f"  {shlex.join((job.program.name, *job.program.arguments))}",
    ]
    return "\n".join(lines) + "\n"


def emit_k8s(job: Job, options: LaunchOptions) -> str:
    """A JobSet of one indexed job, a pod per node; exit code 75 (saved) starts the pods again."""
    name = re.sub(r"[^a-z0-9]+", "-", _name(job).lower())[:40].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    count, slots = len(job.hosts), _slots(job)
    if options.venv_script:
        raise UsageError(
            f"--venv_script {options.venv_script} with --emit k8s: a pod has an image instead; leave it out"
        )
    words = [*_options(job, options), job.program.name, *job.program.arguments]
    plain, hidden = _plain_and_secret(job)
    hidden.append("MIZZEN_SECRET")
    container: dict[str, Any] = {
        "name": "mizzen",
        "image": "IMAGE",
        "workingDir": job.folder,
        "command": ["mizzen", "run"],
        "args": [
            *("--node_rank", "$(JOB_COMPLETION_INDEX)", "--master_addr", f"{name}-workers-0-0.{name}"),
            *(word.replace("$", "$$") for word in words),
        ],
        "env": [
            *({"name": key, "value": job.environment[key].replace("$", "$$")} for key in plain),
            *({"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in hidden),
        ],
        "resources": {"limits": {"nvidia.com/gpu": slots}},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.supervision.grace) + 10,
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    work = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0}
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": max(1, job.supervision.max_restarts)},
            "replicatedJobs": [
                {"name": "workers", "replicas": 1, "template": {"spec": {**work, "template": {"spec": pod}}}}
            ],
        },
    }
    given = " ".join(
        "--from-literal=MIZZEN_SECRET=$(openssl rand -hex 32)"
        if key == "MIZZEN_SECRET"
        else f"--from-literal={key}=..."
        for key in hidden
    )
    notes = [
        "# Put the name of your image in place of IMAGE, and make the secret that the pods read, once:",
        f"# kubectl create secret generic {name} {given}",
    ]
    return "\n".join([*notes, *_yaml(whole)]) + "\n"


def _plain_and_secret(job: Job) -> tuple[list[str], list[str]]:
    """Variables whose values may stand in a file, and those that may be secret."""
    names = sorted(job.environment)
    return [name for name in names if is_plain(name)], [name for name in names if not is_plain(name)]


def _slots(job: Job) -> int:
    """How many devices every node has."""
    slots = len(job.hosts[0].slots)
    if any(host.slots != tuple(range(slots)) for host in job.hosts):
        found = and_more([f"{host.name}: {','.join(map(str, host.slots))}" for host in job.hosts], 4)
        raise UsageError(
            f"--emit: a scheduler gives every node the same number of devices, and counts them from 0; this job has "
            f"{found}: say --num_nodes and --num_gpus instead of naming hosts and devices"
        )
    return slots


def _options(job: Job, options: LaunchOptions) -> list[str]:
    supervision, count = job.supervision, len(job.hosts)
    words = ["--no_ssh", "--num_nodes", str(count), "--num_gpus", str(_slots(job))]
    words += ["--master_port", str(options.master_port or PORT)]
    if job.is_elastic:
        words += ["--min_elastic_nodes", str(job.min_nodes), "--max_elastic_nodes", str(job.max_nodes)]
    if supervision.max_restarts:
        words += ["--max_restarts", str(supervision.max_restarts)]
    if supervision.logs:
        words += ["--enable_each_rank_log", supervision.logs]
    words += ["--grace", f"{supervision.grace:g}"]
    if supervision.hang_timeout is not None:
        words += ["--hang_timeout", f"{supervision.hang_timeout:g}"]
    words += ["--show", options.show] if options.show != "0" else []
    words += ["--log_level", supervision.level] if supervision.level != "info" else []
    words += ["--bind_cores_to_rank"] if options.bind_cores_to_rank else []
    words += ["--bind_core_list", options.bind_core_list] if options.bind_core_list else []
    program = job.program
    words += {"module": ["--module"], "executable": ["--no_python"], "script": []}[program.kind]
    words += ["--drop-in"] if job.drop_in else []
    return [*words, *([] if program.takes_local_rank else ["--no_local_rank"])]


def _name(job: Job) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(job.program.name).stem) or "job"


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Lines of YAML."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{indent}{key}:", inner, indent + "  ")
    else:
        for inner in value:
            first, *rest = list(_yaml(inner, indent + "  ")) if isinstance(inner, Mapping) else [_scalar(inner)]
            yield f"{indent}- {first.strip()}"
            yield from rest


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list) and value:
        yield head
        yield from _yaml(value, indent)
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    """As JSON quotes it, which YAML reads, but for what JSON writes as two halves, which YAML refuses."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)
