"""Checkpoints that other programs wrote: `open(path)` recognises the kind and gives a Source. Nothing is run."""

from mizzen.checkpoint.foreign.formats import open

__all__ = ["open"]
