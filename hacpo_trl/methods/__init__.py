"""The methods of sharing, one file each, and their registry. `HACPOConfig(method=...)` takes a name or an object."""

from .alone import Grpo, Gspo, Xgrpo
from .base import Clipped, Counts, Method, Pool, Rows, Signal
from .f_tis import FTis
from .gap import Gap
from .graft import Graft
from .hacpo import Hacpo
from .luffy import Luffy
from .naive import Naive
from .papers import PAPERS
from .sapo import Sapo
from .sgt import Sgt

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Hacpo, Naive, Gspo, Grpo, Gap, Graft, Sgt, Xgrpo, Sapo, Luffy, FTis)
}
"""All methods by name; `register` adds a user's own."""


def register(method: type[Method]) -> None:
    """Makes a method known by its name, for this process.

    Raises:
        ValueError: when another class has the name.
    """
    other = METHODS.setdefault(method.name, method)
    if other is not method and (other.__module__, other.__qualname__) != (method.__module__, method.__qualname__):
        raise ValueError(
            f"method {method.name!r} is {other.__module__}.{other.__qualname__} already; give "
            f"{method.__qualname__} another name."
        )
    METHODS[method.name] = method


__all__ = [
    "METHODS",
    "PAPERS",
    "Clipped",
    "Counts",
    "FTis",
    "Gap",
    "Graft",
    "Grpo",
    "Gspo",
    "Hacpo",
    "Luffy",
    "Method",
    "Naive",
    "Pool",
    "Rows",
    "Sapo",
    "Sgt",
    "Signal",
    "Xgrpo",
    "register",
]
