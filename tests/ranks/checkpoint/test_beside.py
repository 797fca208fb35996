"""Saves beside training, and saves that fail: all ranks do the same."""

import threading
import time
from pathlib import Path

import pytest
import torch

from mizzen.checkpoint.folder import committed
from mizzen.comm.communicator import set_patience
from mizzen.errors import CheckpointError
from mizzen.files import watched
from mizzen.launcher.signals import SAVED
from ranks.checkpoint.programs import Case, build, differences, train, warnings_of, whole


def beside_training(folder, policy):
    engine = build(Case(stage=1, checkpoint={"async_save": True, "async_policy": policy}))
    train(engine, 2)
    held = whole(engine)
    gate, started = threading.Event(), threading.Event()

    def slow(operation, path):
        if operation == "write" and path.suffix == ".safetensors":
            started.set()
            gate.wait(60)

    refused = ""
    with watched(slow):
        engine.save_checkpoint(folder, tag="one")
        started.wait(60)
        seen = [each.folder.name for each in committed(Path(folder))]
        losses = train(engine, 2)  # goes on while nothing is written
        if policy == "refuse":
            try:
                engine.save_checkpoint(folder, tag="two")
            except CheckpointError as error:
                refused = str(error)
        gate.set()
        engine.save_checkpoint(folder, tag="three") if policy == "wait" else None
        engine.finish_saving()
    fresh = build(Case(stage=1), seed=5)
    fresh.load_checkpoint(folder, tag="one")
    return seen, differences(held, whole(fresh)), losses == train(fresh, 2), refused


@pytest.mark.parametrize("policy", ["wait", "refuse"])
def test_a_save_beside_training_holds_the_state_of_its_call(world, tmp_path, policy):
    for seen, differing, is_same, refused in world(2).run(beside_training, str(tmp_path), policy):
        assert seen == [] and differing == [] and is_same
        assert bool(refused) == (policy == "refuse")
    names = {each.folder.name for each in committed(tmp_path)}
    assert names == ({"one", "three"} if policy == "wait" else {"one"})


def failing(folder, on_error):
    engine = build(Case(stage=1, checkpoint={"on_save_error": on_error}))
    train(engine, 1)
    engine.save_checkpoint(folder, tag="good")

    def full(operation, path):
        if operation == "write" and path.suffix == ".safetensors" and engine.global_rank == 1:
            raise OSError(28, "No space left on device")

    said = []
    with watched(full):
        for beside in (False, True):
            try:
                said.append(engine.save_checkpoint(folder, tag="bad", async_save=beside))
                engine.saving.background._thread.join() if beside else None
                train(engine, 1)
                said.append("trained")
            except CheckpointError as error:
                said.append(str(error))
    fresh = build(Case(stage=1), seed=5)
    return said, fresh.load_checkpoint(folder)[0], sorted(path.name for path in Path(folder).rglob("*.safetensors"))


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk(world, tmp_path, on_error):
    for said, path, files in world(2).run(failing, str(tmp_path), on_error):
        assert Path(path).name == "good" and len(files) == 2
        if on_error == "continue":
            assert said == [False, "trained", True, "trained"]
        else:
            assert "rank 1" in said[0] and "bytes were still to be written" in said[0] and "free" in said[0]
            assert said[1] is True and "was not saved" in said[2] and "No space left" in said[2]


def one_rank_is_slower(folder):
    """The save is over on rank 1, and not yet on rank 0."""
    engine = build(Case(stage=1, checkpoint={"async_save": True, "async_policy": "refuse"}))
    background, gate, said = engine.saving.background, threading.Event(), ""
    if engine.global_rank == 0:
        start = background.start
        background.start = lambda do: start(lambda: (do(), gate.wait(60)))
    engine.save_checkpoint(folder, tag="one")
    if engine.global_rank == 1:
        background.wait()
    try:
        engine.save_checkpoint(folder, tag="two")
    except CheckpointError as error:
        said = str(error)
    gate.set()
    engine.finish_saving()
    engine.save_checkpoint(folder, tag="three")
    engine.finish_saving()
    return said


def test_ranks_refuse_a_second_save_together(world, tmp_path):
    for said in world(2).run(one_rank_is_slower, str(tmp_path)):
        assert said.startswith("rank 0: a save is still being written") and "async_policy" in said
    assert {each.folder.name for each in committed(tmp_path)} == {"one", "three"}


def one_rank_has_heard(folder, on_error):
    """A save beside training has failed; rank 1 has been told of it, and rank 0 has not yet."""
    engine, said = build(Case(stage=1, checkpoint={"on_save_error": on_error})), []

    def full(operation, path):
        if operation == "write" and path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")

    with watched(full):
        engine.save_checkpoint(folder, tag="bad", async_save=True)
        engine.saving.background._thread.join()
    for call in (engine.finish_saving, lambda: engine.save_checkpoint(folder, tag="next")):
        try:
            said.append(call() if engine.global_rank or call != engine.finish_saving else None)
        except CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_ranks_act_together_on_a_save_that_failed(world, tmp_path, on_error):
    for _, said in world(2).run(one_rank_has_heard, str(tmp_path), on_error):
        assert said is True if on_error == "continue" else "rank 0: the last checkpoint was not saved" in said


def without_memory(folder):
    engine = build(Case(stage=1))
    if engine.global_rank == 1:
        engine.saving.background.staging.copies = lambda items: [].remove("room for a copy")
    try:
        engine.save_checkpoint(folder, async_save=True)
        engine.finish_saving()
    except CheckpointError as error:
        return str(error)


def test_a_rank_without_memory_for_its_copies_tells_the_others(world, tmp_path):
    for said in world(2).run(without_memory, str(tmp_path)):
        assert "nothing was saved: rank 1: ValueError" in said
    assert list(tmp_path.iterdir()) == []


def surprised(folder):
    engine = build(Case(stage=1))

    def broken(operation, path):
        if operation == "write" and path.suffix == ".safetensors" and engine.global_rank == 1:
            raise KeyError("surprise")

    said = []
    with watched(broken):
        for beside in (False, True):
            try:
                engine.save_checkpoint(folder, tag="bad", async_save=beside)
                engine.saving.background._thread.join()
                train(engine, 1)
            except CheckpointError as error:
                said.append(str(error))
    return said


def test_an_error_that_nobody_expects_is_told_to_all_ranks(world, tmp_path):
    for said in world(2).run(surprised, str(tmp_path)):
        assert len(said) == 2 and all("rank 1: KeyError: 'surprise'" in words for words in said)
    assert not (tmp_path / "bad").exists()


def alone(folder):
    set_patience(look=0.5, beat=0.2)
    engine = build(Case(stage=1))
    train(engine, 1)
    if engine.global_rank == 0:
        engine.save_checkpoint(folder)
    else:
        train(engine, 1)


def test_a_save_on_one_rank_only_is_named(world, tmp_path):
    ended = world(2).run(alone, str(tmp_path), expect_failure=True, grace=20)
    said = next(outcome.traceback for outcome in ended if outcome.rank == 0)
    assert "save_checkpoint(): every rank has to make this call" in said
    assert "rank 1" in said


def alone_beside_a_barrier(folder):
    set_patience(look=0.5, beat=0.2)
    engine = build(Case(stage=1))
    if engine.global_rank == 0:
        engine.save_checkpoint(folder)
    else:
        torch.distributed.barrier()


def test_a_save_on_one_rank_only_beside_a_barrier_of_the_script(world, tmp_path):
    ended = world(2).run(alone_beside_a_barrier, str(tmp_path), expect_failure=True, grace=20)
    said = next(outcome.traceback for outcome in ended if outcome.rank == 0)
    assert "save_checkpoint(): every rank has to make this call" in said
    assert "rank 1 waits for rank 0 in torch.distributed.barrier()" in said


def late(folder):
    set_patience(look=0.5, beat=0.2)
    engine = build(Case(stage=1))
    if engine.global_rank == 1:
        time.sleep(2)
    return engine.save_checkpoint(folder)


def test_a_rank_that_is_late_is_no_error(world, tmp_path):
    assert world(2).run(late, str(tmp_path)) == [True, True]


def without_room(folder):
    import mizzen.files

    mizzen.files._room = lambda path: 1000
    said = warnings_of(lambda: build(Case(checkpoint={"dir": folder})))[1]
    engine = build(Case())
    try:
        engine.save_checkpoint(folder)
    except CheckpointError as error:
        return said, str(error)


def test_room_is_looked_at_before_the_first_save(world, tmp_path):
    said, error = world(1).run(without_room, str(tmp_path))[0]
    said = [line for line in said if "has no effect here" not in line]
    assert len(said) == 1 and "has 1,000 bytes free" in said[0]
    assert "needs" in error and "has 1,000 free" in error
    assert list(tmp_path.iterdir()) == []


def leaving(folder, policy, breaks):
    """A request to stop comes while a save beside training is under way, which may fail."""
    engine = build(Case(stage=1, checkpoint={"dir": folder, "async_policy": policy}))
    train(engine, 1)
    gate = threading.Event()

    def slow(operation, path):
        if operation == "write" and path.suffix == ".safetensors" and path.parent.name == "before":
            gate.wait(60)
            if breaks:
                raise OSError(28, "No space left on device")

    with watched(slow):
        engine.save_checkpoint(tag="before", async_save=True)
        threading.Timer(0.5, gate.set).start()
        try:
            engine.stopping._save_and_exit(engine.run_state, engine._save_before_stop)
        except SystemExit as error:
            return error.code


@pytest.mark.parametrize(("policy", "breaks"), [("wait", True), ("refuse", False)])
def test_a_run_that_is_asked_to_stop_saves_after_the_save_that_is_under_way(world, tmp_path, policy, breaks):
    assert world(2).run(leaving, str(tmp_path), policy, breaks) == [SAVED, SAVED]
    names = [each.folder.name for each in committed(tmp_path)]
    assert names == ["global_step1"] if breaks else ["before", "global_step1"]


def destroyed(folder, on_error):
    engine = build(Case(stage=1, checkpoint={"on_save_error": on_error}))

    def full(operation, path):
        if operation == "write" and path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")

    with watched(full):
        engine.save_checkpoint(folder, async_save=True)
        try:
            engine.destroy()
        except CheckpointError as error:
            return str(error)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_the_end_of_an_engine_hears_of_its_last_save(world, tmp_path, on_error):
    for said in world(2).run(destroyed, str(tmp_path), on_error):
        assert said is None if on_error == "continue" else "No space left" in said
