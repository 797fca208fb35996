"""The strategies that spread a model over ranks. Each is a `Transform`; none imports another."""
