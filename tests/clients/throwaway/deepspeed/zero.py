"""Whole parameters inside a context, and models that are sharded while they are built."""

from mizzen.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
