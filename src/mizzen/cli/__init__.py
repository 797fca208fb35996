"""The `mizzen` command: parsing and printing only. What a command does lives in the package that it shows."""

from mizzen.cli.main import main

__all__ = ["main"]
