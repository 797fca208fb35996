"""What happens to a rank of a pipeline whose matrices are cut is told with its role, and ends as on one axis."""

import os
import signal
import time

import pytest
import torch

import mizzen
from breadth import FULL, choice
from mizzen import comm
from mizzen.config.layout import Layout, role_in_words
from mizzen.errors import CommError
from mizzen.launcher.signals import SAVED
from mizzen.progress import get_progress
from parity.decoders import Decoder
from parity.test_tensor import config, shares, values_of

TENSOR = 2
"""Ranks that share each matrix."""
MIDDLE = [(3, 2), *(each for each in ((3, 3), *((4, rank) for rank in range(2, 6))) if FULL)]
"""Stages, and a rank on none of the ends of the pipeline."""
RANKS = [*((2, rank) for rank in range(4)), *MIDDLE]
"""Stages, and one of the ranks that something happens to."""


def role(stages: int, rank: int) -> str:
    """A rank with its role, as errors have it."""
    return f"rank {rank} (stage {rank // TENSOR} of {stages}, tensor rank {rank % TENSOR})"


def test_roles_follow_from_the_layout():
    for stages in (2, 3, 4):
        layout = Layout(pp=stages, tp=TENSOR)
        for rank in range(stages * TENSOR):
            assert f"rank {rank} ({role_in_words(layout, rank)})" == role(stages, rank)
    assert role_in_words(Layout(pp=4, tp=2, dp_shard=2), 13) == "stage 3 of 4, tensor rank 1, data rank 0"
    assert role_in_words(Layout(dp_shard=4), 3) == "" and role_in_words(Layout(), 0) == ""


def start(stages: int = 2, **more):
    """An engine with one block for each stage."""
    keys = config(TENSOR, 1, accumulation=2, pipeline_parallel_size=stages, **more)
    engine, *_ = mizzen.initialize(model=Decoder(blocks=stages), config=keys)
    return engine


def not_a_number(stages: int, culprit: int) -> tuple:
    engine = start(stages)
    before = values_of(engine)
    if comm.get_rank() == culprit:
        name = f"blocks.{culprit // TENSOR}.attention.q.weight"
        engine.module.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan)
    first, second = (engine.train_batch(iter(shares(engine, 0))) for _ in range(2))
    same = all(torch.equal(value, before[name]) for name, value in values_of(engine).items())
    return first.applied, first.reason, second.applied, same


@pytest.mark.parametrize(("stages", "culprit"), choice(RANKS, [(2, 2)]))
def test_a_gradient_that_is_not_finite_is_named_with_its_role(world, stages, culprit):
    for applied, reason, again, same in world(stages * TENSOR).run(not_a_number, stages, culprit):
        assert not applied and not again and same
        assert f"gradient not finite on {role(stages, culprit)}: blocks.{culprit // TENSOR}" in reason


def meet(fate: str, stages: int, culprit: int) -> None:
    # Silence is what tells of a stopped rank alone; on a busy machine others may be silent for a while, too.
    comm.set_patience(look=0.5, beat=0.2, silence=5 if fate == "stop" else 30, timeout=60)
    engine = start(stages)
    engine.train_batch(iter(shares(engine, 0)))
    if comm.get_rank() == culprit:
        if fate == "raise":
            raise ArithmeticError("had enough")
        if fate == "stop":
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)
    engine.train_batch(iter(shares(engine, 1)))


FATES = {
    "raise": ("has left: ArithmeticError: had enough", "was killed or has crashed"),  # if it had no time to say so
    "kill": ("was killed or has crashed: its process exists no more",),
    "stop": ("has not been heard of for",),
}


@pytest.mark.parametrize(
    ("fate", "stages", "culprit"),
    choice(
        [(fate, stages, rank) for fate in FATES for stages, rank in RANKS if rank],
        [("kill", 2, 2)],
    ),
)  # pipeline/test_runs.py and tests/ranks/comm have the other ends
def test_a_rank_that_is_gone_is_named_with_its_role(world, fate, stages, culprit):
    """Of rank 0 less is known: with it goes what the ranks know of each other."""
    outcomes = world(stages * TENSOR).run(meet, fate, stages, culprit, expect_failure=True, grace=40)
    others = [outcome for outcome in outcomes if outcome.rank != culprit]
    assert all(outcome.error_type == CommError.__name__ for outcome in others), [each.traceback for each in others]
    said = [f"{role(stages, culprit)} {words}" for words in FATES[fate]]
    assert any(words in outcome.traceback for outcome in others for words in said), [each.traceback for each in others]
    own = [role(stages, outcome.rank) in outcome.traceback for outcome in others]
    assert all(own)


def other_configuration() -> None:
    start(steps_per_print=comm.get_rank() // 3 + 7)


def test_a_fingerprint_that_differs_is_named_with_its_role(world):
    for outcome in world(4).run(other_configuration, expect_failure=True):
        assert "steps_per_print: rank 3 (stage 1 of 2, tensor rank 1) has 8, the others 7" in outcome.traceback


def asked_to_stop(stages: int, culprit: int, folder: str) -> tuple:
    engine = start(stages, checkpoint={"dir": folder})
    engine.train_batch(iter(shares(engine, 0)))
    if comm.get_rank() == culprit:
        get_progress().ask_self_to_stop()
    code = None
    try:
        for step in range(1, 4):
            engine.train_batch(iter(shares(engine, step)))
    except SystemExit as left:
        code = left.code
    return engine.global_steps, code


@pytest.mark.wide  # parity/test_homes.py and tests/ranks/checkpoint have one rank that is asked
@pytest.mark.parametrize(("stages", "culprit"), choice(RANKS, [(2, 3)]))
def test_a_request_to_stop_on_any_role_saves_on_all(world, tmp_path, stages, culprit):
    assert world(stages * TENSOR).run(asked_to_stop, stages, culprit, str(tmp_path)) == [(2, SAVED)] * stages * TENSOR
    assert (tmp_path / "latest").exists()
