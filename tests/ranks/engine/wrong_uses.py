"""Sixty ways to use the library wrongly. Each is a function; what it raises is kept in wrong_uses.txt."""

import argparse

import torch
from torch import nn

import mizzen
from mizzen.config.layout import Layout
from mizzen.config.resolve import Batch

GOOD = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "progress": {"enabled": False},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def engine(**changes):
    return mizzen.initialize(model=model(), config=GOOD | changes)[0]


def with_config(**changes):
    return lambda: mizzen.initialize(model=model(), config=GOOD | changes)


def loss_of(made):
    return made(torch.ones(2, 4)).mean()


def in_no_sync(call):
    def run():
        made = engine(gradient_accumulation_steps=2)
        with made.no_sync():
            call(made)

    return run


def with_loss():
    made = engine()
    return made, loss_of(made)


def buffer_without_memory():
    made = model()
    made.register_buffer("mask", torch.empty(3, device="meta"))
    mizzen.initialize(model=made, config=GOOD)


def second_owner():
    made = engine(scheduler={"type": "WarmupLR", "params": {}})
    for _ in range(2):
        made.backward(loss_of(made))
        made.step()
        made.lr_scheduler.step()


def mixed_backwards():
    made = engine()
    made.backward(loss_of(made))
    loss_of(made).backward()
    made.step()


def stepped_optimizer():
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    mizzen.initialize(model=made, optimizer=optimizer, config=GOOD)


def scheduler_of_another():
    made = model()
    other = torch.optim.SGD(made.parameters(), lr=1.0)
    mizzen.initialize(model=made, config=GOOD, lr_scheduler=torch.optim.lr_scheduler.ConstantLR(other))


def fp16_engine():
    return engine(fp16={"enabled": True, "auto_cast": True})


def scaled_by_nobody():
    made = fp16_engine()
    loss_of(made).backward()
    made.step()


def scale_in_the_middle():
    made = fp16_engine()
    made.backward(loss_of(made))
    made.optimizer.override_loss_scale(8.0)


def in_the_middle():
    made = engine(train_batch_size=4, gradient_accumulation_steps=2)
    made.backward(loss_of(made))
    made.step()
    made.train_batch(iter([torch.ones(2, 4)] * 2))


def frozen_all():
    made = model().requires_grad_(False)
    mizzen.initialize(model=made, config=GOOD)


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        return self.layer(rows)


def no_loss():
    mizzen.initialize(model=NoLoss(), config=GOOD)[0].train_batch(iter([torch.ones(2, 4)]))


def loss_function_with_bare_batch():
    made = mizzen.initialize(model=NoLoss(), config=GOOD)[0]
    made.train_batch(iter([torch.ones(2, 4)]), loss_fn=lambda output, target: output.mean())


def changed_side(index, wants):
    def run():
        made = model()
        made[1].bias.requires_grad_(False)
        made = mizzen.initialize(model=made, config=GOOD)[0]
        made.module[index].bias.requires_grad_(wants)
        made.backward(loss_of(made))
        made.step()

    return run


CASES = {
    "no model": lambda: mizzen.initialize(config=GOOD),
    "model is a dict": lambda: mizzen.initialize(model={}, config=GOOD),
    "no configuration": lambda: mizzen.initialize(model=model()),
    "two configurations": lambda: mizzen.initialize(model=model(), config=GOOD, config_params=GOOD),
    "configuration twice, in args": lambda: mizzen.initialize(
        argparse.Namespace(deepspeed_config="x.json"), model=model(), config=GOOD
    ),
    "missing file": lambda: mizzen.initialize(model=model(), config="nowhere.json"),
    "configuration is a number": lambda: mizzen.initialize(model=model(), config=3),
    "frozen after initialize": changed_side(0, False),
    "thawed after initialize": changed_side(1, True),
    "typo at the top": with_config(gradient_cliping=1.0),
    "typo below": with_config(zero_optimization={"stagge": 2}),
    "stage 4": with_config(zero_optimization={"stage": 4}),
    "stage as text": with_config(zero_optimization={"stage": "2"}),
    "batch does not fit": with_config(train_batch_size=4, train_micro_batch_size_per_gpu=3),
    "no batch size": lambda: mizzen.initialize(model=model(), config={"optimizer": GOOD["optimizer"]}),
    "negative clipping": with_config(gradient_clipping=-1),
    "fp16 and bf16": with_config(fp16={"enabled": True}, bf16={"enabled": True}),
    "bare backward with a loss scale": scaled_by_nobody,
    "loss scale of zero": lambda: engine(fp16={"enabled": True}).optimizer.override_loss_scale(0),
    "loss scale in the middle": scale_in_the_middle,
    "autocast in fp32": with_config(torch_autocast={"enabled": True, "dtype": "fp32"}),
    "autocast in another format": with_config(
        torch_autocast={"enabled": True, "dtype": "fp16"}, bf16={"enabled": True}
    ),
    "fp16 masters without stages": with_config(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
    "tensor parallel": with_config(tensor_parallel={"autotp_size": 1}, pipeline_parallel_size=2),
    "offload": with_config(zero_optimization={"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/x"}}),
    "unknown optimizer": with_config(optimizer={"type": "AdamZ"}),
    "optimizer without type": with_config(optimizer={"params": {"lr": 1}}),
    "optimizer with a typo": with_config(optimizer={"type": "AdamW", "params": {"lrr": 1}}),
    "max_grad_norm": with_config(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}}),
    "OneBitAdam": with_config(optimizer={"type": "OneBitAdam", "params": {}}),
    "negative rate": with_config(optimizer={"type": "AdamW", "params": {"lr": -1.0}}),
    "unknown schedule": with_config(scheduler={"type": "WarmUpLRR"}),
    "schedule with a typo": with_config(scheduler={"type": "WarmupLR", "params": {"warmup_steps": 1}}),
    "schedule without optimizer": lambda: mizzen.initialize(
        model=model(), config={"train_batch_size": 4}, lr_scheduler=lambda optimizer: optimizer
    ),
    "schedule of another optimizer": scheduler_of_another,
    "schedule is a number": lambda: mizzen.initialize(model=model(), config=GOOD, lr_scheduler=3),
    "optimizer is a number": lambda: mizzen.initialize(model=model(), config=GOOD, optimizer=3),
    "callable makes no optimizer": lambda: mizzen.initialize(model=model(), config=GOOD, optimizer=lambda groups: None),
    "optimizer of another model": lambda: mizzen.initialize(
        model=model(), config=GOOD, optimizer=torch.optim.AdamW(model().parameters())
    ),
    "optimizer that has stepped": stepped_optimizer,
    "layers to drop in a model that cannot": with_config(progressive_layer_drop={"enabled": True, "theta": 0.5}),
    "parameters of another model": lambda: mizzen.initialize(
        model=model(), config=GOOD, model_parameters=model().parameters()
    ),
    "parameter twice": lambda: (
        lambda made: mizzen.initialize(
            model=made,
            config=GOOD,
            model_parameters=[{"params": list(made.parameters())}, {"params": [made[0].weight]}],
        )
    )(model()),
    "parameters are numbers": lambda: mizzen.initialize(model=model(), config=GOOD, model_parameters=[1, 2]),
    "parameters are one number": lambda: mizzen.initialize(model=model(), config=GOOD, model_parameters=3),
    "parameters of a group are a number": lambda: mizzen.initialize(
        model=model(), config=GOOD, model_parameters=[{"params": 3}]
    ),
    "mesh is a number": lambda: mizzen.initialize(model=model(), config=GOOD, mesh_param=3),
    "mesh of three axes": lambda: mizzen.initialize(model=model(), config=GOOD, mesh_param=(1, 1, 1)),
    "model without memory": lambda: mizzen.initialize(model=model().to("meta"), config=GOOD),
    "buffer without memory": buffer_without_memory,
    "nothing to train": frozen_all,
    "backward of a vector": lambda: (lambda made: made.backward(made(torch.ones(2, 4))))(engine()),
    "backward of a number": lambda: engine().backward(1.0),
    "backward twice": lambda: (lambda made, loss: (made.backward(loss), made.backward(loss)))(*with_loss()),
    "scale of nothing": lambda: engine().scale(None),
    "backward without graph": lambda: engine().backward(torch.tensor(1.0)),
    "backward without optimizer": lambda: (lambda made: made.backward(loss_of(made)))(
        mizzen.initialize(model=model(), config={"train_batch_size": 4})[0]
    ),
    "step without optimizer": lambda: mizzen.initialize(model=model(), config={"train_batch_size": 4})[0].step(),
    "step without backward": lambda: engine().step(),
    "step in no_sync": in_no_sync(lambda made: made.step()),
    "no_sync in no_sync": in_no_sync(lambda made: made.no_sync().__enter__()),
    "coalesce in no_sync": in_no_sync(lambda made: made.coalesce_grad_reduction().__enter__()),
    "no_sync at stage 2": lambda: engine(zero_optimization={"stage": 2}).no_sync().__enter__(),
    "both kinds of backward": mixed_backwards,
    "a second owner of the schedule": second_owner,
    "boundary in unmanaged mode": lambda: engine(
        managed_gradient_accumulation=False
    ).set_gradient_accumulation_boundary(True),
    "batch size that does not fit": lambda: engine(train_batch_size=4).set_train_batch_size(6 + 1),
    "micro batch of 0": lambda: engine().set_train_micro_batch_size(0),
    "train_batch without data": lambda: engine().train_batch(),
    "train_batch in the middle": in_the_middle,
    "no loss in the output": no_loss,
    "loss function without target": loss_function_with_bare_batch,
    "closure": lambda: engine().optimizer.step(lambda: 0.0),
    "save_checkpoint": lambda: engine().save_checkpoint("x", tag="../x"),
    "offload_states": lambda: engine().offload_states(include=["states"]),
    "compile with a number": lambda: engine().compile(compile_kwargs=3),
    "compile with an unknown argument": lambda: engine().compile("eager", {"speed": 3}),
    "compile with a schedule": lambda: engine().compile(schedule=[]),
    "unknown attribute": lambda: engine().no_such_thing,
    "state that is not kept": lambda: (
        lambda made: (
            made.backward(loss_of(made)),
            made.step(),
            mizzen.zero.safe_get_full_optimizer_state(made.module[0].weight, "momentum"),
        )
    )(engine()),
    "set a value of the wrong shape": lambda: (
        lambda made: mizzen.zero.safe_set_full_fp32_param(made.module[0].weight, torch.ones(3))
    )(engine()),
    "set a value nobody trains": lambda: mizzen.zero.safe_set_full_fp32_param(model()[0].weight, torch.ones(4, 4)),
    "gather a number": lambda: mizzen.zero.safe_get_full_fp32_param(3),
    "world does not fit tp": lambda: Layout.fit(12, tp=8),
    "batch solves to a fraction": lambda: Batch.solve({"train_batch_size": 10}, dp=4),
    "loader of nothing": lambda: engine().deepspeed_io([]),
    "route": lambda: engine().deepspeed_io([1, 2, 3], route="walk"),
}


def collect() -> dict[str, str]:
    """What every wrong use raises."""
    found = {}
    for name, use in CASES.items():
        try:
            use()
        except Exception as error:  # noqa: BLE001  (the point is to see which)
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "nothing was raised"
    return found
