"""Walks over the frames of a trace file and tells a cut tail from damage inside.

The end of a frame follows from its own block headers, so a frame that runs past the end of the file is known
without decompressing anything. That alone does not make it a cut file: a flipped bit in a block header makes
a frame look longer too. So the file counts as cut only when it has no index at its end and no later sound
frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from .errors import DamagedTrace
from .frames import ZSTD_MAGIC, CutFrame, RawFrame, decompress_frame, read_frame, unpack_map

_SCAN_BYTES: Final = 1 << 20
_MAX_TRIES: Final = 64
"""Starts of a frame to look at behind a cut; compressed data holds one by chance every 4 GiB."""


@dataclass(frozen=True)
class Place:
    """A frame's number, counted from 0, and where it starts in the file."""

    frame: int
    offset: int


@dataclass(frozen=True)
class Tail:
    """What a file ends in when it does not end with a whole frame; `missing` bytes at least are not there."""

    reason: str
    place: Place
    missing: int


class FrameWalk:
    """Frames of `file` in order. `closed`: the file has its index at the end, so nothing can be cut off."""

    def __init__(self, file: BinaryIO, path: Path, closed: bool) -> None:
        self._file = file
        self._path = path
        self._closed = closed
        self.tail: Tail | None = None

    def frames(self, place: Place) -> Iterator[tuple[Place, RawFrame]]:
        """(place, frame) from `place` to the end; `tail` is set when the end is cut. Raises DamagedTrace."""
        self.tail = None
        while True:
            try:
                frame = read_frame(self._file, place.offset)
            except CutFrame as cut:
                if self._closed or self._sound_frame_after(place.offset + 4):
                    raise self._damage("a frame runs over the frames after it", place) from None
                self.tail = Tail("the file ends inside a frame", place, cut.missing)
                return
            except DamagedTrace as problem:
                if self._zeros_from(place.offset):
                    self.tail = Tail("the file ends in zero bytes where frames should be", place, 0)
                    return
                raise self._damage(problem.reason, place) from None
            if frame is None:
                return
            yield place, frame
            place = Place(place.frame + 1, frame.end)

    def _damage(self, reason: str, place: Place) -> DamagedTrace:
        return DamagedTrace(reason, path=self._path, frame=place.frame, offset=place.offset)

    def _zeros_from(self, offset: int) -> bool:
        self._file.seek(offset)
        while piece := self._file.read(_SCAN_BYTES):
            if piece.strip(b"\0"):
                return False
        return True

    def _sound_frame_after(self, offset: int) -> bool:
        overlap, tries = len(ZSTD_MAGIC) - 1, 0
        while True:
            self._file.seek(offset)
            piece = self._file.read(_SCAN_BYTES + overlap)
            found = piece.find(ZSTD_MAGIC)
            while found >= 0:
                tries += 1
                if tries > _MAX_TRIES or self._is_sound(offset + found):
                    return True
                found = piece.find(ZSTD_MAGIC, found + 1)
            if len(piece) <= overlap:
                return False
            offset += len(piece) - overlap

    def _is_sound(self, offset: int) -> bool:
        try:
            frame = read_frame(self._file, offset)
            return frame is not None and bool(unpack_map(decompress_frame(frame)))
        except (CutFrame, DamagedTrace):
            return False
