"""The drop-in on the path of this process for these tests alone."""

from drop_in.conftest import on_the_path

__all__ = ["on_the_path"]
