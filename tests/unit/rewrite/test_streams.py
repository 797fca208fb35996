"""Named random streams: each goes on from where it was, and the default one does not notice."""

import pytest
import torch

from mizzen.errors import UsageError
from mizzen.rewrite.recompute import RandomStreams


@pytest.fixture
def streams():
    made = RandomStreams()
    made.add("a", 1)
    made.add("b", 2)
    return made


def draw(streams, name):
    with streams.fork(name):
        return torch.rand(3)


def seeded(seed, skip=0):
    generator = torch.Generator().manual_seed(seed)
    torch.rand(skip, generator=generator)
    return torch.rand(3, generator=generator)


def test_a_stream_is_that_of_its_seed_and_goes_on(streams):
    torch.manual_seed(0)
    assert torch.equal(draw(streams, "a"), seeded(1))
    assert torch.equal(draw(streams, "b"), seeded(2))
    assert torch.equal(draw(streams, "a"), seeded(1, skip=3))
    assert torch.equal(torch.rand(3), seeded(0)), "the default stream has moved"


def test_a_failure_inside_leaves_the_default_stream_where_it_was(streams):
    torch.manual_seed(0)
    with pytest.raises(KeyError), streams.fork("a"):
        torch.rand(2)
        raise KeyError
    assert torch.equal(torch.rand(3), seeded(0))
    assert torch.equal(draw(streams, "a"), seeded(1, skip=2))


def test_states_can_be_taken_and_set(streams):
    states = streams.get_states()
    first = draw(streams, "a")
    streams.set_states(states)
    assert torch.equal(draw(streams, "a"), first)
    assert states.keys() == {"a", "b"}


def test_rewinding_is_for_the_inside_only(streams):
    states = streams.get_states()
    first, second = draw(streams, "a"), draw(streams, "a")
    with streams.rewound(states):
        assert torch.equal(draw(streams, "a"), first)
        assert torch.equal(draw(streams, "a"), second)
        draw(streams, "a")
    assert torch.equal(draw(streams, "a"), seeded(1, skip=6))


def test_a_stream_can_start_again(streams):
    draw(streams, "a")
    streams.reseed("a", 9)
    assert torch.equal(draw(streams, "a"), seeded(9))


def test_what_is_refused(streams):
    with pytest.raises(UsageError, match="'a' exists already"):
        streams.add("a", 3)
    with pytest.raises(UsageError, match="seed 2 belongs to another random stream: give 'c' one of its own"):
        streams.add("c", 2)
    with pytest.raises(UsageError, match="no random stream 'c' was added; there are: a, b"), streams.fork("c"):
        pass
    with pytest.raises(UsageError, match="there are: none"):
        RandomStreams().reseed("a", 1)


def test_nothing_is_left_after_a_reset(streams):
    assert streams.are_used
    streams.reset()
    assert not streams.are_used and streams.get_states() == {}
    streams.add("a", 1)
    assert torch.equal(draw(streams, "a"), seeded(1))
