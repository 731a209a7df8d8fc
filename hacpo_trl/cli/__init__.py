"""The command `hacpo` and its subcommands."""

from .command import main

__all__ = ["main"]
