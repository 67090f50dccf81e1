"""Checks numbers and texts that are passed to C, which would truncate them silently."""

from __future__ import annotations

import enum
import operator
from typing import Any, Type, TypeVar

from ._errors import InvalidArgument

MAX_TOKENS = 1 << 30  # per sequence

_EnumType = TypeVar("_EnumType", bound=enum.IntEnum)


def _unsigned(name: str, value: Any, limit: int) -> int:
    if type(value) is not int:
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: {type(value).__name__}; must be an integer") from None
    if 0 <= value < limit:
        return int(value)
    raise InvalidArgument.about(name, f"{value}, must be 0 to {limit - 1}")


def uint32(name: str, value: Any) -> int:
    return _unsigned(name, value, 1 << 32)


def uint64(name: str, value: Any) -> int:
    return _unsigned(name, value, 1 << 64)


def token_count(begin: int, end: int) -> int:
    """Returns the token count of a range that the library would accept."""
    if begin < end <= MAX_TOKENS:
        return end - begin
    raise InvalidArgument.about("tokens", f"[{begin}, {end}), must not be empty nor go beyond 2^30")


def text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name}: {type(value).__name__}; must be a str")
    encoded = value.encode("utf-8")
    if b"\0" in encoded:
        raise InvalidArgument.about(name, "must not contain a NUL character")
    return encoded


def key_bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{name}: {type(value).__name__}; must be bytes")
    return bytes(value)


def number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {type(value).__name__}; must be a number") from None


def member(kind: Type[_EnumType], name: str, value: Any) -> _EnumType:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgument.about(name, f"{value!r} is no {kind.__name__}") from None
