"""A checkpoint of any layout of data ranks, tensor ranks, stages and ZeRO stage loads into any other, to the bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mizzen
from breadth import FULL, choice
from parity.decoders import Decoder
from parity.test_tensor import config, walk

LAYOUTS = [
    # data ranks, tensor ranks, stages, ZeRO stage
    (1, 1, 1, 0),
    (1, 2, 2, 1),
    (2, 1, 1, 3),
    (2, 2, 2, 1),
    (1, 2, 1, 0),
    (2, 1, 2, 3),
    (2, 2, 1, 3),
    (1, 1, 2, 0),
    (2, 2, 2, 3),
    (2, 1, 1, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 2),
]
STATES = ("exp_avg", "exp_avg_sq")
TIED = {"head.weight": "embed.weight"}
BEFORE = 2
"""Steps before a save."""


def start(dp: int, tp: int, pp: int, stage: int, model: torch.nn.Module | None = None):
    micros = {"accumulation": 2} if pp > 1 else {}
    settings = config(tp, stage, "AdamW", **micros, pipeline_parallel_size=pp)
    return mizzen.initialize(model=model or Decoder(), config=settings)[0]


def state_of(engine) -> dict:
    """Values and moments of everything that this rank has a part of, whole, by the names of the whole model."""
    found = {}
    for given, parameter in engine.module.named_parameters():
        name = TIED.get(given, given)
        found[name] = mizzen.zero.safe_get_full_fp32_param(parameter).clone()
        for state in STATES:
            found[f"{name} {state}"] = mizzen.zero.safe_get_full_optimizer_state(parameter, state).clone()
    return found


def save(folder: str, *layout) -> tuple:
    engine = start(*layout)
    walk(engine, range(BEFORE))
    assert engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder, "whole.safetensors")
    return state_of(engine), walk(engine, [BEFORE])[0]


def resume(folder: str, *layout) -> tuple:
    engine = start(*layout)
    assert engine.load_checkpoint(folder)[0] is not None
    assert engine.load_report.is_exact, engine.load_report
    return state_of(engine), walk(engine, [BEFORE])[0]


def begin_from_export(folder: str, *layout) -> dict:
    """A model that is built from what was exported, at another layout."""
    model = Decoder()
    model.load_state_dict(load_file(f"{folder}/whole.safetensors"), strict=False)
    engine = start(*layout, model=model)
    return {
        TIED.get(name, name): mizzen.zero.safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
    }


def ranks(layout: tuple) -> int:
    dp, tp, pp, _ = layout
    return dp * tp * pp


def together(found: list) -> dict:
    """What all ranks have, after making sure that those who have the same have it alike."""
    whole: dict = {}
    for each in found:
        for name, value in each.items():
            assert torch.equal(whole.setdefault(name, value), value), name
    return whole


def others(number: int) -> list[tuple]:
    """The three layouts into which that of a number is loaded: together every one is loaded into three times."""
    return [LAYOUTS[(number + step) % len(LAYOUTS)] for step in (1, 4, 7)]


# In `make test` tests/ranks/checkpoint/test_layouts.py and tests/parity/test_tensor.py keep this for fewer axes.
@pytest.mark.parametrize("number", range(len(LAYOUTS)) if FULL else choice([4, 10], []))
def test_a_checkpoint_of_a_layout_loads_into_three_others(world, tmp_path, number):
    saved = world(ranks(LAYOUTS[number])).run(save, str(tmp_path), *LAYOUTS[number])
    wanted, (loss,) = together([state for state, _ in saved]), saved[0][1]
    assert len(wanted) == 3 * len(list(Decoder().parameters()))
    for layout in others(number):
        found = world(ranks(layout)).run(resume, str(tmp_path), *layout)
        loaded = together([state for state, _ in found])
        assert loaded.keys() == wanted.keys(), layout
        for name, value in wanted.items():
            assert torch.equal(loaded[name], value), (layout, name)
        assert all(again == pytest.approx(loss, rel=1e-5) for _, (again,) in found), layout
    exported = load_file(Path(tmp_path) / "whole.safetensors")
    assert {TIED.get(name, name) for name in exported} == {name for name in wanted if " " not in name}
    assert all(torch.equal(value, wanted[TIED.get(name, name)]) for name, value in exported.items())
    layout = others(number)[0]
    for name, value in together(world(ranks(layout)).run(begin_from_export, str(tmp_path), *layout)).items():
        assert torch.equal(value, wanted[name]), name
