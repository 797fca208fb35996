from mizzen.monitor.events import events_of


def test_the_names_and_the_position_are_the_known_ones(step):
    report = step(3, loss_scale=1024.0, phases={"forward": 0.25, "backward": 0.5})
    assert events_of(report, has_loss_scale=True, has_rate=True) == [
        ("Train/Samples/train_loss", 2.5, 24),
        ("Train/Samples/lr", 1e-3, 24),
        ("Train/Samples/grad_norm", 1.5, 24),
        ("Train/Samples/loss_scale", 1024.0, 24),
        ("Train/Samples/samples_per_sec", 16.0, 24),
        ("Train/Samples/elapsed_time_ms_forward", 250.0, 24),
        ("Train/Samples/elapsed_time_ms_backward", 500.0, 24),
    ]


def test_what_is_not_there_is_left_out(step):
    report = step(1, loss=None, norm=None, lr=(), seconds=0.0)
    assert events_of(report, has_loss_scale=False, has_rate=True) == []
    assert events_of(step(1, lr=()), has_loss_scale=False, has_rate=False) == [
        ("Train/Samples/train_loss", 2.5, 8),
        ("Train/Samples/grad_norm", 1.5, 8),
    ]


def test_measures_are_events_under_their_names(step):
    report = step(1, lr=(), norm=None, measures={"mfu": 0.4, "samples_per_sec": 16.0})
    assert events_of(report, has_loss_scale=False, has_rate=True) == [
        ("Train/Samples/train_loss", 2.5, 8),
        ("Train/Samples/samples_per_sec", 16.0, 8),
        ("Train/Samples/mfu", 0.4, 8),
    ]
