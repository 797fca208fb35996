"""The training step. What varies between runs is chosen once, in `build.py`."""
