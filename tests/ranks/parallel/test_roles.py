"""What happens to a rank of a pipeline whose matrices are cut is told with its role, and ends as on one axis."""

import os
import signal
import time

import pytest
import torch

import mizzen
from breadth import choice
from mizzen import comm
from mizzen.config.layout import Layout, role_in_words
from mizzen.errors import CommError
from mizzen.launcher.signals import SAVED
from mizzen.progress import get_progress
from parity.decoders import Decoder
from parity.test_tensor import config, shares, values_of

ROLES = {
    0: "stage 0 of 2, tensor rank 0",
    1: "stage 0 of 2, tensor rank 1",
    2: "stage 1 of 2, tensor rank 0",
    3: "stage 1 of 2, tensor rank 1",
}


def test_roles_follow_from_the_layout():
    layout = Layout(pp=2, tp=2)
    assert {rank: role_in_words(layout, rank) for rank in range(4)} == ROLES
    assert role_in_words(Layout(pp=4, tp=2, dp_shard=2), 13) == "stage 3 of 4, tensor rank 1, data rank 0"
    assert role_in_words(Layout(dp_shard=4), 3) == "" and role_in_words(Layout(), 0) == ""


def start(**more):
    engine, *_ = mizzen.initialize(
        model=Decoder(), config=config(2, 1, accumulation=2, pipeline_parallel_size=2, **more)
    )
    return engine


def not_a_number(culprit: int) -> tuple:
    engine = start()
    before = values_of(engine)
    if comm.get_rank() == culprit:
        block = 0 if engine.is_first_stage() else 1
        name = f"blocks.{block}.attention.q.weight"
        engine.module.get_parameter(name).register_hook(lambda gradient: gradient * torch.nan)
    first, second = (engine.train_batch(iter(shares(engine, 0))) for _ in range(2))
    same = all(torch.equal(value, before[name]) for name, value in values_of(engine).items())
    return first.applied, first.reason, second.applied, same


@pytest.mark.parametrize("culprit", choice(range(4), [2]))
def test_a_gradient_that_is_not_finite_is_named_with_its_role(world, culprit):
    for applied, reason, again, same in world(4).run(not_a_number, culprit):
        assert not applied and not again and same
        assert f"gradient not finite on rank {culprit} ({ROLES[culprit]}): blocks.{culprit // 2}" in reason


def meet(fate: str, culprit: int) -> None:
    comm.set_patience(look=0.5, beat=0.2, silence=3, timeout=60)
    engine = start()
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
    ("fate", "culprit"),
    choice([(fate, rank) for fate in FATES for rank in range(1, 4)], [("raise", 3), ("kill", 2), ("stop", 1)]),
)
def test_a_rank_that_is_gone_is_named_with_its_role(world, fate, culprit):
    """Of rank 0 less is known: with it goes what the ranks know of each other."""
    outcomes = world(4).run(meet, fate, culprit, expect_failure=True, grace=40)
    others = [outcome for outcome in outcomes if outcome.rank != culprit]
    assert all(outcome.error_type == CommError.__name__ for outcome in others), [each.traceback for each in others]
    said = [f"rank {culprit} ({ROLES[culprit]}) {words}" for words in FATES[fate]]
    assert any(words in outcome.traceback for outcome in others for words in said), [each.traceback for each in others]
    own = [f"rank {outcome.rank} ({ROLES[outcome.rank]})" in outcome.traceback for outcome in others]
    assert all(own)


def other_configuration() -> None:
    start(steps_per_print=comm.get_rank() // 3 + 7)


def test_a_fingerprint_that_differs_is_named_with_its_role(world):
    for outcome in world(4).run(other_configuration, expect_failure=True):
        assert "steps_per_print: rank 3 (stage 1 of 2, tensor rank 1) has 8, the others 7" in outcome.traceback


def asked_to_stop(culprit: int, folder: str) -> tuple:
    engine = start(checkpoint={"dir": folder})
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


@pytest.mark.parametrize("culprit", choice(range(4), [3]))
def test_a_request_to_stop_on_any_role_saves_on_all(world, tmp_path, culprit):
    assert world(4).run(asked_to_stop, culprit, str(tmp_path)) == [(2, SAVED)] * 4
    assert (tmp_path / "latest").exists()
