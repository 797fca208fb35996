"""Rules that concern several keys at once and need no world size. Rules about features together belong to the plan."""

from mizzen.config.schema import Config


def check(config: Config) -> None:
    """Raise a `ConfigError` for the first rule that the configuration breaks."""
