"""The share of what rests in host memory that passes through the device."""

import pytest
import torch

from mizzen.engine import streamed_share
from mizzen.engine.streamed_share import StreamedShare, best_share


@pytest.mark.parametrize(
    ("host", "copies", "hidden", "share"),
    [
        (1.0, 1.0, 0.0, 0.5),  # both as fast
        (1.0, 3.0, 0.0, 0.25),  # copies are slow
        (1.0, 0.5, 0.5, 1.0),  # nobody would wait for all the copies
        (1.0, 1.0, 0.5, 0.75),
        (0.0, 0.0, 0.0, 0.0),  # nothing rests there
    ],
)
def test_host_and_device_are_through_together(host, copies, hidden, share):
    found = best_share(host, copies, hidden)
    assert found == share
    if 0 < found < 1:
        assert (1 - found) * host == pytest.approx(found * copies - hidden)


@pytest.mark.parametrize(("room", "hidden"), [(1, 0.4), (0, 0.0)])
def test_a_step_shows_what_the_next_ones_should_do(monkeypatch, room, hidden):
    """Both sides are through together, as the times of the step foretell, whatever its share was."""
    monkeypatch.setattr(streamed_share, "device_room", lambda accelerator: room)
    host, copies, between = 1.0, 1.2, 1.2  # of all of it; two thirds of the last, over two micro-batches, hide copies
    for share in (0.2, 0.9):
        found = StreamedShare(None, torch.device("cpu"), 2).after_step(
            share, host=(1 - share) * host, device=share * copies - hidden, between=between
        )
        assert (1 - found) * host == pytest.approx(found * copies - hidden)


def test_a_forward_hides_what_the_host_does_beside_it(monkeypatch):
    """Both sides are through together in the middle of the forward that the host goes on beside."""
    monkeypatch.setattr(streamed_share, "device_room", lambda accelerator: 1)
    host, copies, between, hidden, beside = 1.0, 1.2, 0.6, 0.2, 0.05  # over two micro-batches
    found = StreamedShare(None, torch.device("cpu"), 2).after_step(
        0.5, host=0.5 * host, device=0.5 * copies - hidden, between=between, is_beside=True
    )
    assert (1 - found) * host - beside == pytest.approx(found * copies - hidden)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_nothing_or_all_shows_nothing(share):
    found = StreamedShare(None, torch.device("cpu"), 1).after_step(share, host=1.0, device=1.0, between=1.0)
    assert found == share
