"""The digest of an allocator's tables that an engine's device can compute.

`mix64` is made of a few operations on whole int64 arrays, so that a device can compute it beside the engine's
work, without a synchronisation and without a kernel of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .columns import Int64Array


def _signed(number: int) -> int:
    """A 64-bit pattern as the int64 it is in two's complement."""
    return number - (1 << 64) if number >> 63 else number


MIX_A: Final = _signed(0x9E3779B97F4A7C15)
MIX_B: Final = _signed(0xC2B2AE3D27D4EB4F)
MIX_C: Final = _signed(0xFF51AFD7ED558CCD)
_BLOCK: Final = 1 << 16


def mix64(ids: Int64Array) -> int:
    """The int64 figure of a table (int64[n], in order; the order matters): the sum of

        x = ids[i] * A + i * B;  x ^= x >> 32;  x *= C;  x ^= x >> 29

    over all i, everything modulo 2**64 in two's complement, shifts arithmetic. 0 for an empty table.
    """
    total = 0
    for start in range(0, len(ids), _BLOCK):  # blocks that stay in the processor's cache
        block = ids[start : start + _BLOCK]
        x = block * np.int64(MIX_A)
        x += np.arange(start, start + len(block), dtype=np.int64) * np.int64(MIX_B)
        x ^= x >> 32
        x *= np.int64(MIX_C)
        x ^= x >> 29
        total += int(x.sum())
    return _signed(total & 0xFFFFFFFFFFFFFFFF)
