"""Numbers as CSV: one file for each name, with the samples seen so far in its first column."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mizzen.config.observe import CsvConfig
from mizzen.monitor.append import LineFile
from mizzen.monitor.report import Event, StepReport

MOST_OPEN: Final = 64
"""Files kept open. A user who writes a number for each layer must not run out of file descriptors."""


class CsvSink:
    """`<output_path>/<job_name>/Train_Samples_lr.csv` for `Train/Samples/lr`, with the header `step,lr`."""

    def __init__(self, config: CsvConfig) -> None:
        self._folder = Path(config.output_path or "csv_logs") / config.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, LineFile] = {}

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Append each event to its file."""
        for name, value, samples in events:
            self._file(name).append(f"{samples},{value}")

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close every file."""
        while self._files:
            self._close_oldest()

    def _file(self, name: str) -> LineFile:
        if name not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._close_oldest()
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            self._files[name] = LineFile(path, header=f"step,{_quoted(name.split('/')[-1])}")
        return self._files[name]

    def _close_oldest(self) -> None:
        self._files.pop(next(iter(self._files))).close()


def _quoted(text: str) -> str:
    """A name with a comma or a quote is one column still."""
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text
