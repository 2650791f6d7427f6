"""The `mix64` figure of a table, computed where the table is: a handful of tensor operations, no synchronisation.

`recorder.trace.digests.mix64` is the same sum over numpy arrays, for whoever compares; docs/trace-format.md has the formula.
"""

from __future__ import annotations

from typing import Any

from .trace.digests import MIX_A, MIX_B, MIX_C

_rows: dict[Any, Any] = {}
"""Per device: i * B for the longest table seen, int64[n]; two tables of up to 100,000 pages are usual, so it is kept."""


def mix64_on_device(ids: Any) -> Any:
    """`mix64` of an int64[n] tensor as int64[1] on its device."""
    import torch

    count = ids.shape[0]
    rows = _rows.get(ids.device)
    if rows is None or rows.shape[0] < count:
        rows = _rows[ids.device] = torch.arange(max(count, 1), dtype=torch.int64, device=ids.device) * MIX_B
    mixed = ids * MIX_A
    mixed += rows[:count]
    mixed ^= mixed >> 32
    mixed *= MIX_C
    mixed ^= mixed >> 29
    return mixed.sum().reshape(1)
