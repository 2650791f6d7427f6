"""Integer columns: one int64 array as a small msgpack list.

    ["const", n, value]                       every element is `value`
    ["plain", n, width, base, bytes]          element = base + unsigned little-endian integer of `width` bytes
    ["delta", n, first, width, base, bytes]   n-1 differences in the same way, added up from `first`

All arithmetic is modulo 2**64, so any int64 array survives. Lengths are checked against what the caller
expects before anything is allocated.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from .errors import DamagedTrace, UnknownForm

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_WIDTHS: Final = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_TRIAL_FROM: Final = 64
"""From this many elements on the writer compresses both forms to see which is smaller."""


def _narrow(values: Int64Array) -> tuple[int, int, bytes]:
    """(width, base, bytes) of the narrowest unsigned form of a non-empty array."""
    base = int(values.min())
    spread = int(values.max()) - base
    width = 1 if spread < 1 << 8 else 2 if spread < 1 << 16 else 4 if spread < 1 << 32 else 8
    raw = values.view(np.uint64) - np.uint64(base & 0xFFFFFFFFFFFFFFFF)
    return width, base, raw.astype(_WIDTHS[width]).tobytes()


def _plain(values: Int64Array) -> list[Any]:
    return ["plain", len(values), *_narrow(values)]


def _delta(values: Int64Array) -> list[Any]:
    return ["delta", len(values), int(values[0]), *_narrow(np.diff(values))]


def trial_size(column: Any) -> int:
    """Compressed bytes of an encoded column, as a measure to choose between forms of the same data."""
    compress = _trial.compressor.compress
    return sum(len(compress(part)) + 4 for part in _payloads(column)) + 8


class _Trial(threading.local):
    """A compressor of each thread: making one takes longer than most of its inputs."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)


_trial = _Trial()


def _payloads(column: Any) -> list[bytes]:
    if isinstance(column, bytes):
        return [column]
    if isinstance(column, list):
        return [part for item in column for part in _payloads(item)]
    return []


def encode_column(values: Int64Array) -> list[Any]:
    """The smallest form of `values` (int64[n], any values)."""
    count = len(values)
    if count == 0:
        return ["const", 0, 0]
    if bool((values == values[0]).all()):
        return ["const", count, int(values[0])]
    if count == 1:
        return _plain(values)
    plain, delta = _plain(values), _delta(values)
    if count < _TRIAL_FROM:
        return plain if len(plain[-1]) <= len(delta[-1]) else delta
    return min((plain, delta), key=trial_size)


def encode_plain_column(values: Int64Array) -> list[Any]:
    """`values` without differences: for data whose repetition the compressor must see."""
    if len(values) == 0 or bool((values == values[0]).all()):
        return encode_column(values)
    return _plain(values)


def check_integer(value: Any, what: str, low: int = _INT64_MIN, high: int = _INT64_MAX) -> int:
    """`value` if it is an integer in [low, high], else DamagedTrace."""
    if type(value) is not int or not low <= value <= high:
        raise DamagedTrace(f"{what} is {_short(value)}, not an integer from {low} to {high}")
    return value


def _short(value: Any) -> str:
    if isinstance(value, (int, float, bool, type(None))):
        return repr(value)[:40]
    return f"a {type(value).__name__}"


def column_length(column: Any, what: str, limit: int) -> int:
    """Number of elements an encoded column claims, checked against `limit`, without decoding it."""
    if not isinstance(column, list) or len(column) < 3:
        raise DamagedTrace(f"column {what} is not a column")
    return check_integer(column[1], f"the length of column {what}", 0, limit)


def decode_column(column: Any, what: str, *, count: int | None = None, limit: int) -> Int64Array:
    """int64 array of an encoded column.

    `count` is the length the context demands (None: any up to `limit`). Raises DamagedTrace when the column
    is not well formed.
    """
    length = column_length(column, what, limit)
    if count is not None and length != count:
        raise DamagedTrace(f"column {what} has {length} elements where {count} are needed")
    form = column[0]
    if form == "const" and len(column) == 3:
        return np.full(length, check_integer(column[2], f"the value of column {what}"), dtype=np.int64)
    if form == "plain" and len(column) == 5:
        return _widen(column[2], column[3], column[4], length, what)
    if form == "delta" and len(column) == 6 and length > 0:
        out = np.empty(length, dtype=np.int64)
        out[0] = check_integer(column[2], f"the first value of column {what}")
        out[1:] = _widen(column[3], column[4], column[5], length - 1, what)
        np.cumsum(out, out=out)
        return out
    raise UnknownForm(
        f"column {what} has the unknown form {_short(form) if not isinstance(form, str) else form[:40]}"
    )


def _widen(width: Any, base: Any, data: Any, length: int, what: str) -> Int64Array:
    if type(width) is not int or width not in _WIDTHS or not isinstance(data, bytes):
        raise DamagedTrace(f"column {what} has no integers of a known width")
    if len(data) != length * width:
        raise DamagedTrace(
            f"column {what} holds {len(data)} bytes where {length} integers of {width} bytes are claimed"
        )
    offset = check_integer(base, f"the base of column {what}")
    out = np.frombuffer(data, dtype=_WIDTHS[width]).astype(np.int64)
    if offset:
        out += np.int64(offset)
    return out


def encode_mask(mask: BoolArray) -> list[Any]:
    """A column of 0 and 1."""
    return encode_plain_column(mask.astype(np.int64))


def decode_mask(column: Any, what: str, count: int) -> BoolArray:
    """bool[count] of a column that must hold nothing but 0 and 1."""
    if column_length(column, what, count) == count and column[0] == "plain" and column[2:4] == [1, 0]:
        # The usual form, without widening 1 byte to 8 and back.
        data = column[4] if len(column) == 5 else None
        if isinstance(data, bytes) and len(data) == count:
            bits = np.frombuffer(data, dtype=np.uint8)
            if int(bits.max()) <= 1:
                return bits.view(np.bool_)
    values = decode_column(column, what, count=count, limit=count)
    if len(values) and (int(values.min()) < 0 or int(values.max()) > 1):
        raise DamagedTrace(f"column {what} must hold only 0 and 1")
    return values.astype(np.bool_)
