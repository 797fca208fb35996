"""Checkpoints: one format for every layout, committed by one rename, verified when it is read, without pickle."""
