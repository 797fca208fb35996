"""JSON, HJSON, dict or base64 into frozen sections, and the arithmetic that follows from them. No torch, no ranks."""

from mizzen.config.load import load
from mizzen.config.schema import Config

__all__ = ["Config", "load"]
