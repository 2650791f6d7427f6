"""C15: the engine's own answers and states, where the trace carries them."""

from __future__ import annotations

import hashlib

from recorder.trace import StateRow
from replayer.failure import CheckFailure
from replayer.pool_state import PoolState


def check_state(pools: dict[str, PoolState], row: StateRow, *, digests: bool) -> None:
    """Watermarks and counts after an event, and with ``digests`` the digests of the tables and free lists.

    Raises:
        CheckFailure: C15 for the first figure that differs.
    """
    for name, figures in row.pools.items():
        state = pools.get(name)
        if state is None:
            continue
        for figure, expected in figures.items():
            if expected is None or (isinstance(expected, bytes) and not digests):
                continue
            found = _figure(state, figure)
            if found is not None and found != expected:
                raise CheckFailure(
                    "C15",
                    f"{figure} differs from what the engine had",
                    name,
                    expected=_text(expected),
                    found=_text(found),
                )


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
    if figure == "virtual_to_physical_blake2b":
        return digest(state.table("virtual_to_physical")[: allocator.num_virtual_ids].tobytes())
    if figure == "free_virtual_ids_blake2b" and allocator.free_virtual_ids is not None:
        return digest(allocator.free_virtual_ids.cpu().numpy().tobytes())
    return None


def digest(data: bytes) -> bytes:
    """The 12-byte BLAKE2b that state frames carry, of int64 little-endian ids."""
    return hashlib.blake2b(data, digest_size=12).digest()


def _text(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
