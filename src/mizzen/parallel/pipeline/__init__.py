"""A model in stages: schedules as tables, how layers are dealt out to stages, and the cut itself."""
