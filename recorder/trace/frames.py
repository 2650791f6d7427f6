"""zstd frames: writing one, and walking over a file of them without trusting any length in it.

    data frame       28 B5 2F FD | frame header | blocks | xxh64 (low 4 bytes)     content: one msgpack map
    skippable frame  5E 2A 4D 18 | u32 size     | size bytes                       the index, see index.py

The walk reads the frame header (RFC 8878) and the three-byte header of each block, so the exact end of a
frame is known before anything is decompressed: a frame that runs past the end of the file is *cut*,
everything else that does not fit is *damaged*. Decompression happens only with a content size below
MAX_FRAME_BYTES.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import msgpack
import zstandard

from .errors import DamagedTrace
from .limits import (
    MAX_COMPRESSED_BYTES,
    MAX_FRAME_BLOCKS,
    MAX_FRAME_BYTES,
    MAX_FRAME_OBJECTS,
    MAX_WINDOW_BYTES,
)

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
SKIPPABLE_MAGIC: Final = b"\x5e\x2a\x4d\x18"
_BLOCK_BYTES: Final = 1 << 17


class CutFrame(Exception):
    """The file ends inside a frame: `missing` bytes at least are not there."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        super().__init__(f"at least {missing} bytes are missing")


@dataclass
class RawFrame:
    """One frame as it lies in the file. `payload` is the whole frame (data) or its content (skippable)."""

    offset: int
    end: int
    skippable: bool
    payload: bytes
    content_size: int


def compress_frame(body: dict[str, Any], compressor: zstandard.ZstdCompressor) -> bytes:
    """One data frame holding `body`. Raises ValueError above MAX_FRAME_BYTES."""
    content: bytes = msgpack.packb(body, use_bin_type=True)
    if len(content) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(content)} bytes is above the format's limit of {MAX_FRAME_BYTES}")
    return compressor.compress(content)


def new_compressor(level: int) -> zstandard.ZstdCompressor:
    """Compressor that writes what the format asks for: content checksum and content size."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)


def skippable_frame(content: bytes) -> bytes:
    """A skippable frame around `content`."""
    return SKIPPABLE_MAGIC + struct.pack("<I", len(content)) + content


class _Window:
    """Bytes of the file from `offset` on, read as needed."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        file.seek(offset)
        self._file = file
        self.data = bytearray()

    def need(self, size: int) -> None:
        """Have at least `size` bytes from the start, or raise CutFrame."""
        while len(self.data) < size:
            piece = self._file.read(max(1 << 16, size - len(self.data)))
            if not piece:
                raise CutFrame(size - len(self.data))
            self.data += piece


def read_frame(file: BinaryIO, offset: int) -> RawFrame | None:
    """The frame that starts at `offset`, None at the end of the file.

    Raises CutFrame when the file ends inside the frame, DamagedTrace when the bytes are no frame.
    """
    window = _Window(file, offset)
    try:
        window.need(1)
    except CutFrame:
        return None
    try:
        window.need(4)
    except CutFrame:
        head = bytes(window.data)
        if not (ZSTD_MAGIC.startswith(head) or SKIPPABLE_MAGIC.startswith(head)):
            raise DamagedTrace("these bytes are not the start of a frame") from None
        raise
    magic = bytes(window.data[:4])
    if magic == SKIPPABLE_MAGIC:
        return _skippable(window, offset)
    if magic != ZSTD_MAGIC:
        raise DamagedTrace("these bytes are not the start of a frame")
    content_size, position = _frame_header(window)
    position = _walk_blocks(window, position)
    window.need(position + 4)
    end = position + 4
    return RawFrame(offset, offset + end, False, bytes(window.data[:end]), content_size)


def _skippable(window: _Window, offset: int) -> RawFrame:
    window.need(8)
    size = int.from_bytes(window.data[4:8], "little")
    if size > MAX_COMPRESSED_BYTES:
        raise DamagedTrace(f"a skippable frame claims {size} bytes")
    window.need(8 + size)
    return RawFrame(offset, offset + 8 + size, True, bytes(window.data[8 : 8 + size]), size)


def _frame_header(window: _Window) -> tuple[int, int]:
    """(content size, bytes of magic and header)."""
    window.need(5)
    descriptor = window.data[4]
    if descriptor & 0x08:
        raise DamagedTrace("a reserved bit of the frame header is set")
    if not descriptor & 0x04:
        raise DamagedTrace("the frame has no checksum")
    if descriptor & 0x03:
        raise DamagedTrace("the frame asks for a dictionary")
    single_segment = bool(descriptor & 0x20)
    position = 5 if single_segment else 6
    size_bytes = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    if size_bytes == 0:
        raise DamagedTrace("the frame does not state its content size")
    window.need(position + size_bytes)
    content_size = int.from_bytes(window.data[position : position + size_bytes], "little")
    if size_bytes == 2:
        content_size += 256
    if content_size > MAX_FRAME_BYTES:
        raise DamagedTrace(
            f"the frame claims {content_size} bytes, above the format's limit of {MAX_FRAME_BYTES}"
        )
    return content_size, position + size_bytes


def _walk_blocks(window: _Window, position: int) -> int:
    """Position after the last block."""
    for _ in range(MAX_FRAME_BLOCKS):
        window.need(position + 3)
        block = int.from_bytes(window.data[position : position + 3], "little")
        form, size = (block >> 1) & 3, block >> 3
        if form == 3 or size > _BLOCK_BYTES:
            raise DamagedTrace("a block header of the frame is impossible")
        position += 3 + (1 if form == 1 else size)
        if position > MAX_COMPRESSED_BYTES:
            raise DamagedTrace("the frame is larger than the format allows")
        window.need(position)
        if block & 1:
            return position
    raise DamagedTrace("the frame has more blocks than the format allows")


def decompress_frame(frame: RawFrame) -> bytes:
    """Content of a data frame. Raises DamagedTrace (checksum included)."""
    try:
        content = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompress(
            frame.payload, max_output_size=frame.content_size, allow_extra_data=False
        )
    except zstandard.ZstdError as problem:
        raise DamagedTrace(f"the frame does not decompress ({problem})") from None
    if len(content) != frame.content_size:
        raise DamagedTrace(f"the frame holds {len(content)} bytes where {frame.content_size} are claimed")
    return content


def _object_sizes() -> list[tuple[int, int, int]]:
    """Per first byte of a msgpack object: (bytes of its length field, bytes that follow, objects that
    follow).

    A length field of -1 marks what no frame of ours holds.
    """
    table = [(0, 0, 0)] * 0x100
    for low in range(16):
        table[0x80 + low] = (0, 0, 2 * low)
        table[0x90 + low] = (0, 0, low)
    for low in range(32):
        table[0xA0 + low] = (0, low, 0)
    for first, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4), (0xD9, 1), (0xDA, 2), (0xDB, 4)):
        table[first] = (width, 1, 0)
    for first, width, objects in ((0xDC, 2, 1), (0xDD, 4, 1), (0xDE, 2, 2), (0xDF, 4, 2)):
        table[first] = (width, 0, objects)
    for first, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        table[first] = (0, size, 0)
    for first, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        table[first] = (0, size, 0)
    for first in (0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
        table[first] = (-1, 0, 0)
    return table


_OBJECT_SIZES: Final = _object_sizes()


def check_objects(content: bytes) -> None:
    """Walk over one msgpack object without making any. Raises DamagedTrace when it is cut, too big or
    followed by more.

    Unpacking turns one byte into up to 64 (an empty list), so the number of objects is bounded first.
    """
    position, waiting, budget = 0, 1, MAX_FRAME_OBJECTS
    size = len(content)
    table = _OBJECT_SIZES
    while waiting:
        if position >= size:
            raise DamagedTrace("the frame's msgpack map is cut")
        field, skip, objects = table[content[position]]
        position += 1
        if field:
            if field < 0:
                raise DamagedTrace("the frame holds a msgpack type that no trace has")
            length = int.from_bytes(content[position : position + field], "big")
            position += field + skip * length
            waiting += objects * length - 1
        else:
            position += skip
            waiting += objects - 1
        budget -= 1
        if waiting > budget:
            raise DamagedTrace(f"the frame holds more than {MAX_FRAME_OBJECTS} msgpack objects")
    if position != size:
        raise DamagedTrace("the frame is not exactly one msgpack map")


def unpack_map(content: bytes) -> dict[str, Any]:
    """The one msgpack map of a frame. Raises DamagedTrace when it is something else."""
    check_objects(content)
    size = len(content)
    try:
        body = msgpack.unpackb(
            content,
            raw=False,
            strict_map_key=False,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=size,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as problem:
        raise DamagedTrace(f"the frame is not one msgpack map ({type(problem).__name__})") from None
    if not isinstance(body, dict) or not isinstance(body.get("kind"), str):
        raise DamagedTrace("the frame is not a msgpack map with a kind")
    return body
