"""Changes to a model that are not parallelism: what backward computes again, and what a compiler makes of blocks."""
