"""Dataclasses from JSON that anybody may have written: of the types that they say, without what a terminal obeys."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LONGEST_TEXT = 1000
_LARGEST = 2**63


def of_json(kind: type[T], data: Any, where: str = "") -> T:
    """One of ``kind``; names that it does not know are left out, so that newer versions may tell more.

    Raises:
        ValueError: something is missing, or not of its type.

    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: float
    ...     label: str = ""
    >>> of_json(Point, {"x": 1, "label": "a\\x1b[31m"})
    Point(x=1.0, label='a�[31m')
    >>> of_json(Point, {"x": "1"})
    Traceback (most recent call last):
    ValueError: x: a number is expected, not '1'
    """
    if not isinstance(data, Mapping):
        raise _wrong(where, "an object", data)
    given = {}
    hints = _hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = f"{where}.{field.name}" if where else field.name
        if field.name in data:
            given[field.name] = _value(hints[field.name], data[field.name], name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**given)


@functools.lru_cache(maxsize=16)
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def printable(text: str) -> str:
    """What a terminal shows and does not obey, and no more of it than can be read.

    >>> printable("CartPole\\x1b]0;title\\x07")
    'CartPole�]0;title�'
    """
    return "".join(letter if letter.isprintable() else "�" for letter in text[:_LONGEST_TEXT])


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in parts:
            return None
        (hint,) = (part for part in parts if part is not type(None))
        return _value(hint, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise _wrong(where, "an object", data)
        return {printable(str(key)): _value(parts[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(data, Sequence) or isinstance(data, str):
            raise _wrong(where, "a list", data)
        # (What an env returns may be infinite, or no number.)
        read = _number if parts[0] is float else functools.partial(_value, parts[0])
        return [read(value, f"{where}[{index}]") for index, value in enumerate(data)]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return of_json(hint, data, where)
    return _scalar(hint, data, where)


def _scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is str:
        if not isinstance(data, str):
            raise _wrong(where, "text", data)
        return printable(data)
    if hint is bool:
        if not isinstance(data, bool):
            raise _wrong(where, "true or false", data)
        return data
    if hint is int:
        if not isinstance(data, int) or isinstance(data, bool) or abs(data) >= _LARGEST:
            raise _wrong(where, "a whole number", data)
        return data
    if hint is float:
        number = _number(data, where)
        if not math.isfinite(number):
            raise _wrong(where, "a finite number", data)
        return number
    if issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            raise _wrong(where, f"one of {', '.join(each.value for each in hint)}", data) from None
    raise TypeError(f"{where}: {hint} is nothing that is read from JSON")


def _number(data: Any, where: str) -> float:
    if not isinstance(data, (int, float)) or isinstance(data, bool) or (isinstance(data, int) and abs(data) > _LARGEST):
        raise _wrong(where, "a number", data)
    return float(data)


def _wrong(where: str, expected: str, data: Any) -> ValueError:
    begins = f"{where}: {expected}" if where else expected
    return ValueError(f"{begins} is expected, not {printable(repr(data))[:80]}")
