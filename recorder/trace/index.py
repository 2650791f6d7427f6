"""The index at the end of a cleanly closed file: where its chunks lie, so that `seek` need not read them.

Content of the last, skippable frame:

    msgpack map {"kind": "index", "offsets": column, "first_seq": column} | u32 its size | u32 its crc32 |
    "KVTAPEIX"

A reader that ignores skippable frames (the zstd command) never sees it. It can be lost without losing events.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgpack
import numpy as np

from .columns import Int64Array, decode_column, encode_column
from .errors import DamagedTrace
from .frames import SKIPPABLE_MAGIC, skippable_frame, unpack_map

_TAIL: Final = struct.Struct("<II8s")
_MARK: Final = b"KVTAPEIX"
MAX_INDEX_CHUNKS: Final = 1 << 22


@dataclass
class Index:
    """Per chunk: number of its frame, byte offset of it, its first event number (int64[c] each, c > 0)."""

    frames: Int64Array
    offsets: Int64Array
    first_seq: Int64Array

    def crc(self) -> int:
        """`chunk_places_crc` over all chunks."""
        places = np.stack([self.frames, self.offsets, self.first_seq], axis=1).astype("<u8")
        return zlib.crc32(places.tobytes())

    def find(self, seq: int) -> int:
        """Number of the chunk that holds event `seq` (the last chunk for events past the end)."""
        return int(np.searchsorted(self.first_seq, seq, side="right")) - 1


def chunk_places_crc(crc: int, frame: int, offset: int, first_seq: int) -> int:
    """`crc` carried on over one chunk's place: how a reader compares the index with the chunks it met."""
    return zlib.crc32(struct.pack("<QQQ", frame, offset, first_seq), crc)


def index_frame(frames: list[int], offsets: list[int], first_seq: list[int]) -> bytes:
    """The skippable frame with the index."""
    content: bytes = msgpack.packb(
        {
            "kind": "index",
            "frames": encode_column(np.array(frames, dtype=np.int64)),
            "offsets": encode_column(np.array(offsets, dtype=np.int64)),
            "first_seq": encode_column(np.array(first_seq, dtype=np.int64)),
        }
    )
    return skippable_frame(content + _TAIL.pack(len(content), zlib.crc32(content), _MARK))


def parse_index(payload: bytes) -> Index:
    """Index of a skippable frame's content. Raises DamagedTrace."""
    if len(payload) < _TAIL.size:
        raise DamagedTrace("the index is too short")
    size, crc, mark = _TAIL.unpack(payload[-_TAIL.size :])
    content = payload[: -_TAIL.size]
    if mark != _MARK or size != len(content) or zlib.crc32(content) != crc:
        raise DamagedTrace("the index does not match its checksum")
    body = unpack_map(content)
    offsets = decode_column(body.get("offsets"), "index offsets", limit=MAX_INDEX_CHUNKS)
    first_seq = decode_column(
        body.get("first_seq"), "index first_seq", count=len(offsets), limit=MAX_INDEX_CHUNKS
    )
    frames = decode_column(body.get("frames"), "index frames", count=len(offsets), limit=MAX_INDEX_CHUNKS)
    if len(offsets) == 0 or bool((np.diff(offsets) <= 0).any()) or bool((np.diff(first_seq) <= 0).any()):
        raise DamagedTrace("the index is not in order")
    if int(offsets[0]) < 0 or int(frames.min()) < 1 or int(first_seq[0]) != 0:
        raise DamagedTrace("the index does not begin with event 0")
    return Index(frames, offsets, first_seq)


def read_index(file: BinaryIO, size: int) -> Index | None:
    """The index at the end of a file of `size` bytes, None where there is no sound one."""
    if size < 8 + _TAIL.size:
        return None
    file.seek(size - _TAIL.size)
    content_size, _, mark = _TAIL.unpack(file.read(_TAIL.size))
    payload_size = content_size + _TAIL.size
    if mark != _MARK or payload_size + 8 > size:
        return None
    file.seek(size - payload_size - 8)
    head = file.read(8)
    if head != SKIPPABLE_MAGIC + struct.pack("<I", payload_size):
        return None
    if payload_size > _MAX_INDEX_BYTES:
        return None
    try:
        index = parse_index(file.read(payload_size))
    except DamagedTrace:
        return None
    return index if int(index.offsets[-1]) < size else None


_MAX_INDEX_BYTES: Final = 64 << 20
