"""Tiny language models and a verifiable arithmetic task that need neither a download nor a GPU."""

from .agents import *  # noqa: F403 (what `agents.__all__` lists)
from .agents import __all__ as __all__
