"""In which dtypes a model is held, computed, reduced and optimized."""
