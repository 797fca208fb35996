"""Optimizers and learning-rate schedules by the names they have in the configuration."""
