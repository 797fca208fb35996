import numpy
import pytest
import torch

from mizzen.errors import UsageError
from mizzen.monitor.sinks import Monitor, monitor_of


class Kept:
    """A sink in memory; `fails` names the call that raises."""

    def __init__(self, fails=""):
        self.fails, self.calls, self.events = fails, [], []

    def note(self, call):
        self.calls.append(call)
        if call == self.fails:
            raise OSError(28, "No space left on device")

    def write(self, events, report=None):
        self.note("write")
        self.events.append((list(events), report))

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")


def test_each_step_goes_to_every_sink_with_its_report(step):
    sinks = {"a": Kept(), "b": Kept()}
    monitor = Monitor(sinks, enabled=True)
    monitor.on_step(step(1))
    monitor.on_step(second := step(2))
    assert sinks["a"].events == sinks["b"].events
    (first_events, _), (second_events, report) = sinks["a"].events
    assert report is second
    assert ("Train/Samples/train_loss", 2.5, 16) in second_events
    rates = ["Train/Samples/samples_per_sec" in [name for name, *_ in each] for each in (first_events, second_events)]
    assert rates == [False, True], "the first step's time includes the start of the run"


def test_loss_scale_and_rate_are_written_when_they_mean_something(step):
    sink = Kept()
    monitor = Monitor({"a": sink}, enabled=True, has_loss_scale=True, has_rate=False)
    monitor.on_step(step(1, loss_scale=2.0))
    monitor.on_step(step(2, loss_scale=2.0))
    names = [name.split("/")[-1] for name, *_ in sink.events[-1][0]]
    assert names == ["train_loss", "lr", "grad_norm", "loss_scale"]


def test_events_of_a_user_become_plain_numbers():
    sink = Kept()
    monitor = Monitor({"a": sink}, enabled=True)
    monitor.write_events([("x", torch.tensor([0.5]), 8), ("y", numpy.float32(0.25), numpy.int64(8)), ("z", 3, 8)])
    assert sink.events == [([("x", 0.5, 8), ("y", 0.25, 8), ("z", 3, 8)], None)]
    assert {type(part) for event in sink.events[0][0] for part in event} == {str, float, int}


@pytest.mark.parametrize("event", [("x", 1.0), ("x", torch.ones(2), 8), ("x", "much", 8), ("x", 1.0, 0.5), 7])
def test_an_event_of_another_shape_is_refused(event):
    with pytest.raises(UsageError, match=r"an event is \(name, number, global samples\), not"):
        Monitor({"a": Kept()}, enabled=True).write_events([event])


def test_a_sink_that_fails_is_given_up_and_named_while_the_others_go_on(step, warned):
    broken, sound = Kept(fails="write"), Kept()
    monitor = Monitor({"csv_monitor": broken, "wandb": sound}, enabled=True)
    for number in range(1, 4):
        monitor.on_step(step(number))
    monitor.write_events([("x", 1.0, 24)])
    monitor.flush()
    monitor.close()
    assert broken.calls == ["write"]
    assert sound.calls == ["write"] * 4 + ["flush", "close"]
    [text] = warned
    assert text.startswith("csv_monitor: OSError: ") and "No space left on device" in text
    assert text.endswith("nothing more is written there, and training goes on")


@pytest.mark.parametrize("call", ["flush", "close"])
def test_flush_and_close_may_fail_too(call, warned):
    broken, sound = Kept(fails=call), Kept()
    monitor = Monitor({"broken": broken, "sound": sound}, enabled=True)
    monitor.flush()
    monitor.close()
    assert sound.calls == ["flush", "close"] and len(warned) == 1


def test_an_error_of_the_device_is_not_taken_for_one_of_a_sink(step):
    def lost():
        raise RuntimeError("device-side assert")

    sink = Kept()
    with pytest.raises(RuntimeError, match="device-side assert"):
        Monitor({"a": sink}, enabled=True).on_step(step(1, loss=lost))
    assert sink.calls == []


def test_an_interrupt_passes(step):
    class Interrupted(Kept):
        def write(self, events, report=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Monitor({"a": Interrupted()}, enabled=True).on_step(step(1))


def test_without_sinks_nothing_is_read_or_checked(step):
    mute = Monitor({}, enabled=True)
    mute.on_step(step(1, loss=lambda: pytest.fail("read")))
    mute.write_events(pytest.fail(event) for event in ["consumed"])
    mute.flush()
    mute.close()
    assert mute.enabled


def test_a_closed_monitor_writes_nothing(step):
    monitor = Monitor({"a": (sink := Kept())}, enabled=True)
    monitor.close()
    monitor.on_step(step(1))
    monitor.close()
    assert sink.calls == ["close"]


def test_the_monitor_among_the_observers(step):
    monitor = Monitor({"a": Kept()}, enabled=True)
    assert monitor_of((object(), monitor)) is monitor
    absent = monitor_of(())
    absent.write_events([("x", 1.0, 1)])
    assert not absent.enabled
