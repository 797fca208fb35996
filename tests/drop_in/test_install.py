"""The three ways in, in an environment of their own into which mizzen is installed from its wheel."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest

from house.tree import ROOT
from mizzen.launcher.job import DROP_IN

INFO = next(DROP_IN.glob("*.dist-info"))
PROJECT = tomllib.loads((ROOT / "compat" / "pyproject.toml").read_text())["project"]
PIP = ("-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
MADE = ("*.egg-info", "build", "__pycache__")
"""What others make in the folders of the source, at any moment."""
ANEW = (*OFFLINE, "--ignore-installed")
"""The packages beside an environment are not to be touched."""


class Environment:
    """A virtual environment that sees the packages of this one, but not what is on this one's path."""

    def __init__(self, folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder, self.programs = folder, folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        beside = Path(find_spec("pip").origin).parents[1]
        (self.packages / "more.pth").write_text(f"{beside}\n")

    def run(self, program, *words, code=0, cwd=None):
        variables = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            [str(self.programs / program), *map(str, words)],
            env={**variables, "PATH": path, "MIZZEN_ACCELERATOR": "cpu"},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def pip(self, *words):
        return subprocess.run(
            [sys.executable, *PIP, "--python", str(self.programs / "python"), *map(str, words)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    def files(self):
        return {path for path in self.folder.rglob("*") if path.name != "__pycache__" and path.suffix != ".pyc"}

    def pretend(self, version):
        """Another distribution of that name."""
        (self.packages / "deepspeed").mkdir()
        (self.packages / "deepspeed" / "__init__.py").write_text("")
        info = self.packages / f"deepspeed-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
        record = ["deepspeed/__init__.py,,", f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]
        (info / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"
    for name in ("src", "compat"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns(*MADE))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, *PIP, "wheel", *OFFLINE, "-w", str(folder), str(source)], check=True)
    made = Environment(folder / "environment")
    made.pip("install", *ANEW, *folder.glob("*.whl"))
    return made


@pytest.fixture(autouse=True)
def left_as_it_was(environment):
    before = environment.files()
    yield
    assert environment.files() == before


SEEN = """
import json, sys
from importlib import metadata
import deepspeed
from deepspeed.ops.adam import FusedAdam
print(json.dumps([deepspeed.__version__, metadata.version("deepspeed"), deepspeed.__file__, FusedAdam.__name__]))
"""


def seen(environment):
    return json.loads(environment.run("python", "-c", SEEN))


@pytest.mark.wide  # tests/unit/cli/test_compat.py has what the command asks of pip
def test_install_and_remove(environment):
    assert "no package deepspeed" in environment.run("mizzen", "compat", "status")
    text = environment.run("mizzen", "compat", "install")
    assert "installed deepspeed 0.19.8+mizzen (the drop-in)" in text and "ds_report" in text
    assert seen(environment) == [
        *["0.19.8+mizzen"] * 2,
        str(environment.packages / "deepspeed" / "__init__.py"),
        "FusedAdam",
    ]
    environment.run("mizzen", "compat", "install")  # once more, over itself
    assert "the drop-in" in environment.run("mizzen", "compat", "status")
    removed = environment.run("mizzen", "compat", "remove")
    assert "removed deepspeed 0.19.8+mizzen (the drop-in)" in removed
    assert not list(environment.packages.glob("deepspeed*"))  # what Python has compiled is gone, too
    environment.run("python", "-c", "import deepspeed", code=1)
    assert "nothing to remove" in environment.run("mizzen", "compat", "remove", code=2)


@pytest.mark.wide
def test_pip_sees_it_and_can_uninstall_it(environment):
    environment.run("mizzen", "compat", "install")
    assert "0.19.8+mizzen" in environment.pip("list")
    shown = environment.pip("show", "--files", "deepspeed")
    assert "Requires: mizzen" in shown and "../../../bin/ds_report" in shown
    seen(environment)
    environment.pip("uninstall", "--yes", "deepspeed")
    assert not list(environment.packages.glob("deepspeed*"))


@pytest.mark.wide
def test_pip_installs_it_from_its_folder(environment, tmp_path):
    shutil.copytree(ROOT / "compat", tmp_path / "compat", ignore=shutil.ignore_patterns(*MADE))
    environment.pip("install", *ANEW, tmp_path / "compat")
    assert seen(environment)[0] == "0.19.8+mizzen"
    installed = {path.relative_to(environment.packages) for path in (environment.packages / "deepspeed").rglob("*.py")}
    assert installed == {path.relative_to(ROOT / "compat") for path in (ROOT / "compat" / "deepspeed").rglob("*.py")}
    assert "(the drop-in)" in environment.run("mizzen", "compat", "status")
    environment.run("mizzen", "compat", "remove")


@pytest.mark.wide
def test_another_package_of_that_name_is_left_alone_unless_told(environment):
    environment.pretend("0.19.8")
    text = environment.run("mizzen", "compat", "install", code=2)
    assert "deepspeed 0.19.8 (not the drop-in) is installed" in text and "--force" in text
    assert "pip uninstall deepspeed" in environment.run("mizzen", "compat", "remove", code=2)
    assert (environment.packages / "deepspeed-0.19.8.dist-info").is_dir()
    environment.run("mizzen", "compat", "install", "--force")
    assert not (environment.packages / "deepspeed-0.19.8.dist-info").exists()
    assert seen(environment)[0] == "0.19.8+mizzen"
    environment.run("mizzen", "compat", "remove")


@pytest.mark.wide
def test_a_folder_without_a_record_is_left_alone(environment):
    folder = environment.packages / "deepspeed"
    folder.mkdir()
    assert "belongs to no installed package" in environment.run("mizzen", "compat", "install", code=2)
    folder.rmdir()


@pytest.mark.wide  # tests/unit/launcher/test_launch.py has the path that such a job gets
def test_a_job_alone_finds_it(environment, tmp_path):
    environment.pretend("0.19.8")  # also where the real one is installed
    (tmp_path / "script.py").write_text(SEEN)
    text = environment.run("mizzen", "run", "--drop-in", "--num_gpus", 2, "--show", "all", "script.py", cwd=tmp_path)
    inside = str(environment.packages / "mizzen" / "drop_in" / "deepspeed" / "__init__.py")
    assert text.count(inside) == 2 and text.count("0.19.8+mizzen") == 4
    assert environment.run("python", "-c", "import deepspeed; print(deepspeed.__file__)").strip() != inside
    shutil.rmtree(environment.packages / "deepspeed")
    shutil.rmtree(environment.packages / "deepspeed-0.19.8.dist-info")


@pytest.mark.wide
def test_programs(environment, tmp_path):
    environment.run("mizzen", "compat", "install")
    (tmp_path / "script.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])\n")
    words = ("--num_gpus=2", "--num_nodes", -1, "--show", "all", "script.py", "-1")
    said = environment.run("deepspeed", *words, cwd=tmp_path)
    assert "rank 0 ['--local_rank=0', '-1']" in said and "rank 1 ['--local_rank=1', '-1']" in said
    assert "usage: mizzen run" in environment.run("ds")
    assert "torch" in environment.run("ds_report", "--hide_operator_status", "--hide_errors_and_warnings")
    for name, other in (("deepspeed", "ds"), ("deepspeed", "deepspeed.pt"), ("ds_report", "dsr")):
        assert (environment.programs / name).read_text() == (environment.programs / other).read_text()
    elastic = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2], "version": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"elasticity": elastic}))
    assert "valid_gpus" in environment.run("ds_elastic", "-c", "config.json", "-w", 0, cwd=tmp_path)
    assert "no such file" in environment.run("ds_ssh", "-f", "nothing", "hostname", code=2)
    assert "all_reduce" in environment.run("ds_bench", "--operations", "all_reduce", "--sizes", "4KiB", "--trials", 2)
    words = ("--folder", tmp_path, "--io_size", "1M", "--block_size", "64K", "--queue_depth", 2, "--loops", 1)
    assert "write GB/s" in environment.run("ds_io", *words)
    said = environment.run("ds_nvme_tune", "--nvme_dir", tmp_path, "--io_size", "1M", "--log_dir", tmp_path / "logs")
    assert "Best performance (GB/sec): read =" in said and '"block_size"' in said
    environment.run("mizzen", "compat", "remove")


@pytest.mark.wide
def test_the_launcher_s_own_module(environment, tmp_path):
    environment.run("mizzen", "compat", "install")
    (tmp_path / "script.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])\n")
    encode = "from deepspeed.launcher.runner import encode_world_info as e; print(e({'localhost': [0]}))"
    word = environment.run("python", "-c", encode).strip()
    launch = ("-m", "deepspeed.launcher.launch", f"--world_info={word}", "--master_addr=127.0.0.1")
    said = environment.run("python", *launch, "--no_local_rank", "script.py", "--x", cwd=tmp_path)
    assert said.strip() == "rank 0 ['--x']"
    assert "is no base64" in environment.run("python", *launch[:2], "--world_info=?", "script.py", code=2)
    said = environment.run("python", "-m", "deepspeed.checkpoint.ds_to_universal", code=2)
    assert "nothing to convert" in said
    environment.run("mizzen", "compat", "remove")


def test_the_metadata_that_the_wheel_carries_is_that_of_the_distribution():
    fields = dict(line.split(": ", 1) for line in (INFO / "METADATA").read_text().splitlines() if line)
    assert fields["Name"] == PROJECT["name"]
    assert fields["Version"] == PROJECT["version"] == INFO.name.removeprefix("deepspeed-").removesuffix(".dist-info")
    assert fields["Summary"] == PROJECT["description"]
    assert fields["License"] == PROJECT["license"]
    assert fields["Requires-Python"] == PROJECT["requires-python"]
    assert [fields["Requires-Dist"]] == PROJECT["dependencies"]
    points = ConfigParser(delimiters=("=",))
    points.read(INFO / "entry_points.txt")
    assert dict(points["console_scripts"]) == PROJECT["scripts"]


def test_there_is_one_copy_of_the_source():
    link = DROP_IN / "deepspeed"
    assert link.is_symlink() and link.resolve() == (ROOT / "compat" / "deepspeed").resolve()
    assert Path(os.readlink(link)).parts[:3] == ("..", "..", "..")
