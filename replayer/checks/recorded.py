"""C15: the engine's own answers and states, where the trace carries them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from recorder.trace import StateRow
from recorder.trace.digests import mix64
from replayer.content import IntArray
from replayer.failure import CheckFailure
from replayer.pool_state import PoolState

_DIGESTS = ("_blake2b", "_mix64")
"""Endings of the names of figures that stand for a whole table."""


_OF_ANY_PLACEMENT = ("allocated_count",)
"""Figures that do not depend on which page is where."""


def check_state(
    pools: dict[str, PoolState], row: StateRow, *, digests: bool, same_placement: bool = True
) -> int:
    """Watermarks and counts after an event, and with ``digests`` the digests of the tables and free lists.

    Args:
        same_placement: whether the engine puts pages where our allocator does; if not only the number of live tokens is compared.

    Returns:
        How many figures were compared.

    Raises:
        CheckFailure: C15 for the first figure that differs.
    """
    compared = 0
    for name, figures in row.pools.items():
        state = pools.get(name)
        if state is None:
            continue
        for figure, expected in figures.items():
            if expected is None or (figure.endswith(_DIGESTS) and not digests):
                continue
            if not same_placement and figure not in _OF_ANY_PLACEMENT:
                continue
            found = _figure(state, figure)
            compared += found is not None
            if found is not None and found != expected:
                raise CheckFailure(
                    "C15",
                    f"{figure} differs from what the engine had",
                    name,
                    expected=_text(expected),
                    found=_text(found),
                )
    return compared


def _figure(state: PoolState, figure: str) -> int | bytes | None:
    allocator = state.allocator
    if figure == "watermark":
        return int(allocator.watermark_physical)
    if figure in ("low_watermark", "high_watermark"):
        return int(state.band()[0 if figure == "low_watermark" else 1])
    if figure in ("allocated_count", "available_size", "schedulable_available_size"):
        return int(getattr(allocator, figure)())
    if figure == "holes":
        return state.holes()
    if figure == "pending":
        return state.pending()
    name, _, form = figure.rpartition("_")
    if form not in _FORMS:
        return None
    if name == "virtual_to_physical":
        return _FORMS[form](state.table("virtual_to_physical")[: allocator.num_virtual_ids])
    if name == "free_virtual_ids" and allocator.free_virtual_ids is not None:
        return _FORMS[form](allocator.free_virtual_ids.cpu().numpy())
    return None


def digest(data: bytes) -> bytes:
    """The 12-byte BLAKE2b that state frames carry, of int64 little-endian ids."""
    return hashlib.blake2b(data, digest_size=12).digest()


_FORMS: dict[str, Callable[[IntArray], int | bytes]] = {
    "blake2b": lambda ids: digest(ids.tobytes()),
    "mix64": mix64,
}


def _text(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
