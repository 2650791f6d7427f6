"""Allocator states: a few figures and digests per pool after some events, kept as columns in state frames.

A state frame is `{"kind": "state", "rows", "after_seq", "pools": {pool: {figure: F}}}` with F one of

    {"present"?: 0/1 column, "integers": column}
    {"present"?: 0/1 column, "digests": bytes, "width": bytes per digest}

over the rows of the frame; `present` is left out when every row has the figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .columns import Int64Array, check_integer, decode_column, decode_mask, encode_column, encode_mask
from .errors import DamagedTrace
from .limits import MAX_STATE_FIGURES, MAX_STATE_ROWS

DIGEST_BYTES = 12


@dataclass
class StateRow:
    """State of every pool after event `after_seq` (-1: before the first one).

    `pools` maps a pool's name to its figures: `watermark` or `low_watermark` and `high_watermark`,
    `allocated_count`, `available_size`, `schedulable_available_size`, `holes`, `pending` (integers),
    `virtual_to_physical_blake2b`, `free_virtual_ids_blake2b` (12 bytes), `virtual_to_physical_mix64`,
    `free_virtual_ids_mix64` (integers, digests.py); a figure that is not known is None or left out.
    """

    after_seq: int
    pools: dict[str, dict[str, int | bytes | None]] = field(default_factory=dict)


@dataclass
class _Figure:
    """One figure of one pool: its values in the rows `numbers` (int64[k], ascending)."""

    pool: str
    name: str
    numbers: Int64Array
    integers: Int64Array | None
    digests: bytes
    width: int

    def values(self) -> list[int] | list[bytes]:
        if self.integers is not None:
            integers: list[int] = self.integers.tolist()
            return integers
        return [self.digests[at : at + self.width] for at in range(0, len(self.digests), self.width)]


class StateBatch:
    """The states of one state frame, in order; rows are made when they are asked for."""

    def __init__(self, after_seq: Int64Array, figures: list[_Figure]) -> None:
        self.after_seq = after_seq
        """int64[k]: the event each state comes after."""
        self._figures = figures
        self._rows: list[StateRow] | None = None

    @property
    def rows(self) -> list[StateRow]:
        """The states."""
        if self._rows is None:
            rows = [StateRow(seq) for seq in self.after_seq.tolist()]
            for figure in self._figures:
                for number, value in zip(figure.numbers.tolist(), figure.values(), strict=True):
                    rows[number].pools.setdefault(figure.pool, {})[figure.name] = value
            self._rows = rows
        return self._rows

    def __iter__(self) -> Iterator[StateRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.after_seq)


def encode_states(rows: list[StateRow]) -> dict[str, Any]:
    """Map of a state frame. Raises ValueError for a figure that is no integer and no bytes of one width."""
    figures: dict[str, dict[str, list[int | bytes | None]]] = {}
    for number, row in enumerate(rows):
        for pool, state in row.pools.items():
            for name, value in state.items():
                column = figures.setdefault(pool, {}).setdefault(name, [None] * len(rows))
                column[number] = value
    return {
        "kind": "state",
        "rows": len(rows),
        "after_seq": encode_column(np.array([row.after_seq for row in rows], dtype=np.int64)),
        "pools": {
            pool: {name: _encode_figure(pool, name, column) for name, column in state.items()}
            for pool, state in figures.items()
        },
    }


def _encode_figure(pool: str, name: str, column: list[int | bytes | None]) -> dict[str, Any]:
    present = np.array([value is not None for value in column], dtype=np.bool_)
    known = [value for value in column if value is not None]
    figure: dict[str, Any] = {} if bool(present.all()) else {"present": encode_mask(present)}
    integers = [value for value in known if isinstance(value, int) and not isinstance(value, bool)]
    if len(integers) == len(known):
        return {**figure, "integers": encode_column(np.array(integers, dtype=np.int64))}
    digests = [value for value in known if isinstance(value, bytes)]
    if len(digests) == len(known) and len({len(value) for value in digests}) == 1 and digests[0]:
        return {**figure, "digests": b"".join(digests), "width": len(digests[0])}
    raise ValueError(f"state figure {name!r} of pool {pool!r} is neither an integer nor bytes of one width")


def decode_states(body: dict[str, Any], last_seq: int) -> StateBatch:
    """StateBatch of a state frame's map; no row may lie after event `last_seq`."""
    rows = check_integer(body.get("rows"), "the number of states", 0, MAX_STATE_ROWS)
    after = decode_column(body.get("after_seq"), "after_seq", count=rows, limit=MAX_STATE_ROWS)
    if rows and (int(after.min()) < -1 or int(after.max()) > last_seq or bool((np.diff(after) < 0).any())):
        raise DamagedTrace("a state belongs to no event before it")
    pools = body.get("pools")
    if not isinstance(pools, dict):
        raise DamagedTrace("the state frame has no pools")
    claimed = 0
    figures = []
    for pool, state in pools.items():
        if not isinstance(pool, str) or not isinstance(state, dict):
            raise DamagedTrace("a pool of the state frame is not well formed")
        for name, figure in state.items():
            if not isinstance(name, str) or not isinstance(figure, dict):
                raise DamagedTrace(f"a figure of pool {pool!r:.40} is not well formed")
            figures.append(_decode_figure(pool, name, figure, rows))
            claimed += len(figures[-1].numbers)
            if claimed > MAX_STATE_FIGURES:
                raise DamagedTrace(f"the state frame claims more than {MAX_STATE_FIGURES} figures")
    return StateBatch(after, figures)


def _decode_figure(pool: str, name: str, figure: dict[str, Any], rows: int) -> _Figure:
    what = f"{pool}.{name}"[:80]
    numbers = np.arange(rows, dtype=np.int64)
    if "present" in figure:
        numbers = np.flatnonzero(decode_mask(figure["present"], f"{what} present", rows))
    if "integers" in figure:
        integers = decode_column(figure["integers"], what, count=len(numbers), limit=rows)
        return _Figure(pool, name, numbers, integers, b"", 1)
    digests = figure.get("digests")
    width = check_integer(figure.get("width"), f"the width of {what}", 1, 64)
    if not isinstance(digests, bytes) or len(digests) != width * len(numbers):
        raise DamagedTrace(f"the digests of {what} are not well formed")
    return _Figure(pool, name, numbers, None, digests, width)
