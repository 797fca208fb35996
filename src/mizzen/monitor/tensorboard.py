"""Numbers as TensorBoard events, through torch's own writer."""

import atexit
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from mizzen.config.observe import TensorboardConfig
from mizzen.monitor.report import Event, StepReport
from mizzen.monitor.require import require

FLUSH_SECONDS: Final = 10
"""What a killed run loses at most."""


class TensorboardSink:
    """`<output_path>/<job_name>/events.out.tfevents.*`; a resumed run adds a file, and TensorBoard joins them."""

    def __init__(self, config: TensorboardConfig) -> None:
        require("tensorboard", extra="tensorboard", purpose="tensorboard.enabled")
        folder = Path(config.output_path or "runs") / config.job_name
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)
        # Many programs never destroy an engine, and the writer's thread dies with the process, with all it has queued.
        atexit.register(self.close)

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Add each event as a scalar."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)

    def flush(self) -> None:
        """Write out the queue."""
        self._writer.flush()

    def close(self) -> None:
        """Write out the queue and end the thread."""
        atexit.unregister(self.close)
        self._writer.close()
