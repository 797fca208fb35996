"""What follows from the sums of a step: taken, skipped or refused, and with which numbers."""

import math
from dataclasses import replace

import pytest
import torch

from mizzen.engine.vote import NO_GRADIENT, NOT_FINITE, SOME_SCALED, Seen, StepSums, StepTerms, Vote, decide
from mizzen.errors import UsageError
from mizzen.plan.losses import MANY_KINDS


def share_of(has_losses: bool, has_unannounced: bool, has_scaled: bool) -> float:
    if not has_losses and not has_unannounced:
        raise UsageError("no backward")
    return 0.5 if has_unannounced and not has_scaled else 1.0


SCALED = Seen(has_losses=True, is_counted=False, has_unannounced=False, has_scaled=True)
FOUR = StepTerms(share_of, gain=1.0, scale=1.0, max_norm=0.0, ranks=4, loss_ranks=4)
TWO_SPEAK = replace(FOUR, loss_ranks=2, expected=Seen(True, False, False, False))
USUAL = StepSums(
    squares=16.0,
    loss=6.0,
    count=4.0,
    losses=4,
    counted=0,
    unannounced=0,
    scaled=4,
    requests=0,
    ahead=0,
    changed=0,
    arrived=4,
    micros=4,
)


def decision(terms: StepTerms = FOUR, guess: Seen = SCALED, **changes: float):
    """What is decided where this rank has found by a guess, as `PendingDecision` does."""
    sums = StepSums(*(torch.tensor(float(value), dtype=torch.float64) for value in USUAL._replace(**changes)))
    try:
        share = terms.share(guess)
    except UsageError:
        share = math.nan
    return decide(torch.stack([*sums, *terms.norm_and_factor(sums, guess, share)]), terms)


def test_a_usual_step_is_taken():
    found = decision()
    assert (found.verdict, found.reason, found.applied) == ("take", "", True)
    assert (found.norm, found.factor, found.loss, found.micros) == (4.0, 1.0, 1.5, 1.0)
    assert found.is_foreseen and not found.stops and not found.all_ahead and not found.has_overflowed


def test_the_factor_has_the_clip_the_scale_and_the_gain():
    found = decision(replace(FOUR, scale=8.0, gain=2.0))
    assert (found.norm, found.factor) == (1.0, 0.25)
    clipped = decision(replace(FOUR, max_norm=1.0))
    assert clipped.norm == 4.0
    assert clipped.factor == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips(value):
    found = decision(squares=value)
    assert (found.verdict, found.reason) == ("skip", NOT_FINITE)
    assert found.has_overflowed


def test_a_step_without_a_gradient_is_skipped_and_has_not_overflowed():
    found = decision(arrived=0, squares=0.0)
    assert (found.verdict, found.reason, found.has_overflowed) == ("skip", NO_GRADIENT, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"counted": 3}, MANY_KINDS),
        ({"losses": 0}, "no backward"),
        ({"losses": 0, "unannounced": 4, "scaled": 2}, SOME_SCALED),
    ],
)
def test_a_wrong_use_is_refused_and_a_request_to_stop_still_heard(changes, said):
    found = decision(requests=1, **changes)
    assert (found.verdict, found.reason, found.stops) == ("refuse", said, True)


def test_counts_divide_by_what_the_ranks_with_losses_have_counted():
    seen = Seen(True, True, False, True)
    assert decision(guess=seen, counted=4, count=8.0).factor == 0.5
    speaking = decision(replace(TWO_SPEAK, expected=seen), seen, losses=2, counted=2, scaled=2, count=8.0)
    assert (speaking.factor, speaking.norm, speaking.loss) == (0.25, 1.0, 0.75)
    assert speaking.is_foreseen
    assert decision(guess=seen, counted=4, count=0.0).factor == 0.0


def test_a_rank_that_guessed_wrong_judges_again():
    found = decision(guess=Seen(False, False, False, False), losses=3, scaled=3)
    assert (found.verdict, found.norm, found.factor) == ("take", 4.0, 1.0)
    assert not found.is_foreseen


def test_some_ranks_without_losses_by_their_role_are_no_surprise():
    terms = replace(TWO_SPEAK, expected=SCALED)
    assert decision(terms, losses=2, scaled=2).is_foreseen
    assert not decision(terms, losses=1, scaled=1).is_foreseen
    assert not decision(FOUR, losses=2, scaled=2).is_foreseen


def test_what_silent_ranks_did_not_expect_is_judged_again_by_all():
    """A rank that speaks has guessed right, and still does not count on what it has launched."""
    seen = Seen(True, True, False, True)
    found = decision(TWO_SPEAK, seen, losses=2, counted=2, scaled=2, count=4.0)
    assert not found.is_foreseen
    assert found.factor == 0.5
    assert found.seen == seen


def test_new_values_are_compared_before_anything_counts():
    found = decision(changed=4, ahead=4)
    assert (found.is_foreseen, found.changed, found.all_ahead) == (False, 4.0, True)


def test_one_rank_votes_alone():
    vote = Vote(None, torch.device("cpu"))
    found = vote.start(USUAL._replace(losses=True, scaled=False, micros=2), vote.terms(share_of)).read()
    assert (found.applied, found.norm, found.micros) == (True, 4.0, 2.0)
    assert vote.explain_nonfinite(["b", "a", "d", "c"]) == "gradient not finite on rank 0: a, b, c and 1 more"
