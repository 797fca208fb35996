"""Facts about where we run: what a machine has (`report.py`), and how fast its ranks talk (`bench.py`)."""
