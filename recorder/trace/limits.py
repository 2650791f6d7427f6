"""Upper bounds of the format. The writer stays under them, the reader refuses what is above.

They exist so that reading needs bounded memory whatever lengths a file claims.
"""

from __future__ import annotations

from typing import Final

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 2

DEFAULT_CHUNK_EVENTS: Final = 8192
MAX_CHUNK_EVENTS: Final = 65536
MAX_CHUNK_IDS: Final = 1 << 23
"""Most ids in all lists of one chunk together once expanded (64 MiB as int64)."""
CLOSE_CHUNK_IDS: Final = 1 << 22
"""The writer closes a chunk early before its lists hold more ids than this."""
MAX_EVENT_IDS: Final = MAX_CHUNK_IDS - CLOSE_CHUNK_IDS
"""Most ids the lists of one event may hold together."""
MAX_CHUNK_NAMES: Final = 1 << 14
"""Most requests named in one chunk; the writer closes the chunk early."""
MAX_NAME_CHARACTERS: Final = 256
"""Most characters in the name of a request; the writer cuts what is longer."""
MAX_REASON_CHARACTERS: Final = 4096
"""Most characters in a footer's reason; the writer cuts what is longer."""

MAX_FRAME_BYTES: Final = 96 << 20
"""Most uncompressed bytes in one frame: MAX_CHUNK_IDS as plain int64, the event columns, and room."""
MAX_COMPRESSED_BYTES: Final = MAX_FRAME_BYTES + (MAX_FRAME_BYTES >> 7) + 4096
MAX_FRAME_BLOCKS: Final = 1 << 18
MAX_WINDOW_BYTES: Final = 128 << 20
MAX_POOLS: Final = 1024
MAX_STATE_ROWS: Final = MAX_CHUNK_EVENTS + 1
MAX_STATE_FIGURES: Final = 1 << 20
"""Most figures in one state frame, over all pools and rows."""
MAX_CODEC_DEPTH: Final = 8
MAX_STREAMS: Final = 4096
MAX_FRAME_OBJECTS: Final = 1 << 17
"""Most msgpack objects in one frame: unpacking makes a Python object of each, up to 64 bytes from one byte.
"""
