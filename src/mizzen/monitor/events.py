"""A step as events, under the names that users of a DeepSpeed monitor know. Who writes them is not decided here."""

from mizzen.monitor.report import Event, StepReport


def events_of(report: StepReport, *, has_loss_scale: bool, has_rate: bool) -> list[Event]:
    """The numbers of one optimizer step, at the samples seen so far. Reads the loss and the norm."""
    values = {
        "train_loss": report.loss,
        "lr": report.lr[0] if report.lr else None,
        "grad_norm": report.grad_norm,
        "loss_scale": report.loss_scale if has_loss_scale else None,
        "samples_per_sec": report.samples / report.seconds if has_rate and report.seconds > 0 else None,
    }
    values |= {f"elapsed_time_ms_{phase}": seconds * 1e3 for phase, seconds in report.phases.items()}
    values |= report.measures
    return [
        (f"Train/Samples/{name}", value, report.global_samples) for name, value in values.items() if value is not None
    ]
