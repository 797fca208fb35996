"""Python faces of fused operations, each with a plain twin that is its specification. Compiled on use, never at import."""
