"""The folder of a process: it goes at the end, and what killed processes leave goes at the next start."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mizzen.offload.swap_folder import OWNER, PREFIX, SwapFolder, remove_stale

HOLD = """
import sys, time
from mizzen.offload.swap_folder import SwapFolder
folder = SwapFolder(sys.argv[1])
(folder.path / "states").write_bytes(b"x" * 100)
print(folder.path, flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
if sys.argv[2] == "fork":
    import os
    if not (child := os.fork()):
        sys.exit()  # with what is done at exit
    os.waitpid(child, 0)
    print(folder.path.exists(), flush=True)
"""


def start(below, how):
    return subprocess.Popen([sys.executable, "-c", HOLD, str(below), how], stdout=subprocess.PIPE, text=True)


def swap_folders(below):
    return [path for path in below.iterdir() if path.name.startswith(PREFIX)]


def test_the_name_says_whose_it_is_and_closing_removes_it(tmp_path):
    folder = SwapFolder(tmp_path / "new" / "one")
    assert f"-pid{os.getpid()}-" in folder.path.name and "-rank0-" in folder.path.name
    (folder.path / "states").write_bytes(b"x")
    folder.close()
    folder.close()
    assert not list((tmp_path / "new" / "one").iterdir())


def test_it_is_removed_when_nobody_holds_it(tmp_path):
    folder = SwapFolder(tmp_path)
    del folder
    assert not list(tmp_path.iterdir())


def test_it_is_removed_at_exit(tmp_path):
    process = start(tmp_path, "leave")
    said, _ = process.communicate()
    assert process.returncode == 0 and str(tmp_path) in said
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_it_to_its_parent(tmp_path):
    said, _ = start(tmp_path, "fork").communicate()
    assert said.split()[1] == "True"
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_goes_and_what_lives_stays(tmp_path):
    dead, alive = start(tmp_path, "stay"), start(tmp_path, "stay")
    try:
        left, kept = (process.stdout.readline().strip() for process in (dead, alive))
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert os.path.exists(left)
        mine = SwapFolder(tmp_path)
        assert {str(path) for path in swap_folders(tmp_path)} == {kept, str(mine.path)}
        another = SwapFolder(tmp_path)  # of this very process
        assert mine.path.exists() and another.path != mine.path
        mine.close()
        another.close()
    finally:
        for process in (dead, alive):
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize(("age", "goes"), [(0, False), (4000, True)])
def test_a_folder_without_an_owner_goes_when_it_is_old(tmp_path, age, goes):
    folder = SwapFolder(tmp_path)
    (folder.path / OWNER).unlink()
    os.utime(folder.path, (time.time() - age,) * 2)
    assert remove_stale(tmp_path) == ([folder.path] if goes else [])
    folder.close()


def test_what_is_not_a_swap_folder_of_this_host_stays(tmp_path):
    for name in (f"{PREFIX}elsewhere.example-rank0-pid1-00000000", "models", f"{PREFIX}notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).touch()
    assert remove_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_one_that_was_taken_for_stale_before_its_lock_is_made_anew(tmp_path, monkeypatch):
    import fcntl
    import shutil

    real, taken = fcntl.flock, []

    def lock(descriptor, how):
        if not taken:
            taken.extend(swap_folders(tmp_path))
            shutil.rmtree(taken[0])
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    folder = SwapFolder(tmp_path)
    assert [folder.path] == swap_folders(tmp_path) and taken != [folder.path]
    folder.close()
