"""What nobody can mean is answered by an error of ours, before anything is gathered, written or sharded."""

import pytest
import torch
from torch import nn

import mizzen
from mizzen import zero
from ranks.parallel.zero.full.models import Base, Block, rows, start

WRONG = (None, 3, "abc")


def answer(call, *args, **kwargs) -> str:
    """The kind of error; of contexts, when they are entered."""
    try:
        made = call(*args, **kwargs)
        if "__enter__" in dir(made):
            with made:
                pass
    except mizzen.MizzenError:
        return ""
    except Exception as error:  # noqa: BLE001  (the point is to see which)
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def calls(engine):
    """(what, call, arguments) of uses that cannot be."""
    model, weight, whole = engine.module, engine.module.blocks[1].up.weight, torch.ones(16, 8)
    other = Base()
    for wrong in WRONG:
        for name in ("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_local_fp32_param", "facts_of"):
            yield name, getattr(zero, name), (wrong,)
        for name in ("fp32_param", "grad"):
            yield f"set {name}", getattr(zero, f"safe_set_full_{name}"), (weight, wrong)
            yield f"set local {name}", getattr(zero, f"safe_set_local_{name}"), (weight, wrong)
        yield "update", zero.safe_update_full_grad_vectorized, ([weight], wrong)
        yield "gather", zero.GatheredParameters, (wrong,)
        yield "unwrap", zero.unwrap_model_for_generation, (wrong,)
        yield "register", zero.register_external_parameter, (wrong, other.first.weight)
        yield "pin", zero.set_z3_leaf_module, (wrong, True)
        yield "pinned", zero.get_z3_leaf_modules, (wrong,)
        for name in ("", "_by_name", "_by_suffix"):
            yield f"find{name} in", getattr(zero, f"set_z3_leaf_modules{name}"), (wrong, [Block])
            yield f"find{name}", getattr(zero, f"set_z3_leaf_modules{name}"), (other, wrong)
            yield f"find{name} one", getattr(zero, f"set_z3_leaf_modules{name}"), (other, [wrong])
        yield "tiles of", zero.TiledLinear, ([wrong], 4)
        yield "tiles from", zero.TiledLinear(4, 4).copy_params_from, (wrong,)
        yield "tiles take", zero.TiledLinear(4, 4), (wrong,)
        yield "OnDevice", zero.OnDevice, (wrong,)
    for rank in (-1, 2, "0", 1.5, True):
        yield f"modifier {rank}", zero.GatheredParameters, (weight, rank)
        yield f"modifier {rank} of whole ones", zero.GatheredParameters, (other.first.weight, rank)
    yield "gather a model", zero.GatheredParameters, (model,)
    yield "gather a tensor", zero.GatheredParameters, (whole,)
    yield "a shard", zero.safe_set_full_fp32_param, (weight, weight.detach())
    yield "without values", zero.safe_set_full_fp32_param, (weight, whole.to("meta"))
    yield "imaginary", zero.safe_set_full_fp32_param, (weight, whole.to(torch.complex64))
    yield "a layer without weight", zero.TiledLinear(4, 4).copy_params_from, (nn.ReLU(),)
    yield "device", zero.OnDevice, (torch.float32, "nowhere")


INIT = (
    {"module": 3},
    {"dtype": "bf16"},
    {"dtype": torch.int8},
    {"remote_device": "moon"},
    {"data_parallel_group": 3},
    {"config_dict_or_path": {"zero_optimization": 3}},
    {"config_dict_or_path": {"zero_optimization": {"stage": 7}}},
    {"config_dict_or_path": {"zero_optimisation": {}}},
)


def wrong_inputs() -> dict[str, str]:
    engine = start("Base", 3)
    engine.backward(engine(rows(0, engine.global_rank)))
    found = {f"{what} {index}": answer(call, *args) for index, (what, call, args) in enumerate(calls(engine))}
    found |= {str(keys): answer(zero.Init, **keys) for keys in INIT}
    found["dtype stays"] = "" if torch.get_default_dtype() == torch.float32 else "it is another one"
    found["trains"] = "" if engine.step().applied else "not applied"
    return {what: said for what, said in found.items() if said}


def test_wrong_inputs_are_answered_by_us(world):
    assert world(2).run(wrong_inputs) == [{}, {}]


class Wrapping(nn.Module):
    """A model that calls a part of itself `module`."""

    def __init__(self):
        super().__init__()
        self.module = Base()
        self.head = nn.Linear(1, 1)

    def forward(self, data):
        return self.head(self.module(data).view(1, 1)).mean()


def odd_contexts() -> dict[str, bool]:
    engine = start(Wrapping(), 3)
    found = {}
    for what, given in (("engine", engine), ("model", engine.module)):
        with zero.unwrap_model_for_generation(given) as model:
            found[what] = model is engine.module and type(model.head.weight) is nn.Parameter
    context = zero.Init()
    with context:
        with context:
            nn.Sequential(nn.Linear(2, 2))
        model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
        with pytest.raises(mizzen.UsageError, match=r"has shape \[2, 2\]"):
            model[0].weight.data = torch.ones(1)
    found["entered twice"] = zero.facts_of(model[0].weight).status == "sharded"
    return found


def test_contexts_that_are_used_in_odd_ways(world):
    for found in world(2).run(odd_contexts):
        assert [what for what, holds in found.items() if not holds] == []
