"""Python faces of fused operations, each with a plain twin that specifies it. Compiled on use, never at import."""
