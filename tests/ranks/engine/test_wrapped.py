"""A model that something else has wrapped is refused by name, with what to give instead."""

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mizzen
from mizzen.errors import UsageError

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def with_one_wrapped_inside():
    model = layers()
    model[1] = DistributedDataParallel(model[1])
    return model


def with_one_sharded_inside():
    model = layers()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def an_engine(stage=0):
    return mizzen.initialize(model=layers(), config=CONFIG | {"zero_optimization": {"stage": stage}})[0]


WRAPPED = {
    "model= is wrapped: it is of DistributedDataParallel.* its .module": lambda: DistributedDataParallel(layers()),
    "model= is wrapped: it is of DataParallel.* its .module": lambda: DataParallel(layers()),
    "model= is wrapped: it is of FullyShardedDataParallel.* as it was before": lambda: FullyShardedDataParallel(
        layers(), device_id=torch.device("cpu")
    ),
    r"'0' in the model is wrapped: it is of FSDPModule.* before fully_shard\(\)": with_one_sharded_inside,
    "'1' in the model is wrapped: it is of DistributedDataParallel": with_one_wrapped_inside,
    "model= is wrapped: it is of Engine.* its .module": an_engine,
}


def refusals():
    found = {}
    for words, make in WRAPPED.items():
        model = make()
        try:
            mizzen.initialize(model=model, config=CONFIG)
            found[words] = "nothing"
        except UsageError as error:
            found[words] = str(error)
    for stage in (0, 3):  # what an engine of ours has is given to another one as it is
        engine = an_engine(stage)
        again, *_ = mizzen.initialize(model=engine.module, config=CONFIG)
        again.backward(again(torch.ones(1, 4)).sum())
        assert again.step().applied
    return found


def test_a_wrapped_model_is_refused_on_every_rank(world):
    for found in world(2).run(refusals):
        for words, error in found.items():
            assert re.match(words, error), error
