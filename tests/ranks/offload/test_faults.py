"""What goes wrong while states and parameters rest elsewhere: a rank that is killed in a step, and disks that fail."""

import errno
import gc
import itertools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import mizzen
from behind import use_behind
from breadth import FULL, choice
from mizzen import files
from mizzen.accelerator import get_accelerator
from mizzen.engine.offloaded_step import OffloadedStep
from mizzen.errors import FileError, MizzenError, UsageError
from pool import RankFailed
from ranks.offload.test_parameters import FAR, HOST, Model, start, wholes

LOTS = 2
"""Lots that a step has stepped when its rank is killed."""


def take_step(engine, number):
    seed = torch.Generator().manual_seed(10 * number + engine.global_rank)
    engine.backward(engine(torch.randn(2, 8, generator=seed).bfloat16()))
    return engine.step()


def trained(folder, swap, keys, zero, *, dies):
    """Six steps, each of them saved; the fourth may be the last rank's end, between two lots."""
    use_behind()
    zero = {key: {"nvme_path": swap, **value} for key, value in zero.items()}
    engine = start("bf16", keys=keys, **zero)
    engine.load_checkpoint(folder)
    stepped = itertools.count()
    step_lot = OffloadedStep._step_lot

    def dying(self, *arguments):
        step_lot(self, *arguments)
        if next(stepped) == LOTS:
            os.kill(os.getpid(), signal.SIGKILL)

    told = []
    for number in range(engine.global_steps, 6):
        if dies and number == 3 and engine.global_rank == engine.world_size - 1:
            OffloadedStep._step_lot = dying
        told.append((number, str(take_step(engine, number).grad_norm)))
        engine.save_checkpoint(folder)
    values = wholes(engine)
    engine.destroy()
    return told, values


HALF = {"offload": {"device_bytes": 0, "streamed_ratio": 0.5}}
KILLED = {
    "streamed": (HALF, {"offload_optimizer": {"device": "cpu"}, "offload_param": HOST}),
    "files": ({}, {"offload_optimizer": {"device": "nvme"}, "offload_param": FAR}),
}


@pytest.mark.parametrize("name", choice(KILLED, ["files"]))
def test_a_rank_is_killed_in_the_middle_of_a_step_and_the_run_goes_on(world, tmp_path, name):
    swap, case = str(tmp_path / "swap"), KILLED[name]
    whole = world(2).run(trained, str(tmp_path / "whole"), swap, *case, dies=False)
    with pytest.raises(RankFailed) as caught:
        world(2).run(trained, str(tmp_path / "broken"), swap, *case, dies=True)
    assert any("SIGKILL" in each.traceback or "signal 9" in each.traceback for each in caught.value.outcomes)
    left = list(Path(swap).glob("mizzen-swap-*")) if name == "files" else []
    assert bool(left) == (name == "files")  # who was killed has removed nothing
    resumed = world(2).run(trained, str(tmp_path / "broken"), swap, *case, dies=False)
    for (told, values), (rest, after) in zip(whole, resumed, strict=True):
        assert [number for number, _ in rest] == [3, 4, 5]
        assert rest == told[3:]
        assert all(torch.equal(values[key], after[key]) for key in values)
    if name == "files":
        assert not list(Path(swap).glob("mizzen-swap-*"))


class Faults:
    """A hook that fails the call of a given number for files below a folder, counted over all threads."""

    def __init__(self, folder, number, code):
        self.folder, self.number, self.code = folder, number, code
        self.count, self.seen = itertools.count(), 0

    def __call__(self, operation, path):
        if self.folder in str(path):
            place = next(self.count)
            self.seen = max(self.seen, place + 1)
            if place == self.number:
                raise OSError(self.code, os.strerror(self.code))


def run_with(folder, zero, fault):
    """Three steps while one call fails: what is left of them, or the error that ended them."""
    engine, found = None, None
    with files.watched(fault):
        try:
            engine = start("bf16", model=Model(), **{key: {"nvme_path": folder, **each} for key, each in zero.items()})
            for number in range(3):
                take_step(engine, number)
            found = wholes(engine)
        except FileError as error:
            found = str(error)
        try:
            if engine is not None:
                engine.destroy()
        except FileError as error:  # parameters that cannot be read do not come back
            found = str(error)
    return found


def counted(folder, zero):
    """How many calls there are, and what is left where none fails."""
    use_behind()
    counting = Faults(folder, None, 0)
    return run_with(folder, zero, counting), counting.seen


def broken(folder, zero, expected, numbers):
    """How many of the runs in which one call fails ended with an error, and what was wrong with any of them."""
    accelerator, ended, wrong = use_behind(), 0, []
    for number in numbers:
        code = errno.ENOSPC if number % 2 else errno.EIO
        found = run_with(folder, zero, Faults(folder, number, code))
        if isinstance(found, str):
            ended += 1
            if os.strerror(code) not in found or folder not in found:
                wrong.append((number, found))
        elif not all(torch.equal(found[name], expected[name]) for name in expected):
            wrong.append((number, "other values"))
        for _ in range(100):  # a thread that has read or written may be about to let go
            gc.collect()
            left = [*Path(folder).glob("mizzen-swap-*"), *accelerator.locked]
            if not left:
                break
            time.sleep(0.02)
        if left and isinstance(found, str) and "rmdir" not in found and "unlink" not in found:
            wrong.append((number, f"{left} is left"))
        shutil.rmtree(folder)
    return ended, wrong


PLACES = {
    "parameters": {"offload_param": FAR, "offload_optimizer": {"device": "cpu"}},
    "both": {"offload_param": {**FAR, "buffer_count": 2}, "offload_optimizer": {"device": "nvme"}},
}


PARTS = 16
"""All calls, of which there are some hundreds, are in one part or another."""


@pytest.mark.parametrize("part", choice(["some", *range(0, PARTS, 1 if FULL else 4)], ["some"]), ids=str)
@pytest.mark.parametrize("name", choice(PLACES, ["both"]))
def test_a_disk_that_fails_at_any_call_is_an_error_and_never_wrong_values(world, tmp_path, name, part):
    folder, zero = str(tmp_path / "swap"), PLACES[name]
    ((expected, calls),) = world(1).run(counted, folder, zero)
    assert calls >= 200
    numbers = range(3, calls, calls // 10) if part == "some" else range(part, calls, PARTS)
    ((ended, wrong),) = world(1).run(broken, folder, zero, expected, list(numbers))
    assert wrong == []
    assert ended >= 0.5 * len(numbers)


def failed_between_lots(folder):
    """What an engine says of a step that a disk has ended, to whoever would go on or save."""
    use_behind()
    zero = {"offload_param": HOST, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    engine = start("bf16", **zero)
    take_step(engine, 0)

    def fail_reads(operation, path):
        if operation == "read":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with files.watched(fail_reads), pytest.raises(FileError, match="Input/output error"):
        take_step(engine, 1)
    said = []
    for call in (lambda: engine.save_checkpoint(folder), lambda: take_step(engine, 1)):
        with pytest.raises(MizzenError) as caught:
            call()
        said.append((type(caught.value), str(caught.value)))
    return said


def test_after_a_step_that_failed_half_way_nothing_is_saved(world, tmp_path):
    ((saved, stepped),) = world(1).run(failed_between_lots, str(tmp_path))
    assert saved[0] is stepped[0] is UsageError
    assert "save_checkpoint() after a step that has failed half-way: some parameters were stepped" in saved[1]
    assert "Input/output error" in saved[1] and stepped[1].startswith("step() after a step")


def current_devices():
    """The device that the thread of the host's step works on, where this rank has another than the first."""
    accelerator = use_behind()
    accelerator.set_device(3)
    seen, set_device = [], accelerator.set_device
    accelerator.set_device = lambda index: seen.append(index) or set_device(index)
    engine = start("bf16", offload_optimizer={"device": "cpu"})
    take_step(engine, 0)
    return seen[-1:], get_accelerator() is accelerator and mizzen.accelerator.get_accelerator().current_device()


def test_the_thread_of_the_host_works_on_the_device_of_its_rank(world):
    for seen, index in world(2).run(current_devices):
        assert seen == [index]
