"""Writes a trace file, chunk by chunk, so that a kill at any moment leaves a readable prefix.

    NAME.partial while writing; after close() NAME:

    +--------+-------+-------+---+-------+-------+--------+-------+
    | header | chunk | state | . | chunk | state | footer | index |
    +--------+-------+-------+---+-------+-------+--------+-------+

Every frame is handed to the operating system whole, in one place in the file; nothing written is changed
later. So what a killed writer loses is the open chunk, and what a killed machine loses is a tail.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .columns import Int64Array
from .encode import EventBuffer, encode_chunk, pack_row
from .errors import EmptyTrace, OutputExists, OutputRefused, TraceWriteFailed
from .event_rules import RULES, no_such_kind
from .frames import compress_frame, new_compressor
from .header import Header, header_to_map, validate_header
from .index import index_frame
from .limits import (
    CLOSE_CHUNK_IDS,
    DEFAULT_CHUNK_EVENTS,
    MAX_CHUNK_EVENTS,
    MAX_CHUNK_NAMES,
    MAX_EVENT_IDS,
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_STATE_FIGURES,
)
from .locks import lock
from .schema import (
    NONE,
    QUERY_SLOT,
    RESULT_SLOT,
    EventKind,
    ResultKind,
)
from .states import DIGEST_BYTES, StateRow, encode_states

Ids: TypeAlias = "npt.NDArray[Any] | Sequence[int]"


class _Unset:
    """Type of `UNSET`: a result that was not recorded, as opposed to None, which is an answer."""


UNSET: Final = _Unset()
DEFAULT_LEVEL: Final = 3
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


_NOT_RECORDED: Final = int(ResultKind.NOT_RECORDED)
_NULL: Final = int(ResultKind.NULL)
_IDS: Final = int(ResultKind.IDS)
_INTEGER: Final = int(ResultKind.INTEGER)


def partial_path(path: Path) -> Path:
    """Where a trace lies while it is being written."""
    return path.with_name(path.name + ".partial")


class TraceWriter:
    """Writes events to `path`; a context manager that closes cleanly, or leaves NAME.partial after an
    exception.

    `chunk_events` is the number of events per chunk; a chunk whose lists would hold more than `chunk_ids` ids
    is closed early. `level` is zstd's. Raises OutputExists when `path` or its
    `.partial` is there and `force` is not given, TraceWriteFailed when the system refuses a write (then the
    writer is finished: everything up to the last whole frame stays readable in the `.partial`),
    ImpossibleEvent or TooManyIds for an event the schema does not know.
    """

    def __init__(
        self,
        path: Path | str,
        header: Header,
        *,
        chunk_events: int = DEFAULT_CHUNK_EVENTS,
        chunk_ids: int = CLOSE_CHUNK_IDS,
        level: int = DEFAULT_LEVEL,
        force: bool = False,
    ) -> None:
        if not 1 <= chunk_events <= MAX_CHUNK_EVENTS:
            raise ValueError(f"a chunk holds 1 to {MAX_CHUNK_EVENTS} events, not {chunk_events}")
        if not 1 <= chunk_ids <= CLOSE_CHUNK_IDS:
            raise ValueError(f"the lists of a chunk hold 1 to {CLOSE_CHUNK_IDS} ids, not {chunk_ids}")
        validate_header(header)
        self.path = Path(path)
        self.header = header
        self.events = 0
        self.dropped_events = 0
        self._partial = partial_path(self.path)
        self._chunk_events = chunk_events
        self._chunk_ids = chunk_ids
        self._compressor = new_compressor(level)
        self._page_sizes = [pool.page_size for pool in header.pools]
        self.pool_count = len(header.pools)
        self._rules = RULES[header.level]
        self._identity = header.uuid
        self._buffer = EventBuffer()
        self._names: dict[int, str] = {}
        self._states: list[StateRow] = []
        self._state_figures = 0
        self._state_rows = 0
        self._offsets: list[int] = []
        self._first_seq: list[int] = []
        self._chunk_frames: list[int] = []
        self._frames = 0
        self._position = 0
        self._written_events = 0
        for existing in (self.path, self._partial):
            if existing.exists() and not force:
                raise OutputExists(
                    f"{existing} is already there; choose another name or overwrite it with --force"
                )
        try:
            flags = os.O_WRONLY | os.O_CREAT | (0 if force else os.O_EXCL) | getattr(os, "O_CLOEXEC", 0)
            file = os.open(self._partial, flags, 0o644)
        except OSError as problem:
            raise OutputRefused(
                f"{self._partial} cannot be written: {problem.strerror or problem}"
            ) from problem
        if not lock(file):
            os.close(file)
            raise OutputRefused(f"{self._partial}: another process is writing this trace")
        self._file: int | None = file
        if force:  # only now that nobody else writes it
            os.ftruncate(file, 0)
        self._write_frame(header_to_map(header))

    def append(
        self,
        kind: EventKind | int,
        *,
        pool: int = NONE,
        time_us: int,
        value: int = NONE,
        value2: int = NONE,
        list0: Ids | None = None,
        list1: Ids | None = None,
        list2: Ids | None = None,
        result: Ids | int | _Unset | None = UNSET,
        depth: int = 0,
        request: int = NONE,
        queries: Sequence[tuple[int, bool]] = (),
        trusted: bool = False,
    ) -> int:
        """Add one event and return its number. `result`: UNSET, None, ids or an integer.

        Lists are copied. With `trusted` they are taken as they are: each must be an int64[n] array that nobody
        writes to any more (nothing of that is checked).
        """
        if self._file is None:
            self._open_file()
        rules = self._rules.get(kind)
        if rules is None:
            raise no_such_kind(self, kind)
        slots = size = 0
        if list0 is not None:
            ids0 = cast("Int64Array", list0) if trusted else _ids(list0)
            slots, size = 1, len(ids0)
        if list1 is not None:
            ids1 = cast("Int64Array", list1) if trusted else _ids(list1)
            slots, size = slots | 2, size + len(ids1)
        if list2 is not None:
            ids2 = cast("Int64Array", list2) if trusted else _ids(list2)
            slots, size = slots | 4, size + len(ids2)
        result_kind, result_value = _NOT_RECORDED, NONE
        if result is None:
            result_kind = _NULL
        elif result is not UNSET:
            if isinstance(result, (int, np.integer)):
                result_kind, result_value = _INTEGER, int(result)
            else:
                result_kind = _IDS
                answer = cast("Int64Array", result) if trusted else _ids(cast("Ids", result))
                slots, size = slots | 8, size + len(answer)
        if queries:
            asked = _ids([number for number, _ in queries])
            slots, size = slots | 16, size + len(asked)
        if (
            slots | result_kind << 5 not in rules.shapes
            or not rules.lowest_pool <= pool < self.pool_count
            or (rules.needs_value and (value == NONE or (rules.choices and value not in rules.choices)))
            or not 0 <= depth <= 255
            or size > MAX_EVENT_IDS
        ):
            raise rules.refusal(self, pool, value, depth, slots, result_kind, size)
        number = rules.number
        try:
            row = pack_row(number, pool, depth, time_us, request, value, value2, result_kind, result_value)
        except struct.error:
            raise rules.impossible(self, "a number that is no integer of 64 bits") from None
        buffer = self._buffer
        if buffer.events and (buffer.events >= self._chunk_events or buffer.ids + size > self._chunk_ids):
            # Only now, so that a state taken right after a chunk's last event goes into the frame beside it.
            self._close_chunk()
            buffer = self._buffer
        if size or slots:
            if slots & 1:
                buffer.add_list(number, pool, 0, ids0)
            if slots & 2:
                buffer.add_list(number, pool, 1, ids1)
            if slots & 4:
                buffer.add_list(number, pool, 2, ids2)
            if slots & 8:
                buffer.add_list(number, pool, RESULT_SLOT, answer)
            if slots & 16:
                buffer.add_list(number, pool, QUERY_SLOT, asked)
                buffer.answers[buffer.events] = [bool(answered) for _, answered in queries]
            buffer.ids += size
        if self._names:
            buffer.names.update(self._names)
            self._names.clear()
        buffer.rows += row
        buffer.events += 1
        seq = self.events
        self.events = seq + 1
        return seq

    def name_request(self, number: int, text: str) -> None:
        """Say what the request `number` of the events to come is called; once, before its first event.

        The name goes into the chunk of the next event. It is cut after MAX_NAME_CHARACTERS characters. Raises
        ValueError for a number below 0 or not of 64 bits.
        """
        self._open_file()
        if not 0 <= number <= _INT64_MAX:
            raise ValueError(f"{number} is no request's number")
        if len(self._names) + len(self._buffer.names) >= MAX_CHUNK_NAMES and self._buffer.events:
            self._close_chunk()
        if len(self._names) >= MAX_CHUNK_NAMES:
            raise ValueError(f"{len(self._names)} requests are named and no event came")
        self._names[number] = _writable(text, MAX_NAME_CHARACTERS)

    def state(self, row: StateRow) -> None:
        """Add a state; it is written after the chunk that holds event `row.after_seq`.

        Raises ValueError for an event that is not there yet, states out of order, or a figure that is neither
        None, an integer nor a digest.
        """
        self._open_file()
        if not -1 <= row.after_seq < self.events:
            raise ValueError(f"a state after event {row.after_seq}, and the trace has {self.events} events")
        if self._states and row.after_seq < self._states[-1].after_seq:
            raise ValueError(f"a state after event {row.after_seq} comes after one after a later event")
        for pool, state in row.pools.items():
            for name, value in state.items():
                _check_figure(pool, name, value)
            self._state_figures += len(state)
        self._states.append(row)
        if len(self._states) >= MAX_CHUNK_EVENTS or self._state_figures >= MAX_STATE_FIGURES // 2:
            self._close_chunk()

    def dropped(self, count: int) -> None:
        """Say that `count` events were not recorded between the last event added and the next one."""
        self._open_file()
        if count < 1:
            raise ValueError(f"{count} dropped events")
        self.dropped_events += count
        drops = self._buffer.drops
        if drops and drops[-1][0] == len(self._buffer):
            drops[-1] = (drops[-1][0], drops[-1][1] + count)
        else:
            drops.append((len(self._buffer), count))

    def flush(self) -> None:
        """Write the open chunk now, so that a kill loses nothing before this call."""
        self._open_file()
        self._close_chunk()

    def close(self, reason: str = "") -> None:
        """Write what is buffered, the footer and the index, and give the file its name.

        `reason` is why the recording ended; "" is a normal end. Raises EmptyTrace when no event was added (the
        `.partial` is removed).
        """
        if self._file is None:
            return
        if self.events == 0:
            self.abort()
            self._partial.unlink(missing_ok=True)
            raise EmptyTrace(f"{self.path}: a trace needs at least one event; nothing was written")
        tail_drops = [] if len(self._buffer) else self._buffer.drops
        if self._buffer.events:
            self._buffer.names.update(self._names)
        self._close_chunk()
        footer = footer_map(
            self._identity,
            events=self.events,
            states=self._state_rows,
            dropped=self.dropped_events,
            dropped_at_end=sum(count for _, count in tail_drops),
            reason=reason,
        )
        self._write_frame(footer)
        self._write(index_frame(self._chunk_frames, self._offsets, self._first_seq))
        file, self._file = self._file, None
        try:
            os.fsync(file)
            os.close(file)
            os.replace(self._partial, self.path)
        except OSError as problem:
            raise TraceWriteFailed(
                f"{self.path} cannot be written: {problem.strerror or problem}"
            ) from problem

    def abort(self) -> None:
        """Stop without a footer; the `.partial` stays, without the open chunk."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _open_file(self) -> int:
        if self._file is None:
            raise TraceWriteFailed(f"{self.path}: the writer is closed")
        return self._file

    def _close_chunk(self) -> None:
        states, self._states, self._state_figures = self._states, [], 0
        buffer = self._buffer
        if buffer.events:
            self._buffer = EventBuffer()
            first_seq = self.events - len(buffer)
            body = encode_chunk(buffer, first_seq, self._page_sizes)
            offset, frame = self._position, self._frames
            self._write_frame({"kind": "chunk", "trace": self._identity, **body})
            self._written_events = first_seq + len(buffer)
            self._offsets.append(offset)
            self._first_seq.append(first_seq)
            self._chunk_frames.append(frame)
        if states:
            self._write_frame({"kind": "state", "trace": self._identity, **encode_states(states)})
            self._state_rows += len(states)

    def _write_frame(self, body: dict[str, Any]) -> None:
        self._write(compress_frame(body, self._compressor))
        self._frames += 1

    def _write(self, data: bytes) -> None:
        """Append `data` whole. On a refusal the file is cut back to the last whole frame, which needs no
        space.
        """
        file = self._open_file()
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError as problem:
            self._file = None
            try:
                os.ftruncate(file, self._position)
            finally:
                os.close(file)
            raise TraceWriteFailed(
                f"{self._partial}: writing failed ({problem.strerror or problem}); "
                f"its first {self._written_events} events stay readable"
            ) from problem
        self._position += len(data)


def footer_map(
    identity: str, *, events: int, states: int, dropped: int, dropped_at_end: int, reason: str
) -> dict[str, Any]:
    """The map of the footer frame of the trace with the uuid `identity`."""
    return {
        "kind": "footer",
        "trace": identity,
        "events": events,
        "states": states,
        "dropped": dropped,
        "dropped_at_end": dropped_at_end,
        "reason": _writable(reason, MAX_REASON_CHARACTERS),
    }


def _writable(text: str, characters: int) -> str:
    """`text` as a file can hold it: at most so many characters, and what UTF-8 has no form for escaped."""
    return text[:characters].encode("utf-8", "backslashreplace").decode()[:characters]


def _ids(ids: Ids) -> Int64Array:
    """A copy as int64[n]. Raises ValueError when it is not a list of integers."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return ids.copy()
    array: npt.NDArray[Any] = np.array(ids, dtype=np.int64 if len(ids) == 0 else None)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"ids must be a list of integers, not an array of {array.dtype} with {array.ndim} dimensions"
        )
    if array.dtype == np.uint64 and len(array) and int(array.max()) > _INT64_MAX:
        raise ValueError("an id is above the largest integer of 64 bits")
    return array.astype(np.int64, copy=False)


def _check_figure(pool: str, name: str, value: int | bytes | None) -> None:
    """Raises ValueError for a state figure that cannot be written."""
    if isinstance(value, bytes) and len(value) == DIGEST_BYTES:
        return
    if isinstance(value, int) and not isinstance(value, bool) and _INT64_MIN <= value <= _INT64_MAX:
        return
    if value is not None:
        raise ValueError(
            f"state figure {name!r} of pool {pool!r} is neither None, an integer of 64 bits nor {DIGEST_BYTES} bytes"
        )
