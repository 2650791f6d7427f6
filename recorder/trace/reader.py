"""Reads a trace file frame by frame, with bounded memory whatever the file says.

How an ending is told apart:

* clean: footer and index are there.
* partial: whole frames and then nothing, no footer: the writer was stopped and lost its open chunk.
* cut: the file ends inside a frame, in zero bytes, or between footer and index.

Everything else that does not fit raises DamagedTrace with frame, offset and the last good event.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from .chunk import Chunk, decode_chunk
from .columns import check_integer
from .errors import (
    DamagedTrace,
    EmptyTrace,
    ImpossibleEvent,
    NewerTrace,
    NoSuchEvent,
    NotATrace,
    TraceError,
    TraceNotFound,
    UnknownForm,
)
from .frames import CutFrame, RawFrame, decompress_frame, read_frame, unpack_map
from .header import Header, check_version, header_from_map
from .index import Index, chunk_places_crc, parse_index, read_index
from .limits import FORMAT_MAJOR, FORMAT_MINOR, MAX_REASON_CHARACTERS, MAX_STATE_ROWS
from .states import StateBatch, StateRow, decode_states
from .walk import FrameWalk, Place

Ending = Literal["clean", "cut", "partial"]


@dataclass(frozen=True)
class Recovery:
    """Why a trace ends early and what is missing.

    `frame` and `byte_offset` are where the good prefix ends, `bytes_missing` the least number of bytes that
    were lost (0 when that cannot be known), `last_seq` the last event that was read (-1: none).
    """

    reason: str
    frame: int
    byte_offset: int
    bytes_missing: int
    last_seq: int


@dataclass(frozen=True)
class Footer:
    """What the writer counted when it closed the file. `reason`: why recording ended, "" for a normal end."""

    events: int
    states: int
    dropped: int
    dropped_at_end: int
    extra: dict[str, Any]
    reason: str = ""


@dataclass(frozen=True)
class Survey:
    """Where everything lies, from a pass over a whole file.

    `frames`, `offsets`, `first_seq`: of each chunk. `end`: where its sound frames end, in bytes. `dropped`
    leaves out what only the footer knows.
    """

    frames: list[int]
    offsets: list[int]
    first_seq: list[int]
    events: int
    states: int
    dropped: int
    footer: Footer | None
    ended: Ending
    end: int


@dataclass
class _Progress:
    """One pass over the frames: where it began, what it has seen. `whole`: it began with the first event."""

    place: Place
    next_seq: int = 0
    whole: bool = True
    states: int = 0
    dropped: int = 0
    places_crc: int = 0
    footer: Footer | None = None
    ended: Ending | None = None
    recovery: Recovery | None = None


class TraceReader:
    """Opens a trace. `header` is read at once; `items()` and `chunks()` stream the rest.

    `recovered`, `footer` and `ended` say how the file ends once an iteration came to its end (`ended` looks
    ahead when it is asked earlier). Raises TraceNotFound, EmptyTrace, NotATrace, NewerTrace or DamagedTrace.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recovered: Recovery | None = None
        self.footer: Footer | None = None
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 (close() closes it)
        except FileNotFoundError:
            raise TraceNotFound(f"{self.path}: no such file") from None
        except OSError as problem:
            raise TraceNotFound(f"{self.path} cannot be opened: {problem.strerror or problem}") from None
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.header, self._body = self._read_header()
            self._index: Index | None = read_index(self._file, self.size)
        except OSError as problem:
            self._file.close()
            raise TraceNotFound(f"{self.path} cannot be read: {problem.strerror or problem}") from None
        except BaseException:
            self._file.close()
            raise
        self._walk = FrameWalk(self._file, self.path, closed=self._index is not None)
        self._start: _Progress | None = None
        self._ended: Ending | None = None if self._index is None else "clean"

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Chunks already handed out stay usable."""
        self._file.close()

    @property
    def ended(self) -> Ending:
        """How the file ends: "clean", "cut" or "partial". Walks over the file when that is not known."""
        if self._ended is None:
            last: RawFrame | None = None
            for _, frame in self._walk.frames(Place(1, self._body)):
                last = frame
            lost = self._walk.tail is not None
            if last is not None and not lost:
                lost = last.skippable or unpack_map(decompress_frame(last))["kind"] == "footer"
            self._ended = "cut" if lost else "partial"
        return self._ended

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in order, from the first one or from where `seek` went."""
        for item in self._items(states=False):
            if isinstance(item, Chunk):
                yield item

    def states(self) -> Iterator[StateRow]:
        """All states in order."""
        for item in self.items():
            if isinstance(item, StateBatch):
                yield from item

    def items(self) -> Iterator[Chunk | StateBatch]:
        """Chunks and state batches in file order, from the first one or from where `seek` went.

        Raises DamagedTrace, ImpossibleEvent, NewerTrace, or at the end EmptyTrace when there was no event. A
        cut file just ends, and `recovered` says so.
        """
        return self._items(states=True)

    def seek(self, seq: int) -> None:
        """Let the next iteration begin with the chunk that holds event `seq`.

        Uses the index; without one (a file that was not closed) the chunks before it are read. Raises
        NoSuchEvent outside the trace.
        """
        self._start = None
        if seq >= 0:
            if self._index is None:
                progress = _Progress(Place(1, self._body))
            else:
                number = self._index.find(seq)
                place = Place(int(self._index.frames[number]), int(self._index.offsets[number]))
                progress = _Progress(place, int(self._index.first_seq[number]), whole=False)
            before = replace(progress)
            for after, item in self._pass(progress, states=False):
                if isinstance(item, Chunk) and seq < item.first_seq + len(item):
                    self._start = before
                    return
                before = replace(progress, place=after)
        raise NoSuchEvent(f"{self.path}: there is no event {seq}")

    def survey(self) -> Survey:
        """Look at every frame and every state; ids stay packed. Raises what `items()` raises."""
        progress = _Progress(Place(1, self._body))
        place = progress.place
        chunks: list[tuple[int, int, int]] = []
        for after, item in self._pass(progress, states=True):
            if isinstance(item, Chunk):
                chunks.append((place.frame, place.offset, item.first_seq))
            place = after
        if not chunks:
            raise EmptyTrace(f"{self.path}: the trace has a header and no event")
        assert progress.ended is not None
        frames, offsets, first_seq = (list(column) for column in zip(*chunks, strict=True))
        return Survey(
            frames,
            offsets,
            first_seq,
            progress.next_seq,
            progress.states,
            progress.dropped,
            progress.footer,
            progress.ended,
            place.offset,
        )

    def find_footer(self) -> Footer | None:
        """The footer, without reading what lies before the last chunk; None where there is no index or the
        end is damaged.
        """
        if self._index is None:
            return None
        place = Place(int(self._index.frames[-1]), int(self._index.offsets[-1]))
        progress = _Progress(place, int(self._index.first_seq[-1]), whole=False)
        try:
            for _ in self._pass(progress, states=False):
                pass
        except TraceError:
            return None
        return progress.footer

    def _items(self, *, states: bool) -> Iterator[Chunk | StateBatch]:
        progress = self._start or _Progress(Place(1, self._body))
        self._start = None
        self.recovered, self.footer = None, None
        for _, item in self._pass(progress, states=states):
            if item is not None:
                yield item
        self.footer, self.recovered, self._ended = progress.footer, progress.recovery, progress.ended
        if progress.next_seq == 0:
            why = f" ({progress.recovery.reason})" if progress.recovery is not None else ""
            raise EmptyTrace(f"{self.path}: the trace has a header and no event{why}")

    def _read_header(self) -> tuple[Header, int]:
        """(header, offset of the second frame)."""
        if self.size == 0:
            raise EmptyTrace(f"{self.path}: the file is empty")
        foreign = f"{self.path} is not a kvtape trace"
        try:
            frame = read_frame(self._file, 0)
        except CutFrame as cut:
            reason = f"the file ends inside its first frame ({cut})"
            raise DamagedTrace(reason, path=self.path, frame=0, offset=0) from None
        except DamagedTrace as problem:
            raise NotATrace(f"{foreign}: {problem.reason}") from None
        if frame is None or frame.skippable:
            raise NotATrace(f"{foreign}: it does not begin with a header frame")
        try:
            content = decompress_frame(frame)
        except DamagedTrace as problem:
            raise problem.located(self.path, 0, 0, -1) from None
        try:
            body = unpack_map(content)
        except DamagedTrace as problem:
            raise NotATrace(f"{foreign}: {problem.reason}") from None
        try:
            check_version(body)
            return header_from_map(body), frame.end
        except DamagedTrace as problem:
            raise problem.located(self.path, 0, 0, -1) from None
        except (NotATrace, NewerTrace) as problem:
            raise type(problem)(f"{self.path}: {problem}") from None

    def _pass(
        self, progress: _Progress, *, states: bool
    ) -> Iterator[tuple[Place, Chunk | StateBatch | None]]:
        """(place after it, item) of each frame from `progress.place` on; `progress` is kept up to date."""
        place = after = progress.place
        try:
            for place, frame in self._walk.frames(progress.place):
                item = self._take(frame, place, progress, states=states)
                after = Place(place.frame + 1, frame.end)
                yield after, item
        except DamagedTrace as problem:
            raise self._located(problem, place, progress.next_seq) from None
        except OSError as problem:
            reason = f"the system cannot read it ({problem.strerror or problem})"
            raise self._located(DamagedTrace(reason), place, progress.next_seq) from None
        except (ImpossibleEvent, NewerTrace) as problem:
            where = f"{self.path}, frame {place.frame}, byte {place.offset}"
            raise _same_cause(problem, f"{where}: {problem}") from None
        self._finish(progress, after)

    def _located(self, problem: DamagedTrace, place: Place, next_seq: int) -> TraceError:
        if isinstance(problem, UnknownForm) and self.header.format[1] > FORMAT_MINOR:
            needed = f"{FORMAT_MAJOR}.{self.header.format[1]}"
            return NewerTrace(
                f"{self.path}, frame {place.frame}, byte {place.offset}: {problem.reason}; a kvtape that knows "
                f"format {needed} is needed"
            )
        return problem.located(self.path, place.frame, place.offset, next_seq - 1)

    def _take(
        self, frame: RawFrame, place: Place, progress: _Progress, *, states: bool
    ) -> Chunk | StateBatch | None:
        if progress.ended is not None or (progress.footer is not None and not frame.skippable):
            raise DamagedTrace("a frame lies after the end of the trace")
        if frame.skippable:
            if progress.footer is None:
                raise DamagedTrace("a skippable frame lies before the footer")
            index = parse_index(frame.payload)
            if progress.whole and index.crc() != progress.places_crc:
                raise DamagedTrace("the index does not name the chunks that are there")
            progress.ended = "clean"
            return None
        body = unpack_map(decompress_frame(frame))
        if body.get("trace") != self.header.uuid:
            raise DamagedTrace("the frame belongs to another trace")
        kind = body["kind"]
        if kind == "chunk":
            return self._chunk(body, place, progress)
        if kind == "state":
            progress.states += check_integer(body.get("rows"), "the number of states", 0, MAX_STATE_ROWS)
            return decode_states(body, progress.next_seq - 1) if states else None
        if kind == "footer":
            progress.footer = _read_footer(body, progress)
            return None
        if self.header.format[1] > FORMAT_MINOR:
            return None
        raise DamagedTrace(f"the frame is of the unknown kind {kind[:40]!r}")

    def _chunk(self, body: dict[str, Any], place: Place, progress: _Progress) -> Chunk:
        next_seq = progress.next_seq
        chunk = decode_chunk(
            body, self.header, lambda problem: self._located(problem, place, next_seq), next_seq
        )
        progress.places_crc = chunk_places_crc(
            progress.places_crc, place.frame, place.offset, chunk.first_seq
        )
        progress.next_seq += len(chunk)
        progress.dropped += int(chunk.drops[:, 1].sum())
        return chunk

    def _finish(self, progress: _Progress, end: Place) -> None:
        """Set how `progress` ended, after the last frame."""
        tail = self._walk.tail
        if progress.ended is not None:
            return
        progress.ended = "cut"
        missing = 0
        if tail is not None:
            reason, missing = tail.reason, tail.missing
        elif progress.footer is not None:
            reason = "the index is missing; all events are there"
        else:
            progress.ended = "partial"
            reason = "there is no footer: the writer was stopped before it closed the file"
        progress.recovery = Recovery(reason, end.frame, end.offset, missing, progress.next_seq - 1)


def _read_footer(body: dict[str, Any], progress: _Progress) -> Footer:
    counts = {
        name: check_integer(body.get(name), f"the footer's count of {name}", 0)
        for name in ("events", "states", "dropped", "dropped_at_end")
    }
    seen = {"events": progress.next_seq}
    if progress.whole:
        seen["states"] = progress.states
        seen["dropped"] = progress.dropped + counts["dropped_at_end"]
    for name, number in seen.items():
        if number != counts[name]:
            raise DamagedTrace(f"the footer counts {counts[name]} {name}, and there are {number}")
    reason = body.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MAX_REASON_CHARACTERS:
        raise DamagedTrace("the footer's reason is no text, or too long")
    extra = {key: value for key, value in body.items() if key not in (*counts, "reason", "kind", "trace")}
    return Footer(extra=extra, reason=reason, **counts)


def _same_cause(problem: ImpossibleEvent | NewerTrace, text: str) -> TraceError:
    return NewerTrace(text) if isinstance(problem, NewerTrace) else ImpossibleEvent(text)
