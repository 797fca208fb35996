"""Engines come and go: what they leave behind in their process, and what they share while they live."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

import mizzen
from breadth import choice
from faults.engines import ENDINGS, engines_in_a_row
from mizzen.checkpoint.folder import committed
from mizzen.comm.communicator import current
from mizzen.files import watched
from ranks.checkpoint.programs import Case, Data, build, train


@pytest.mark.parametrize("stage", choice([0, 1, 2, 3], [3]))
def test_engines_leave_nothing_behind(world, stage):
    """Threads, descriptors, groups and tensors are as many after twelve engines as before."""
    assert world(2).run(engines_in_a_row, stage, ENDINGS, 12) == [{}, {}]


def outlive(stage):
    """The model outlives its engine: what only the engine needs is gone, and another engine may have the model."""
    engine = build(Case(stage=stage))
    train(engine, 1)
    store, model = weakref.ref(engine.stores[0]), engine.module
    del engine
    gc.collect()
    is_gone = store() is None
    train(mizzen.initialize(model=model, config=Case(stage=stage).config, training_data=Data())[0], 1)
    return is_gone


@pytest.mark.parametrize("stage", choice([0, 1, 2], [0, 2]))
def test_a_model_does_not_keep_its_engine(world, stage):
    assert world(2).run(outlive, stage) == [True, True]


def save_both(folder):
    """Two engines of one layout save beside training at once, and the ranks write at different speeds."""
    one, two = (build(Case(stage=1, checkpoint={"async_save": True})) for _ in range(2))
    train(one, 1)
    train(two, 2)
    gate = threading.Event()

    def slow(operation, path):
        if operation == "write" and "one" in path.parts and one.global_rank == 0:
            gate.wait(60)

    threading.Timer(0.3, gate.set).start()
    with watched(slow):
        for tag, engine in (("one", one), ("two", two), ("three", one)):
            engine.save_checkpoint(folder, tag=tag)
        one.finish_saving()
        two.finish_saving()
    return one.mesh is two.mesh, len(current().meshes)


def test_two_engines_save_beside_training_at_once(world, tmp_path):
    assert world(2).run(save_both, str(tmp_path)) == [(True, 1)] * 2
    assert {each.folder.name for each in committed(Path(tmp_path))} == {"one", "two", "three"}


def leave_the_job():
    engine = build(Case(stage=1))
    devices = weakref.ref(engine.mesh.devices)
    engine.destroy()
    del engine
    dist.barrier()
    mizzen.comm.destroy_process_group()
    gc.collect()
    return devices() is None


def test_a_mesh_goes_with_its_job(world):
    assert world(2).run(leave_the_job) == [True, True]
