"""Numbers for Comet, thinned out: a point of each name every so many samples."""

from collections.abc import Sequence

from mizzen.config.observe import CometConfig
from mizzen.monitor.report import Event, StepReport
from mizzen.monitor.require import require


class CometSink:
    """A Comet experiment, new or continued, as the section says."""

    def __init__(self, config: CometConfig) -> None:
        comet = require("comet_ml", extra="comet", purpose="comet.enabled")
        self._interval = config.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment = comet.start(
            api_key=config.api_key,
            workspace=config.workspace,
            project_name=config.project,
            experiment_key=config.experiment_key,
            mode=config.mode,
            online=config.online,
        )
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Log those events whose name has not been logged for `samples_log_interval` samples."""
        for name, value, samples in events:
            # The distance, not the difference: training that goes back to a checkpoint is logged from there.
            if name not in self._last or abs(samples - self._last[name]) >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def flush(self) -> None:
        """Send what is queued."""
        self._experiment.flush()

    def close(self) -> None:
        """Send what is queued and end the experiment."""
        self._experiment.end()
