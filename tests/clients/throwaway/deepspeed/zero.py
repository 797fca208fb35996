"""Whole parameters inside a context."""

from mizzen.zero import GatheredParameters

__all__ = ["GatheredParameters"]
