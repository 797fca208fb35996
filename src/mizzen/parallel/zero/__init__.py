"""Sharding of training state over the data-parallel ranks."""
