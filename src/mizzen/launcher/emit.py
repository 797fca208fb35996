"""The same job as a file for a scheduler: a batch script for Slurm, or a JobSet for Kubernetes. Pure.

Both start `mizzen run --no_ssh` once per node, so that what the scheduler shows is what a person would type.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from mizzen.errors import UsageError
from mizzen.launcher.arrange import PORT, Asked
from mizzen.launcher.backends import split_words
from mizzen.launcher.job import Job
from mizzen.launcher.variables import is_plain


def emit_slurm(job: Job, asked: Asked) -> str:
    """A script for sbatch. Slurm warns two minutes before the end, and the job saves and stops."""
    plain, hidden = _told_apart(job)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_name(job)}",
        f"#SBATCH --nodes={len(job.hosts)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={_slots(job)}",
        "#SBATCH --exclusive",
        f"#SBATCH --signal=USR1@{int(job.care.grace)}",
        "#SBATCH --requeue",
        *([f"#SBATCH {shlex.join(more)}"] if (more := split_words(asked.launcher_args)) else []),
        "",
        f"cd {shlex.quote(job.folder)}",
        *(f"export {name}={shlex.quote(job.environment[name])}" for name in plain),
        *([f"# sbatch passes these on, or each node reads them from its file: {', '.join(hidden)}"] if hidden else []),
        "export MIZZEN_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')",
        *([f". {shlex.quote(asked.venv_script)}"] if asked.venv_script else []),
        "set -u",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'srun --kill-on-bad-exit=0 --mpi=none bash -c \'exec mizzen run --node_rank "$SLURM_NODEID" "$@"\' mizzen \\',
        f'  --master_addr "$first" {shlex.join(_options(job, asked))} \\',
        f"  {shlex.join(_program(job))}",
    ]
    return "\n".join(lines) + "\n"


def emit_k8s(job: Job, asked: Asked) -> str:
    """A JobSet of one indexed job, a pod per node; exit code 75 (saved) starts the pods again."""
    name = re.sub(r"[^a-z0-9]+", "-", _name(job).lower())[:40].strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    count, slots = len(job.hosts), _slots(job)
    if asked.venv_script:
        raise UsageError(f"--venv_script {asked.venv_script} with --emit k8s: a pod has an image instead; leave it out")
    words = [*_options(job, asked), *_program(job)]
    plain, hidden = _told_apart(job)
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
        "terminationGracePeriodSeconds": int(job.care.grace) + 10,
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    work = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0}
    whole = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": max(1, job.care.max_restarts)},
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


def _told_apart(job: Job) -> tuple[list[str], list[str]]:
    """Variables whose values may stand in a file, and those that may be secret."""
    names = sorted(job.environment)
    return [name for name in names if is_plain(name)], [name for name in names if not is_plain(name)]


def _slots(job: Job) -> int:
    """How many devices every node has."""
    slots = len(job.hosts[0].slots)
    if any(host.slots != tuple(range(slots)) for host in job.hosts):
        found = ", ".join(f"{host.name}: {','.join(map(str, host.slots))}" for host in job.hosts[:4])
        raise UsageError(
            f"--emit: a scheduler gives every node the same number of devices, and counts them from 0; this job has "
            f"{found}: say --num_nodes and --num_gpus instead of naming hosts and devices"
        )
    return slots


def _options(job: Job, asked: Asked) -> list[str]:
    care, count = job.care, len(job.hosts)
    options = ["--no_ssh", "--num_nodes", str(count), "--num_gpus", str(_slots(job))]
    options += ["--master_port", str(asked.master_port or PORT)]
    if job.is_elastic:
        options += ["--min_elastic_nodes", str(job.min_nodes), "--max_elastic_nodes", str(job.max_nodes)]
    if care.max_restarts:
        options += ["--max_restarts", str(care.max_restarts)]
    if care.logs:
        options += ["--enable_each_rank_log", care.logs]
    options += ["--grace", f"{care.grace:g}"]
    if care.hang_timeout is not None:
        options += ["--hang_timeout", f"{care.hang_timeout:g}"]
    options += ["--show", asked.show] if asked.show != "0" else []
    options += ["--log_level", care.level] if care.level != "info" else []
    options += ["--bind_cores_to_rank"] if asked.bind_cores_to_rank else []
    options += ["--bind_core_list", asked.bind_core_list] if asked.bind_core_list else []
    program = job.program
    options += {"module": ["--module"], "executable": ["--no_python"], "script": []}[program.kind]
    options += ["--drop-in"] if job.drop_in else []
    return [*options, *([] if program.takes_local_rank else ["--no_local_rank"])]


def _program(job: Job) -> list[str]:
    return [job.program.name, *job.program.arguments]


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
