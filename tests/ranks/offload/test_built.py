"""Models that are built where their parameters are to rest have the weights of the plain build, and train alike."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mizzen
from behind import use_behind
from mizzen import zero
from mizzen.errors import FileError
from mizzen.files import watched
from mizzen.parallel.zero.full.init import BuiltShard
from mizzen.parallel.zero.full.sharded_parameter import record_of
from ranks.offload.test_parameters import FAR, HOST, Model, start, train_model, wholes


def built(remote, param, folder):
    expected = start("bf16")
    told = train_model(expected, "bf16", steps=3)
    left = wholes(expected)
    expected.destroy()
    use_behind()
    sections = {"nvme_path": folder, **param}
    keys = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "offload_param": sections}}
    with zero.Init(remote_device=remote, config_dict_or_path=keys):
        model = Model()
    early = [record_of(p) for p in model.parameters()]
    assert all(isinstance(each, BuiltShard) for each in early)
    places = {each.shard.untyped_storage().resizable() for each in early}
    plain = Model()
    differ = [
        name
        for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(value.detach().clone(), other)
    ]
    engine = start("bf16", model=model, offload_param=sections, offload_optimizer={"device": "cpu"})
    same = train_model(engine, "bf16", steps=3) == told
    values = wholes(engine)
    engine.destroy()
    return places, differ, same, [name for name in left if not torch.equal(values[name], left[name])]


@pytest.mark.parametrize(("ranks", "remote", "param"), [(1, "cpu", HOST), (2, "nvme", FAR), (1, None, FAR)])
def test_a_model_is_built_where_it_rests(world, tmp_path, ranks, remote, param):
    for places, differ, same, different in world(ranks).run(built, remote, param, str(tmp_path)):
        assert places == {param is HOST}
        assert differ == []
        assert same
        assert different == []
    assert not list(Path(tmp_path).glob("mizzen-swap-*"))


def refused():
    use_behind()
    with pytest.raises(mizzen.errors.UsageError, match="nvme_path"):
        zero.Init(remote_device="nvme")
    return True


def test_nvme_needs_a_path(world):
    assert world(1).run(refused) == [True]


def read_from_files(folder, param):
    use_behind()
    with torch.device("meta"):
        model = Model()
    sections = {"nvme_path": folder, **param}
    keys = {"checkpoint": {"weights": f"{folder}/weights"}}
    engine = start("bf16", model=model, keys=keys, offload_param=sections, offload_optimizer={"device": "cpu"})
    return wholes(engine)


@pytest.mark.parametrize(("ranks", "param"), [(1, HOST), (2, FAR)])
def test_weights_are_read_from_files_to_where_they_rest(world, tmp_path, ranks, param):
    (tmp_path / "weights").mkdir()
    values = {name: value.detach().clone() for name, value in Model().named_parameters()}
    save_file(values, tmp_path / "weights" / "model.safetensors")
    for found in world(ranks).run(read_from_files, str(tmp_path), param):
        assert all(torch.equal(found[name].bfloat16(), value.bfloat16()) for name, value in values.items())


def on_a_full_disk(folder):
    """What building a model says whose shards go to a disk without room."""

    def refuse(operation, path):
        if operation == "allocate":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}},
    }
    with watched(refuse), pytest.raises(FileError) as caught, zero.Init(config_dict_or_path=config):
        torch.nn.Linear(64, 64)
    return str(caught.value), os.listdir(folder)


def test_a_full_disk_is_an_error_that_says_so(world, tmp_path):
    ((said, left),) = world(1).run(on_a_full_disk, str(tmp_path))
    assert re.search(r"allocate .*mizzen-swap-shard-.*No space left.*bytes were still to be written", said)
    assert left == []
