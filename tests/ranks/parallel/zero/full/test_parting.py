"""Ranks that do not run the same: the right gradient where that is possible, otherwise an error that names them.

Twelve programs. None of them may hang, abort, or go on with wrong numbers.
"""

import re

import pytest
import torch
from torch import nn

from mizzen import zero
from ranks.parallel.zero.full.models import Base, Block, rows, start, train

RANKS = 2


def rank():
    return torch.distributed.get_rank()


class Experts(nn.Module):
    """A block whose tokens go to one of two experts; on each rank another one gets none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden):
        chosen = torch.full((len(hidden),), rank() if torch.distributed.is_initialized() else 0)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                out[chosen == number] = expert(hidden[chosen == number])
        return hidden + out


class Mixture(Base):
    def __init__(self):
        super().__init__(block=Experts)


class Tower(Base):
    """Rows of which only the second rank's go through a tower of blocks."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(Block(), Block())

    def hidden(self, rows):
        hidden = super().hidden(rows)
        return self.tower(hidden) if rank() else hidden


class Skipping(Base):
    """Leaves out blocks by rank."""

    skipped = ({1}, set())

    def hidden(self, rows):
        hidden = self.first(rows)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped[rank()]:
                hidden = block(hidden)
        return hidden


class Different(Skipping):
    skipped = ({1}, {0})


class Leaving(Skipping):
    skipped = ({1, 2}, set())


def train_model(kind, stage, pinned):
    torch.manual_seed(3)
    model = kind()
    if pinned:
        zero.set_z3_leaf_module(model.inner if isinstance(model, Wrapped) else model, True)
    return train(model, stage)


class Wrapped(nn.Module):
    """A model inside a module, so that it can be pinned as one unit."""

    def __init__(self):
        super().__init__()
        self.inner = Tower()

    def forward(self, rows):
        return self.inner(rows)


@pytest.mark.parametrize(("kind", "pinned"), [(Mixture, False), (Wrapped, True)])
def test_a_branch_inside_a_unit_gets_the_right_gradient(world, kind, pinned):
    """An expert without tokens; and a tower that some ranks skip, in one unit with what they do not skip."""
    expected = world(RANKS).run(train_model, kind, 0, False)[0]
    for losses, norms, values in world(RANKS).run(train_model, kind, 3, pinned):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert norms == pytest.approx(expected[1], rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[2][name], rtol=1e-5, atol=1e-6)


def step_of(kind):
    engine = start(kind(), 3)
    engine.backward(engine(rows(0, engine.global_rank)))
    engine.step()


@pytest.mark.parametrize("kind", [Skipping, Different, Leaving, Tower])
def test_a_branch_across_units_is_named(world, kind):
    """One rank skips a block; each skips another one; one leaves early; one has a tower."""
    ended = world(RANKS).run(step_of, kind, expect_failure=True, grace=30)
    assert {outcome.error_type for outcome in ended} == {"CommError"}
    named = [outcome.traceback for outcome in ended if "parted ways" in outcome.traceback]
    assert named
    for text in named:
        assert "rank 0 at step" in text
        assert "rank 1 at step" in text
        assert "leaf_module" in text


def uneven_validation():
    engine = start("Base", 3)
    with torch.no_grad():
        for step in range(3 - rank()):
            engine(rows(step, rank()))
    engine.backward(engine(rows(0, rank())))
    engine.step()


def generate_alone():
    engine = start("Base", 3)
    if rank() == 0:
        with torch.no_grad():
            for step in range(3):
                engine(rows(step, 0))
    engine.backward(engine(rows(0, rank())))
    engine.step()


def one_fails():
    engine = start("Base", 3)
    data = rows(0, rank())
    engine.backward(engine(data))
    engine.step()
    if rank() == 1:
        raise ValueError("a bad sample")
    engine.backward(engine(data))


def no_backward():
    engine = start("Base", 3)
    loss = engine(rows(0, rank()))
    if rank() == 0:
        engine.backward(loss)
    engine(rows(1, rank()))


def saves_alone():
    engine = start("Base", 3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    if rank() == 0:
        engine._zero3_consolidated_16bit_state_dict()
    engine.backward(engine(rows(0, rank())))
    engine.step()


def gives_back_alone():
    engine = start("Base", 3)
    if rank() == 0:
        engine.destroy()
    engine(rows(0, rank()))


def test_a_rank_that_gathers_the_model_alone_is_named(world):
    first, second = world(2).run(saves_alone, expect_failure=True, grace=30)
    assert first.error_type == second.error_type == "CommError"
    assert "gathering the model: every rank has to make this call, and not all have" in first.traceback
    for outcome in (first, second):
        said = outcome.traceback.partition("the ranks have parted ways")[2]
        assert "rank 0 at all_gather_object; rank 1 at step 0, unit '(the rest)', phase 'forward'" in said


@pytest.mark.parametrize(
    ("program", "first", "second"),
    [
        (uneven_validation, "evaluation", "forward"),
        (generate_alone, "evaluation", "forward"),
        (no_backward, "backward", "forward"),
        (gives_back_alone, "giving back", "forward"),
    ],
)
def test_ranks_that_go_elsewhere_are_named_in_seconds(world, program, first, second):
    for outcome in world(RANKS).run(program, expect_failure=True, grace=30):
        assert outcome.error_type == "CommError"
        said = outcome.traceback.partition("the ranks have parted ways")[2]
        places = re.findall(r"rank (\d) at step \d, unit '[^']+', phase '([^']+)'", said)
        assert places == [("0", first), ("1", second)]


def test_a_rank_that_fails_is_named_by_the_others(world):
    waiting, failing = world(RANKS).run(one_fails, expect_failure=True, grace=30)
    assert failing.error_type == "ValueError"
    assert waiting.error_type == "CommError"
    assert "rank 1 " in waiting.traceback.rpartition("CommError: rank 0 ")[2]


class Sometimes(Base):
    """Fails when it is told to, in forward or in backward."""

    fails = None

    def hidden(self, rows):
        hidden = super().hidden(rows)
        if self.fails == "forward":
            raise ValueError("in forward")
        if self.fails == "backward":
            hidden.register_hook(lambda gradient: 1 / 0)
        return hidden


def go_on(where):
    torch.manual_seed(3)
    engine = start(Sometimes(), 3)
    losses = []
    for step in range(4):
        if step == 1 and where:
            type(engine.module).fails = where
            with pytest.raises((ValueError, ZeroDivisionError)):
                engine.backward(engine(rows(9, rank())))
            engine.zero_grad()
            type(engine.module).fails = None
        engine.backward(engine(rows(step, rank())))
        losses.append(engine.step().loss)
    return losses


def test_after_an_exception_on_all_ranks_training_goes_on(world):
    expected, *found = world(RANKS).each(go_on, [(None,), ("forward",), ("backward",)])
    assert found == [expected] * 2
