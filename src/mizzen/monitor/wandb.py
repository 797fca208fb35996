"""Numbers for Weights & Biases."""

from collections.abc import Sequence

from mizzen.config.observe import WandbConfig
from mizzen.monitor.report import Event, StepReport
from mizzen.monitor.require import require


class WandbSink:
    """The run that the program has already started, or a new one; only a new one is finished at the end."""

    def __init__(self, config: WandbConfig) -> None:
        wandb = require("wandb", extra="wandb", purpose="wandb.enabled")
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Log all events at the same number of samples in one call, with that number as the step."""
        for samples in dict.fromkeys(samples for _, _, samples in events):
            self._run.log({name: value for name, value, at in events if at == samples}, step=samples)

    def flush(self) -> None:
        """W&B sends in a process of its own."""

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._is_ours:
            self._run.finish()
