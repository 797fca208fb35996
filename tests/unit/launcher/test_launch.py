"""From flags to a job."""

import subprocess
from dataclasses import replace

import pytest

from mizzen.errors import UsageError
from mizzen.launcher.backends import NAMES
from mizzen.launcher.describe import describe, emit_k8s, emit_slurm
from mizzen.launcher.hosts import KINDS
from mizzen.launcher.job import DROP_IN, Job, with_drop_in
from mizzen.launcher.launch import PORTS, LaunchOptions, LocalMachine, plan_launch, with_next_port

HOSTFILE = "w0 slots=4\nw1 slots=2\n"
EVEN = "w0 slots=4\nw1 slots=4\n"
FACTS = LocalMachine(id="abc", folder="/job", python="/py", hostfile=None)


def made(facts=FACTS, **asked):
    return plan_launch(LaunchOptions(**{"script": "t.py", **asked}), facts)


def test_this_machine():
    launch = made(num_gpus=2, arguments=("-x",))
    assert [str(host) for host in launch.job.hosts] == ["localhost:0,1"]
    assert launch.backend is None and launch.job.master_addr == "" and launch.job.master_port == 0
    assert launch.job.supervision.max_restarts == 0 and not launch.job.is_elastic


def test_devices_of_this_machine():
    cuda = replace(FACTS, devices=KINDS[0], count=lambda: 4)
    assert made(cuda).job.hosts[0].slots == (0, 1, 2, 3)
    shown = replace(cuda, env={"CUDA_VISIBLE_DEVICES": "5,7"})
    assert made(shown).job.hosts[0].slots == (5, 7)
    assert made(shown, num_gpus=1).job.hosts[0].slots == (5,)
    for facts, count, said in ((shown, 3, "CUDA_VISIBLE_DEVICES=5,7 shows 2"), (cuda, 5, "this machine has 4")):
        with pytest.raises(UsageError, match=said):
            made(facts, num_gpus=count)
    assert made(shown, include="localhost:7").job.hosts[0].slots == (7,)


def test_hosts_of_a_file():
    facts = replace(FACTS, hostfile=HOSTFILE, env={"NCCL_DEBUG": "INFO", "HOME": "x", "PYTHONPATH": "/p"})
    launch = made(facts)
    assert launch.backend is not None and launch.backend.name == "ssh" and launch.job.follows_stdin
    assert launch.job.master_addr == "w0" and launch.job.master_port in PORTS
    assert launch.job.environment == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/job:/p"}
    assert [str(host) for host in made(facts, include="w1:1").job.hosts] == ["w1:1"]
    assert made(facts, include="w1:1").backend is not None, "one host that is not this machine is reached by ssh"
    here = replace(facts, is_here=lambda name: name == "w1")
    assert made(here, include="w1").backend is None
    assert made(here, include="w1", force_multi=True).backend is not None
    assert with_next_port(launch, 1).job.master_port != launch.job.master_port


def test_files_of_variables_win_in_order_and_count_on_one_machine():
    facts = replace(FACTS, files=(("a", "X=1\nY=1\n"), ("b", "Y=2\n")))
    assert made(facts, num_gpus=1).job.environment == {"X": "1", "Y": "2"}
    interface = replace(FACTS, env={"MIZZEN_INTERFACE": "ib0"})
    assert made(interface, num_gpus=1).job.environment["GLOO_SOCKET_IFNAME"] == "ib0"


def test_nodes_started_one_by_one():
    launch = made(no_ssh=True, num_nodes=2, num_gpus=2, node_rank=1, master_addr="10.0.0.1")
    other = made(replace(FACTS, id="other"), no_ssh=True, num_nodes=2, num_gpus=2, node_rank=0, master_addr="10.0.0.1")
    assert launch.node == 1 and launch.backend is None
    assert launch.job == other.job, "nodes that know nothing of each other have the same job"
    assert launch.job.master_port == 29500


def test_slurm_without_a_file():
    facts = replace(FACTS, env={"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "2"})
    assert [str(host) for host in made(facts, launcher="slurm", num_nodes=2).job.hosts] == ["n1:0,1", "n2:0,1"]
    assert [str(host) for host in made(facts, launcher="slurm", exclude="n2", num_gpus=1).job.hosts] == ["n1:0", "n3:0"]
    outside = made(launcher="slurm", num_nodes=2, num_gpus=4)
    assert [host.name for host in outside.job.hosts] == ["", ""]
    with pytest.raises(UsageError, match="say with --num_gpus"):
        made(launcher="slurm")


def test_elastic_jobs():
    facts = replace(FACTS, hostfile=HOSTFILE)
    job = made(facts, elastic_training=True).job
    assert (job.min_nodes, job.max_nodes, job.supervision.max_restarts) == (1, 2, 100)
    job = made(facts, min_elastic_nodes=2, max_restarts=1).job
    assert (job.min_nodes, job.max_nodes, job.supervision.max_restarts) == (2, 2, 1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"script": ""}, "nothing to run"),
        ({"autotuning": "tune"}, "--autotuning tune: tuning is not built yet"),
        ({"module": True, "no_python": True}, "--module and --no_python together"),
        ({"include": "w0", "num_nodes": 1}, "--include with --num_nodes"),
        ({"exclude": "w0", "num_gpus": 1}, "--exclude with --num_gpus"),
        ({"node_rank": 1}, "--node_rank goes with --no_ssh"),
        ({"no_ssh": True}, "which node this is"),
        ({"no_ssh": True, "node_rank": 2}, "--node_rank 2: the nodes are 0 to 1"),
        ({"bind_core_list": "0-3"}, "goes with --bind_cores_to_rank"),
        ({"min_elastic_nodes": 3}, "the first is at least 1 and not above"),
        ({"max_elastic_nodes": 3}, "there are 2 hosts"),
        ({"show": "first"}, "--show 'first'"),
        ({"launcher": "rsh"}, "--launcher rsh: unknown"),
        ({"launcher_args": "a 'b"}, "--launcher_args .*No closing quotation: close what is open"),
    ],
)
def test_refusals_say_the_way_out(asked, said):
    with pytest.raises(UsageError, match=said):
        made(replace(FACTS, hostfile=HOSTFILE), **asked)


def test_refusals_without_a_file():
    for asked, said in (
        ({"num_nodes": 2}, "name the hosts with --hostfile"),
        ({"num_nodes": 2, "hostfile": "nowhere"}, "--num_nodes 2, but nowhere does not exist"),
        ({"venv_script": "env.sh"}, "source the file before, as in . env.sh && mizzen run"),
        ({"no_ssh": True, "num_nodes": 2, "num_gpus": 1, "node_rank": 0}, "say with --master_addr"),
        ({"no_ssh": True, "max_elastic_nodes": 3, "num_gpus": 1, "node_rank": 0}, "say with --master_addr"),
        ({"no_ssh": True, "max_elastic_nodes": 3, "num_gpus": 1, "master_addr": "w"}, "which node this is"),
        (
            {"no_ssh": True, "max_elastic_nodes": 3, "num_gpus": 1, "master_addr": "w", "node_rank": 3},
            "--node_rank 3: the nodes are 0 to 2",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            made(**asked)
    with pytest.raises(UsageError, match="the first host is 'localhost'"):
        made(replace(FACTS, hostfile="localhost slots=1\nw1 slots=1\n"))


def test_what_is_shown():
    text = describe(made(replace(FACTS, hostfile=HOSTFILE), arguments=("a b", "$(x)")))
    assert "6 ranks on 2 hosts, in /job" in text
    assert "  w0: ranks 0 to 3, devices 0,1,2,3" in text and "  w1: ranks 4 to 5" in text
    assert "/py -u t.py --local_rank=0 'a b' '$(x)'" in text
    assert text.count("\n  ssh ") == 2


def test_a_script_for_slurm_keeps_every_word(tmp_path):
    """The shell itself says what the script would pass on."""
    import subprocess

    words = ("a b", "$(touch canary)", "it's", "x\ny", "")
    facts = replace(FACTS, hostfile=EVEN, folder=str(tmp_path), env={"NCCL_X": "a 'b'"})
    asked = LaunchOptions(
        script="my train.py", arguments=words, max_restarts=2, grace=90, launcher_args="-p gpu --comment='a b'"
    )
    text = emit_slurm(plan_launch(asked, facts).job, asked)
    assert (
        "#SBATCH --nodes=2" in text and "#SBATCH --signal=USR1@90" in text and "#SBATCH -p gpu '--comment=a b'" in text
    )
    fakes = tmp_path / "bin"
    fakes.mkdir()
    for name, body in (
        ("srun", 'shift 2; SLURM_NODEID=1 exec "$@"'),
        ("scontrol", "echo w0"),
        ("mizzen", 'for w in "$@"; do printf "%s\\0" "$w"; done; printf "%s" "$NCCL_X"'),
    ):
        (fakes / name).write_text(f"#!/bin/sh\n{body}\n")
        (fakes / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    ran = subprocess.run(
        ["bash", str(tmp_path / "job.sh")],
        env={"PATH": f"{fakes}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "w[0-1]"},
        capture_output=True,
        text=True,
        check=True,
    )
    got = ran.stdout.split("\0")
    assert tuple(got[-6:-1]) == words and got[-7] == "my train.py" and got[-1] == "a 'b'"
    assert got[:5] == ["run", "--node_rank", "1", "--master_addr", "w0"]
    assert not (tmp_path / "canary").exists()


def test_a_scheduler_needs_no_names():
    asked = LaunchOptions(script="t.py", num_nodes=4, num_gpus=8, emit="slurm")
    text = emit_slurm(plan_launch(asked, FACTS).job, asked)
    assert "#SBATCH --nodes=4" in text and "--num_nodes 4 --num_gpus 8" in text
    one = replace(FACTS, devices=KINDS[0], count=lambda: 1, env={"CUDA_VISIBLE_DEVICES": "3"})
    assert emit_slurm(plan_launch(asked, one).job, asked) == text, "what this machine has says nothing about others"


def test_files_for_a_scheduler_hold_no_password():
    """Slurm keeps the script, and a manifest is put into a repository."""
    files = (("/home/u/.mizzen_env", "WANDB_API_KEY=PASSWORD\nNCCL_DEBUG=INFO\nMIZZEN_SECRET=PASSWORD of the nodes\n"),)
    facts = replace(FACTS, files=files, env={"MLFLOW_TRACKING_TOKEN": "PASSWORD"}, secret="PASSWORD")
    asked = LaunchOptions(script="t.py", num_nodes=2, num_gpus=1, emit="slurm")
    text = emit_slurm(plan_launch(asked, facts).job, asked)
    assert "PASSWORD" not in text and "export NCCL_DEBUG=INFO" in text
    assert (
        "# sbatch passes these on, or each node reads them from its file: MLFLOW_TRACKING_TOKEN, WANDB_API_KEY" in text
    )
    line = next(line for line in text.splitlines() if "MIZZEN_SECRET" in line)
    made = [subprocess.run(["bash", "-c", f"{line}; echo $MIZZEN_SECRET"], capture_output=True).stdout for _ in "ab"]
    assert len(set(made)) == 2 and len(made[0].strip()) == 64, "each run of the script has its own"
    asked = replace(asked, emit="k8s")
    text = emit_k8s(plan_launch(asked, facts).job, asked)
    assert "PASSWORD" not in text and '"name": "NCCL_DEBUG"' not in text
    assert text.count("secretKeyRef") == 3 and 'key: "MIZZEN_SECRET"' in text
    assert text.splitlines()[1].startswith("# kubectl create secret generic t --from-literal=MLFLOW_TRACKING_TOKEN=...")


def test_where_the_secret_comes_from():
    """Of a launch from here it is fresh; nodes that are started one by one have one in common."""
    facts = replace(FACTS, secret="fresh", common_secret=lambda env: env.get("MIZZEN_SECRET", "of the file"))
    assert plan_launch(LaunchOptions(script="t.py", num_gpus=1), facts).job.secret == "fresh"
    assert made(replace(facts, hostfile=EVEN)).job.secret == "fresh"
    alone = LaunchOptions(script="t.py", num_nodes=2, num_gpus=1, no_ssh=True, node_rank=1, master_addr="w0")
    assert plan_launch(alone, facts).job.secret == "of the file"
    told = plan_launch(alone, replace(facts, files=(("f", "MIZZEN_SECRET=told\n"),)))
    assert told.job.secret == "told" and "MIZZEN_SECRET" not in told.job.environment
    assert "fresh" not in repr(made(replace(facts, hostfile=EVEN)).job)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ssh"])
def test_hosts_that_only_ssh_can_reach(name):
    with pytest.raises(UsageError, match=f"--launcher {name} takes no IPv6 address.*2001:db8::1"):
        made(replace(FACTS, hostfile="w0 slots=1\n2001:db8::1 slots=1\n"), launcher=name)
    if name != "pdsh":
        with pytest.raises(UsageError, match=f"--launcher {name} logs in as one user.*ann@w0"):
            made(replace(FACTS, hostfile="ann@w0 slots=1\nw1 slots=1\n"), launcher=name)


def test_a_user_is_another_than_the_one_here():
    """One host that is this machine needs no ssh, but a login as somebody else does."""
    here = replace(FACTS, is_here=lambda name: True)
    assert made(replace(here, hostfile="w0 slots=1\n")).backend is None
    assert made(replace(here, hostfile="ann@w0 slots=1\n")).backend.name == "ssh"


def test_a_manifest_for_kubernetes():
    asked = LaunchOptions(script="train.py", arguments=("--name", "$(HOME)", "$$x$", "\U0001f600\x7f\n"))
    text = emit_k8s(plan_launch(asked, replace(FACTS, hostfile="w0 slots=8\nw1 slots=8\n")).job, asked)
    for line in ("kind: JobSet", "parallelism: 2", "nvidia.com/gpu: 8", '- "$$(HOME)"', '- "$(JOB_COMPLETION_INDEX)"'):
        assert line in text.replace('"JobSet"', "JobSet"), text
    assert '- "$$$$x$$"' in text and '- "\\U0001f600\\U0000007f\\n"' in text


@pytest.mark.parametrize(
    ("script", "name"),
    [("7_train.py", "job-7-train"), ("_.py", "job"), (f"{'a' * 39}_b.py", "a" * 39), ("pkg/My Train.py", "my-train")],
)
def test_the_name_of_a_manifest_is_one_that_kubernetes_takes(script, name):
    asked = LaunchOptions(script=script, num_nodes=1, num_gpus=1, emit="k8s")
    assert f'\n  name: "{name}"\n' in emit_k8s(plan_launch(asked, FACTS).job, asked)


def test_the_drop_in_goes_with_the_job_on_every_back_end():
    for name in (None, *NAMES):
        facts = replace(FACTS, hostfile=EVEN if name else None)
        launch = made(facts, drop_in=True, **({"launcher": name} if name else {}))
        assert Job.decode(launch.job.encode()).drop_in
        assert "which finds the drop-in" in describe(launch)
    assert "--drop-in" in emit_slurm(launch.job, LaunchOptions(script="t.py"))


def test_the_file_of_a_scheduler_keeps_what_was_asked():
    asked = LaunchOptions(
        script="t.py",
        num_nodes=2,
        num_gpus=4,
        emit="slurm",
        master_port=12345,
        hang_timeout=60.0,
        show="all",
        log_level="debug",
        bind_cores_to_rank=True,
    )
    text = emit_slurm(plan_launch(asked, FACTS).job, asked)
    assert "--master_port 12345" in text
    assert "--hang_timeout 60 --show all --log_level debug --bind_cores_to_rank" in text


@pytest.mark.parametrize(
    ("hostfile", "include"), [("w0 slots=2\nw1 slots=4\n", ""), ("w0 slots=4\nw1 slots=4\n", "w1:2,3")]
)
def test_a_job_that_a_scheduler_cannot_give_out_is_refused(hostfile, include):
    asked = LaunchOptions(script="t.py", emit="slurm", include=include, no_ssh=True, node_rank=0, master_addr="w0")
    job = plan_launch(replace(asked, no_ssh=False, node_rank=None), replace(FACTS, hostfile=hostfile)).job
    with pytest.raises(UsageError, match=r"--emit: a scheduler gives every node the same number of devices.*w1: "):
        emit_slurm(job, asked)


def test_bound_cores_are_in_what_would_run():
    launch = plan_launch(LaunchOptions(script="t.py", num_gpus=2, bind_cores_to_rank=True), FACTS)
    assert "numactl -C CORES" in describe(launch)
    assert "numactl" not in describe(plan_launch(LaunchOptions(script="t.py", num_gpus=2), FACTS))


def test_ranks_look_at_the_drop_in_first():
    assert with_drop_in({})["PYTHONPATH"] == str(DROP_IN)
    assert with_drop_in({"PYTHONPATH": "/a:/b"})["PYTHONPATH"] == f"{DROP_IN}:/a:/b"
    assert (DROP_IN / "deepspeed" / "__init__.py").is_file() and next(DROP_IN.glob("deepspeed-*.dist-info/METADATA"))
