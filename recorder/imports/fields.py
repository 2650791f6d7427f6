"""Typed access to the fields of a log line; every refusal names the line, the field and what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..trace.columns import Int64Array
from ..trace.limits import MAX_EVENT_IDS
from ..trace.values import expand
from .errors import LogError

_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class Line:
    """One log line: `data` with its place, for messages."""

    def __init__(self, path: Path, number: int, data: dict[str, Any]) -> None:
        self.path = path
        self.number = number
        self.data = data

    def error(self, reason: str) -> LogError:
        """A LogError at this line."""
        return LogError(reason, path=self.path, line=self.number)

    def has(self, name: str) -> bool:
        """Whether field `name` is there and not null."""
        return self.data.get(name) is not None

    def need(self, name: str) -> Any:
        """Field `name`, whatever it is."""
        if name not in self.data:
            raise self.error(f"field {name!r} is missing")
        return self.data[name]

    def integer(self, name: str) -> int:
        """Field `name` as an integer."""
        return self.as_integer(self.need(name), f"field {name!r}")

    def text(self, name: str) -> str:
        """Field `name` as text."""
        value = self.need(name)
        if not isinstance(value, str):
            raise self.error(f"field {name!r} is {_name(value)}, not text")
        return value

    def flag(self, name: str) -> bool:
        """Field `name` as true or false."""
        value = self.need(name)
        if not isinstance(value, bool):
            raise self.error(f"field {name!r} is {_name(value)}, not true or false")
        return value

    def integers(self, name: str) -> list[int]:
        """Field `name` as a list of integers."""
        value = self.need(name)
        if not isinstance(value, list):
            raise self.error(f"field {name!r} is {_name(value)}, not a list")
        return [self.as_integer(item, f"an element of field {name!r}") for item in value]

    def as_integer(self, value: Any, what: str) -> int:
        """`value` as an int64."""
        if type(value) is not int or not _LOW <= value <= _HIGH:
            raise self.error(f"{what} is {_name(value)}, not an integer of 64 bits")
        return value

    def as_ids(self, value: Any, what: str) -> Int64Array:
        """int64[n] of `{"runs": [start, length, ...]}` or of a plain list of integers."""
        if isinstance(value, dict) and isinstance(value.get("runs"), list):
            return self._runs(value["runs"], what)
        if isinstance(value, list):
            return self._array(value, what)
        raise self.error(f'{what} is {_name(value)}, not ids (a list, or {{"runs": [start, length, ...]}})')

    def _array(self, value: list[Any], what: str) -> Int64Array:
        if not all(type(item) is int and _LOW <= item <= _HIGH for item in value):
            raise self.error(f"{what} holds something that is not an integer of 64 bits")
        return np.array(value, dtype=np.int64)

    def _runs(self, runs: list[Any], what: str) -> Int64Array:
        flat = self._array(runs, what)
        if len(flat) % 2:
            raise self.error(f"the runs of {what} are not pairs of start and length")
        starts, lengths = flat[::2], flat[1::2]
        if len(lengths) and int(lengths.min()) < 1:
            raise self.error(f"a run of {what} has length {int(lengths.min())}")
        if len(lengths) and (int(lengths.max()) > MAX_EVENT_IDS or int(lengths.sum()) > MAX_EVENT_IDS):
            raise self.error(f"{what} holds more than {MAX_EVENT_IDS} ids, the limit for one call")
        total = int(lengths.sum())
        return expand(starts, lengths, 1, total)


def _name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", float: "a fraction"}
    return (
        "null" if value is None else "an integer out of range" if type(value) is int else names[type(value)]
    )
