"""When a node counts as lost."""

from mizzen.launcher.pulse import DOUBTFUL, LOST, STARTING, Pulse


def looks(pulse, beats, seconds, start=0):
    """What is found by a look in every second."""
    return [pulse.silent(beats(second), float(start + second)) for second in range(1, seconds + 1)]


def test_a_node_that_was_heard_of_is_lost_when_it_is_silent():
    pulse = Pulse(2, 0.0)
    found = looks(pulse, lambda second: [second, 1], 30)
    assert found.index([1]) == LOST + 1 and found[-1] == [1]
    assert pulse.silent([31, 2], 31.0) == [], "it is back"


def test_a_node_may_be_lost_before_it_is():
    pulse = Pulse(3, 0.0)
    looks(pulse, lambda second: [second, 1, 0], 1 + int(DOUBTFUL))
    assert pulse.doubtful == []
    looks(pulse, lambda second: [second + 10, 1, 0], 2, start=10)
    assert pulse.doubtful == [1], "the third, which has not yet been heard of, starts its ranks"


def test_a_node_that_starts_its_ranks_has_more_time():
    found = looks(Pulse(2, 0.0), lambda second: [second, 0], int(STARTING) + 5)
    assert found.index([1]) == STARTING


def test_a_machine_that_was_held_up_blames_nobody():
    pulse = Pulse(2, 0.0)
    assert pulse.silent([1, 1], 1.0) == []
    assert pulse.silent([2, 1], 1000.0) == [] and pulse.silent([3, 1], 2000.0) == []
