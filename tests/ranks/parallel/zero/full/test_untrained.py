"""Models that an engine has without an optimizer, such as references: sharded, evaluated, written to, trained later."""

import pytest
import torch

import mizzen
from mizzen import zero
from mizzen.errors import ConfigError
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from ranks.parallel.zero.full.models import MODELS, rows

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


def build():
    torch.manual_seed(3)
    return MODELS["Base"]()


def reference() -> dict:
    plain, model = build(), build()
    engine, optimizer, *_ = mizzen.initialize(model=model, config=CONFIG)
    rank, data = engine.global_rank, rows(0, engine.global_rank)
    found = {"optimizer": optimizer, "sharded": all(is_sharded(p) for p in model.parameters())}
    found["still wants gradients"] = all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        found["output"] = torch.allclose(engine(data), plain(data), atol=1e-6)
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if rank == 1:
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
        found["written"] = torch.allclose(engine(data), plain(data), atol=1e-6)
    # An optimizer that was made for the sharded parameters goes on with those of the next engine.
    later = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    engine, *_ = mizzen.initialize(model=model, config=CONFIG, optimizer=later)
    engine.backward(engine(data).square().mean())
    engine.step()
    sum(plain(rows(0, each)).square().mean() for each in range(engine.world_size)).div(engine.world_size).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found["trained"] = all(
        torch.allclose(zero.safe_get_full_fp32_param(mine), theirs, atol=1e-6)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return found


def test_a_model_without_an_optimizer_is_sharded_and_may_be_trained_later(world):
    for found in world(2).run(reference):
        assert found == {
            "optimizer": None, "sharded": True, "still wants gradients": True, "output": True, "written": True,
            "trained": True,
        }  # fmt: skip


def encoded() -> list[bool]:
    """A part of the model on its own, as generation calls an encoder; its parameters belong to the whole."""
    plain, model = build(), build()
    engine, *_ = mizzen.initialize(model=model, config=CONFIG, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    data = rows(0, engine.global_rank)
    with torch.no_grad():
        return [torch.allclose(model.first(data), plain.first(data), atol=1e-6)]


def test_a_part_of_a_model_may_be_called_on_its_own_in_evaluation(world):
    assert world(2).run(encoded) == [[True], [True]]


def boundaries(folder) -> list[bool]:
    """A client that sets the boundary: an epoch that ends early leaves no accumulation open."""
    model = build()
    engine, *_ = mizzen.initialize(
        model=model,
        config=CONFIG | {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}},
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    found = []
    for is_last in (False, True, True):
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(engine(rows(0, engine.global_rank)).square().mean())
        found.append(engine.is_accumulating)
        if is_last:
            engine.step()
            found.append(engine.is_accumulating)
    engine.save_checkpoint(folder)
    return found


def test_a_boundary_that_a_client_sets_closes_an_accumulation(world, tmp_path):
    assert world(2).run(boundaries, tmp_path) == [[True, True, False, True, False]] * 2


def moved() -> list:
    model = build()
    engine, *_ = mizzen.initialize(model=model, config=CONFIG, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = [id(parameter) for parameter in model.parameters()]
    found = [model.cpu() is model, model.to("cpu", torch.float32) is model, type(model).__name__]
    with pytest.raises(mizzen.UsageError, match="cannot become torch.bfloat16"):
        model.bfloat16()
    found.append(before == [id(parameter) for parameter in model.parameters()])
    engine.destroy()
    return [*found, type(model) is MODELS["Base"], next(model.bfloat16().parameters()).dtype == torch.bfloat16]


def test_a_sharded_model_stays_where_and_as_it_is(world):
    assert world(2).run(moved) == [[True, True, "Base", True, True, True]] * 2


SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}


def scheduled() -> tuple:
    """What clients do who take the optimizer out of a file and leave the schedule, whose length they do not know."""
    config = {**CONFIG, "scheduler": SCHEDULE}
    with zero.Init(config_dict_or_path=config):
        model = build()
    engine, optimizer, _, scheduler = mizzen.initialize(model=model, config=config)
    with torch.no_grad():
        engine(rows(0, engine.global_rank))
    try:
        mizzen.initialize(model=build(), config={**config, "optimizer": {"type": "Adam"}})
    except ConfigError as error:
        return optimizer, scheduler, str(error)
    return optimizer, scheduler, "no error"


def test_a_schedule_of_the_file_is_no_matter_to_an_engine_that_does_not_train(world):
    for optimizer, scheduler, error in world(2).run(scheduled):
        assert optimizer is None and scheduler is None
        assert error == 'scheduler.params.total_num_steps: "auto", and no client has filled it in: give a value'
