import pytest

from mizzen.monitor.stretch import Stretch, gib


def test_rates_and_means(step):
    stretch = Stretch()
    assert stretch.rates() == {} and stretch.step_seconds() is None and stretch.phases() == {}
    stretch.add(step(1, seconds=1.0, tokens=100, phases={"forward": 0.1, "step": 0.2}))
    stretch.add(step(2, seconds=3.0, tokens=300, phases={"forward": 0.3, "step": 0.2}))
    assert stretch.rates() == {"samples": 4.0, "tokens": 100.0}
    assert stretch.step_seconds() == 2.0
    assert stretch.phases() == pytest.approx({"forward": 200.0, "step": 200.0})


def test_the_first_step_of_a_run_is_not_timed(step):
    stretch = Stretch(is_first=True)
    stretch.add(step(1, seconds=60.0, phases={"forward": 0.1}))
    assert stretch.rates() == {} and stretch.step_seconds() is None
    assert stretch.phases() == {"forward": 100.0}
    stretch.add(step(2, seconds=2.0))
    assert stretch.rates() == {"samples": 4.0} and stretch.step_seconds() == 2.0


def test_tokens_are_said_only_if_every_step_showed_them(step):
    stretch = Stretch()
    stretch.add(step(1, tokens=100))
    stretch.add(step(2, tokens=None))
    assert stretch.rates() == {"samples": 16.0}


def test_sizes():
    assert gib(3 * 2**29) == "1.50 GiB" and gib(None) == "unknown"


def test_the_share_of_the_device_is_that_of_the_steps_that_know_it(step):
    stretch = Stretch()
    assert stretch.mfu() is None
    stretch.add(step(1, seconds=9.0))
    assert stretch.mfu() is None
    stretch.add(step(2, seconds=1.0, measures={"mfu": 0.5}))
    stretch.add(step(3, seconds=3.0, measures={"mfu": 0.3}))
    assert stretch.mfu() == pytest.approx(0.35)


def test_a_step_whose_times_were_not_there_yet_is_not_in_the_mean(step):
    stretch = Stretch()
    stretch.add(step(1, phases={}))
    stretch.add(step(2, phases={"forward": 0.1}))
    assert stretch.phases() == {"forward": 100.0}
