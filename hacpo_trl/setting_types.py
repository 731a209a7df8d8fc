"""Settings as the types that their dataclass declares: from Python, the command line or YAML."""

import dataclasses
import functools
import math
import numbers
import types
import typing
from enum import Enum
from typing import Any


def convert_fields(settings: Any) -> None:
    """Gives every field of a dataclass the type that it is declared with, see `converted`."""
    for f in dataclasses.fields(settings):
        if f.init:
            setattr(settings, f.name, converted(type(settings), f.name, getattr(settings, f.name)))


def converted(owner: type, name: str, value: Any) -> Any:
    """A setting as the type that its field is declared with. YAML takes 5e-7 for a text, and `no` for False.

    Args:
        owner: the dataclass of settings.
        name: of the field.
        value: as Python, the command line or YAML gives it.

    Returns:
        The value; what is no number, truth value, list of them or strategy stays as it is.

    Raises:
        ValueError: where a number, a list or a truth value is needed and the value is none.
    """
    default = owner.__dataclass_fields__[name].default
    if value is None and (default is None or name in _OFF_BY_NONE):
        return None
    try:
        return _as_type(_type_hints(owner)[name], value)
    except ValueError as error:
        example = f", e.g. {default!r}" if isinstance(default, (int, float, str)) and default != value else ""
        raise ValueError(f"{name}={value!r} must be {error}{example}.") from None


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _as_type(hint: Any, value: Any) -> Any:
    """Raises a ValueError with what the value would have to be."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = list(typing.get_args(hint)) if union else [hint]
    plain = {option for option in options if isinstance(option, type)}
    lists = [option for option in options if typing.get_origin(option) is list]
    number = next((kind for kind in (float, int) if kind in plain), None)
    if value is None and types.NoneType in plain:
        return None
    if isinstance(value, (list, tuple)) and lists:
        try:
            return [_as_type(typing.get_args(lists[0])[0], item) for item in value]
        except ValueError as error:
            raise ValueError(f"a list, each item {error}") from None
    if isinstance(value, bool):
        if value is False and (words := [option for option in plain if issubclass(option, Enum)]):
            return next((member.value for member in words[0] if member.value == "no"), value)
        if number and bool not in plain:
            raise ValueError("a number")
        return value
    if isinstance(value, str):
        text = value.strip().lower()
        if number:
            if types.NoneType in plain and text in ("none", "null"):
                return None
            try:
                return _as_number(
                    number, float(text) if number is float or not text.lstrip("+-").isdigit() else int(text)
                )
            except ValueError:
                if str not in plain:
                    raise ValueError(_WORDS[number]) from None
        if bool in plain and str not in plain and text in _TRUTH:
            return _TRUTH[text]
        if plain <= {bool, types.NoneType} and not lists and len(plain) == len(options):
            raise ValueError("true or false")
        return value
    if isinstance(value, numbers.Real):
        if number:
            return _as_number(number, value)
        if plain <= {types.NoneType} and lists:
            raise ValueError("a list")
        if bool in plain and str not in plain and value in (0, 1):
            return bool(value)
    if value is None and str not in plain and (kind := number or (bool if bool in plain else list if lists else None)):
        raise ValueError(_WORDS[kind])
    return value


_OFF_BY_NONE = ("top_k",)  # which TRL's types do not say
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _as_number(kind: type, value: Any) -> Any:
    if kind is float:
        return value if isinstance(value, int) else float(value)
    if value != value or value in (math.inf, -math.inf) or int(value) != value:
        raise ValueError(_WORDS[int])
    return int(value)
