"""A checkpoint saved at any number of ranks and any stage loads at any other, bitwise, and training goes on."""

import pytest

from breadth import BREADTH, FULL, choice
from ranks.checkpoint.programs import Case, load_all, train_and_save

LAYOUTS = {
    "1 rank": (1, Case()),
    "2 ranks, stage 0": (2, Case()),
    "2 ranks, stage 1": (2, Case(stage=1)),
    "2 ranks, stage 2": (2, Case(stage=2)),
    "2 ranks, stage 3": (2, Case(stage=3)),
    "3 ranks, stage 1": (3, Case(stage=1)),
    "3 ranks, stage 3": (3, Case(stage=3)),
    "4 ranks, stage 2": (4, Case(stage=2)),
    "4 ranks, stage 3": (4, Case(stage=3)),
    "4 ranks, stage 3 in 2 copies": (4, Case(stage=3, copies=2)),
}


MORE = [name for number, name in enumerate(LAYOUTS) if number in (0, 1, 4, 5, 7, 9)]
SAVED = [name for number, name in enumerate(LAYOUTS) if number in (5, 9)] if BREADTH == "short" else MORE
SHORT = [name for number, name in enumerate(LAYOUTS) if number in (0, 3, 4)]
"""Of these and two saves `make test` has every pair; `make test-all` has those of six layouts, FULL=1 all."""


@pytest.fixture(scope="module")
def saves(world, tmp_path_factory):
    """One checkpoint of each layout: its folder, what was saved, and the losses that followed."""
    found = {}
    for number, name in enumerate(SAVED):
        size, case = LAYOUTS[name]
        folder = str(tmp_path_factory.mktemp(f"save{number}"))
        held, losses = world(size).run(train_and_save, case, folder, more=1)[0]
        found[name] = (folder, held, losses)
    return found


@pytest.mark.in_parts
@pytest.mark.parametrize("layout", choice(LAYOUTS if FULL else {**dict.fromkeys(SHORT), **dict.fromkeys(MORE)}, SHORT))
def test_any_checkpoint_loads_at_any_layout(world, saves, layout):
    size, case = LAYOUTS[layout]
    given = [(folder, held) for folder, held, _ in saves.values()]
    for rank in world(size).run(load_all, case, given):
        for (name, (_, _, losses)), (_, differing, facts) in zip(saves.items(), rank, strict=True):
            assert differing == [], f"{name} -> {layout}"
            assert facts["steps"] == 3 and facts["samples"] == 36
            assert facts["client"] == {"epoch": 3, "shape": (2, 3)}
            assert facts["losses"] == pytest.approx(losses, rel=1e-5), f"{name} -> {layout}"
            if name == layout:
                assert facts["losses"] == losses
