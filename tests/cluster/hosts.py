"""Two hosts on one machine: network namespaces with their own name, address and sshd, and a Slurm over both."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PORT = 2222
NAMES = ("node1", "node2")
SYSTEM = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def has(program):
    return shutil.which(program, path=SYSTEM) is not None


def call(*words, **options):
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **options)


@dataclass
class Cluster:
    """Two hosts, and how to reach them."""

    folder: Path
    environment: dict[str, str]
    stack: ExitStack
    number: int
    """Of its networks, which no other cluster of this machine has."""
    processes: list = field(default_factory=list)

    def address(self, host):
        """Of a host, 1 or 2; of the machine that launches, 254."""
        return f"10.213.{self.number}.{host}"

    def sixth(self, host):
        return f"fd00:213:{self.number}::{host}"

    def start(self, name, *words):
        """A process on one of the hosts."""
        # Not `ip netns exec`: it mounts a /sys of its own, in which slurmd finds no control groups.
        namespace = ["nsenter", f"--net=/run/netns/{self.namespace(name)}", "unshare", "--uts", "sh", "-c"]
        line = f'hostname {name} && exec "$@"'
        log = (self.folder / f"{name}-{Path(words[0]).name}.log").open("ab")
        process = subprocess.Popen(
            [*namespace, line, "sh", *map(str, words)], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": SYSTEM}, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        self.stack.callback(end, process)
        return process

    def namespace(self, name):
        return f"mz{os.getpid()}-{name}"

    def run(self, *words, timeout=100, **options):
        """A command on the machine that launches."""
        return subprocess.run(
            [str(word) for word in words], env=self.environment, capture_output=True, timeout=timeout, **options
        )


def end(process):
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def build(folder, stack):
    """Make the hosts, or skip with the reason."""
    if os.getuid() != 0:
        pytest.skip("the hosts of this test are network namespaces, which need root")
    for program in ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter"):
        if not has(program):
            pytest.skip(f"{program} is not installed")
    environment = {**os.environ, "PATH": f"{folder}/bin:{SYSTEM}", "PYTHONPATH": str(ROOT / "src")}
    environment = {name: value for name, value in environment.items() if not name.startswith(("SLURM_", "MIZZEN_"))}
    with Path("/run/mizzen-cluster.lock").open("w") as lock:  # two runs that look at once find the same number free
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers()
        cluster = Cluster(folder, environment, stack, free_number())
        try:
            lay_cables(cluster)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system permits no network namespaces: {error.stderr.strip()}")
    open_doors(cluster)
    (folder / "hostfile").write_text("# two hosts of this machine\n\nnode1 slots=2  # first\nnode2 slots=2\n")
    return cluster


def remove_leftovers():
    """Take away the networks of runs that were killed: their bridges would answer in the place of ours."""
    of_hosts = call("ip", "netns", "list").stdout
    for owner, host in re.findall(r"^mz([0-9]+)-(node[0-9]+)\b", of_hosts, re.MULTILINE):
        if not psutil.pid_exists(int(owner)):
            for pid in subprocess.run(["ip", "netns", "pids", f"mz{owner}-{host}"], capture_output=True).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)  # its sshd
            subprocess.run(["ip", "netns", "delete", f"mz{owner}-{host}"], check=False)
    for owner in re.findall(r"^[0-9]+: mz([0-9]+):", call("ip", "-o", "link").stdout, re.MULTILINE):
        if not psutil.pid_exists(int(owner)):
            subprocess.run(["ip", "link", "delete", f"mz{owner}"], check=False)


def free_number():
    taken = set(re.findall(r"10\.213\.([0-9]+)\.", call("ip", "-o", "-4", "address").stdout))
    return next(number for number in range(7, 255) if str(number) not in taken)


def lay_cables(cluster):
    bridge = f"mz{os.getpid()}"
    call("ip", "link", "add", bridge, "type", "bridge")
    cluster.stack.callback(subprocess.run, ["ip", "link", "delete", bridge], check=False)
    call("ip", "address", "add", f"{cluster.address(254)}/24", "dev", bridge)
    call("ip", "link", "set", bridge, "up")
    has_sixth = Path("/proc/sys/net/ipv6/conf/lo").exists()
    if has_sixth:
        call("ip", "address", "add", f"{cluster.sixth(254)}/64", "dev", bridge, "nodad")
    for number, name in enumerate(NAMES, 1):
        namespace, outer = cluster.namespace(name), f"{bridge}-{number}"
        call("ip", "netns", "add", namespace)
        cluster.stack.callback(subprocess.run, ["ip", "netns", "delete", namespace], check=False)
        call("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        call("ip", "link", "set", outer, "master", bridge, "up")
        inside = ("ip", "-n", namespace)
        call(*inside, "address", "add", f"{cluster.address(number)}/24", "dev", "eth0")
        if has_sixth:
            call(*inside, "address", "add", f"{cluster.sixth(number)}/64", "dev", "eth0", "nodad")
        call(*inside, "link", "set", "eth0", "up")
        call(*inside, "link", "set", "lo", "up")
    call("nsenter", f"--net=/run/netns/{cluster.namespace('node1')}", "unshare", "--uts", "hostname", "node1")


def open_doors(cluster):
    """An sshd on each host, at a port that is not 22, and an `ssh` on our path that has the key."""
    folder = cluster.folder
    for name in ("key", "host_key"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nMaxStartups 100\n"
        f"SetEnv PYTHONPATH={ROOT / 'src'}\n"
    )
    hosts = "".join(f"Host {name}\n  HostName {cluster.address(number)}\n" for number, name in enumerate(NAMES, 1))
    (folder / "ssh_config").write_text(
        f"{hosts}Host *\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  LogLevel ERROR\n"
    )
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    for name in NAMES:
        cluster.start(name, shutil.which("sshd", path=SYSTEM), "-D", "-e", "-f", folder / "sshd_config")
    said = {}

    def has_answered(name):
        ran = cluster.run("ssh", "-p", PORT, "-o", "ConnectTimeout=5", name, "true")
        said[name] = ran.stderr.decode() + (folder / f"{name}-sshd.log").read_text()
        return ran.returncode == 0

    wait_for(lambda: all(map(has_answered, NAMES)), "sshd", seen=said)


def wait_for(is_true, what, limit=60, seen=""):
    until = time.monotonic() + limit
    while not is_true():
        if time.monotonic() > until:
            pytest.fail(f"{what}: not within {limit} s. {seen}")
        time.sleep(0.1)


def build_slurm(cluster):
    """munge, slurmctld here and slurmd on each host; `srun` then works in the cluster's environment."""
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if not has(program):
            pytest.skip(f"{program} is not installed")
    folder = cluster.folder / "slurm"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    munged = [shutil.which("munged", path=SYSTEM), "--force", "--foreground", "--key-file", folder / "key"]
    munged += ["--socket", folder / "munge", "--pid-file", folder / "munge.pid", "--log-file", folder / "munge.log"]
    munged += ["--seed-file", folder / "seed"]
    start_here(cluster, "munged", *munged)
    hostname = os.uname().nodename
    nodes = "".join(
        f"NodeName={name} NodeAddr={cluster.address(number)} CPUs=2 State=UNKNOWN\n"
        for number, name in enumerate(NAMES, 1)
    )
    (folder / "slurm.conf").write_text(
        f"ClusterName=mizzen\nSlurmctldHost={hostname}({cluster.address(254)})\nSlurmUser=root\nSlurmdUser=root\n"
        f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge\nCredType=cred/munge\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmctldPidFile={folder}/ctld.pid\n"
        f"SlurmdPidFile={folder}/%n.pid\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
        f"SelectType=select/cons_tres\nReturnToService=2\nMpiDefault=none\n"
        f"SlurmctldPort={16800 + 2 * cluster.number}\nSlurmdPort={16801 + 2 * cluster.number}\n"
        f"SlurmctldTimeout=60\nSlurmdTimeout=60\nKillWait=5\nJobAcctGatherType=jobacct_gather/none\n"
        f"{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8\n"
    )
    (folder / "state").mkdir()
    cluster.environment["SLURM_CONF"] = os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    start_here(cluster, "slurmctld", shutil.which("slurmctld", path=SYSTEM), "-D", "-f", folder / "slurm.conf")
    for name in NAMES:
        (folder / f"spool-{name}").mkdir()
        cluster.start(name, shutil.which("slurmd", path=SYSTEM), "-D", "-f", folder / "slurm.conf")

    def are_idle():
        for name in NAMES:
            log = (cluster.folder / f"{name}-slurmd.log").read_text()
            if "Unable to initialize cgroup plugin" in log:
                pytest.skip("slurmd finds no control groups on this system")
        shown = cluster.run("sinfo", "--noheader", "--format=%D %t").stdout.decode()
        return shown.split() == ["2", "idle"]

    wait_for(are_idle, f"Slurm ({folder})")


def start_here(cluster, name, *words):
    log = (cluster.folder / f"{name}.log").open("ab")
    process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    cluster.stack.callback(end, process)


def python():
    return sys.executable
