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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .columns import Int64Array
from .encode import EventBuffer, encode_chunk
from .errors import EmptyTrace, ImpossibleEvent, OutputExists, OutputRefused, TooManyIds, TraceWriteFailed
from .frames import compress_frame, new_compressor
from .header import Header, header_to_map, validate_header
from .index import index_frame
from .limits import CLOSE_CHUNK_IDS, DEFAULT_CHUNK_EVENTS, MAX_CHUNK_EVENTS, MAX_EVENT_IDS, MAX_STATE_FIGURES
from .schema import ARGUMENT_SLOTS, NONE, QUERY_SLOT, RESULT_SLOT, SCHEMA, EventKind, KindSchema, ResultKind
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


class _Rules:
    """The schema of one event kind as bit masks: checking an event is on the path of every recorded call."""

    def __init__(self, kind: EventKind, schema: KindSchema) -> None:
        self.kind = kind
        self.schema = schema
        self.number = int(kind)
        self.needs_pool = schema.needs_pool
        self.required = sum(1 << slot for slot in schema.required)
        self.forbidden = sum(1 << slot for slot in ARGUMENT_SLOTS if not schema.list_meaning(slot))
        self.results = sum(1 << result for result in schema.results)
        self.choices = schema.choices
        self.needs_value = schema.needs_value

    def check(
        self, writer: TraceWriter, pool: int, value: int, depth: int, slots: int, result: int, size: int
    ) -> None:
        """Raise ImpossibleEvent or TooManyIds when the event may not be written. `slots`: mask of lists
        given.
        """
        problem = ""
        if not -1 <= pool < writer.pool_count or (pool < 0 and self.needs_pool):
            problem = f"pool {pool}"
        elif slots & self.forbidden:
            problem = "a list that its kind does not have"
        elif self.required & ~slots:
            problem = "not all the lists its kind must have"
        elif not self.results >> result & 1:
            problem = "a result that its kind does not have"
        elif self.choices and value not in self.choices:
            problem = f"value {value} ({self.schema.value})"
        elif self.needs_value and value == NONE:
            problem = f"no value ({self.schema.value})"
        elif not 0 <= depth <= 255:
            problem = f"depth {depth}"
        if problem:
            raise self.refusal(writer, problem)
        if size > MAX_EVENT_IDS:
            limit = f"the format's limit is {MAX_EVENT_IDS}"
            raise TooManyIds(f"event {writer.events} ({self.kind.name}) has {size} ids; {limit}")

    def refusal(self, writer: TraceWriter, problem: str) -> ImpossibleEvent:
        """The error for an event of this kind."""
        return ImpossibleEvent(f"event {writer.events} ({self.kind.name}) has {problem}")


_RULES: Final = {int(kind): _Rules(kind, schema) for kind, schema in SCHEMA.items()}


def partial_path(path: Path) -> Path:
    """Where a trace lies while it is being written."""
    return path.with_name(path.name + ".partial")


class TraceWriter:
    """Writes events to `path`; a context manager that closes cleanly, or leaves NAME.partial after an
    exception.

    `chunk_events` is the number of events per chunk, `level` zstd's. Raises OutputExists when `path` or its
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
        level: int = DEFAULT_LEVEL,
        force: bool = False,
    ) -> None:
        if not 1 <= chunk_events <= MAX_CHUNK_EVENTS:
            raise ValueError(f"a chunk holds 1 to {MAX_CHUNK_EVENTS} events, not {chunk_events}")
        validate_header(header)
        self.path = Path(path)
        self.header = header
        self.events = 0
        self.dropped_events = 0
        self._partial = partial_path(self.path)
        self._chunk_events = chunk_events
        self._compressor = new_compressor(level)
        self._page_sizes = [pool.page_size for pool in header.pools]
        self.pool_count = len(header.pools)
        self._identity = header.uuid
        self._buffer = EventBuffer()
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
            flags = (
                os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL) | getattr(os, "O_CLOEXEC", 0)
            )
            self._file: int | None = os.open(self._partial, flags, 0o644)
        except OSError as problem:
            raise OutputRefused(
                f"{self._partial} cannot be written: {problem.strerror or problem}"
            ) from problem
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
    ) -> int:
        """Add one event and return its number. Lists are copied; `result`: UNSET, None, ids or an integer."""
        if self._file is None:
            self._open_file()
        rules = _RULES.get(kind)
        if rules is None:
            raise ValueError(f"{kind} is no event kind")
        lists: list[tuple[int, Int64Array]] = []
        if list0 is not None:
            lists.append((0, _ids(list0)))
        if list1 is not None:
            lists.append((1, _ids(list1)))
        if list2 is not None:
            lists.append((2, _ids(list2)))
        result_kind, result_value = _NOT_RECORDED, NONE
        if result is not UNSET:
            if result is None:
                result_kind = _NULL
            elif isinstance(result, (int, np.integer)):
                result_kind, result_value = _INTEGER, int(result)
            elif not isinstance(result, _Unset):
                result_kind = _IDS
                lists.append((RESULT_SLOT, _ids(result)))
        if queries:
            lists.append((QUERY_SLOT, _ids([number for number, _ in queries])))
        slots = size = 0
        for slot, ids in lists:
            slots |= 1 << slot
            size += len(ids)
        rules.check(self, pool, value, depth, slots, result_kind, size)
        for number in (time_us, value, value2, request, result_value):
            if not _INT64_MIN <= number <= _INT64_MAX:
                raise rules.refusal(self, f"{number}, which is not of 64 bits")
        buffer = self._buffer
        full = len(buffer.kind) >= self._chunk_events or buffer.ids + size > CLOSE_CHUNK_IDS
        if full and buffer.kind:
            # Only now, so that a state taken right after a chunk's last event goes into the frame beside it.
            self._close_chunk()
            buffer = self._buffer
        buffer.kind.append(rules.number)
        buffer.pool.append(pool)
        buffer.depth.append(depth)
        buffer.time_us.append(time_us)
        buffer.request.append(request)
        buffer.value.append(value)
        buffer.value2.append(value2)
        buffer.result_kind.append(result_kind)
        buffer.result_value.append(result_value)
        for slot, ids in lists:
            buffer.add_list(slot, ids)
        if queries:
            buffer.answers[len(buffer) - 1] = [bool(answer) for _, answer in queries]
        seq = self.events
        self.events += 1
        return seq

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

    def close(self) -> None:
        """Write what is buffered, the footer and the index, and give the file its name.

        Raises EmptyTrace when no event was added (the `.partial` is removed).
        """
        if self._file is None:
            return
        if self.events == 0:
            self.abort()
            self._partial.unlink(missing_ok=True)
            raise EmptyTrace(f"{self.path}: a trace needs at least one event; nothing was written")
        tail_drops = [] if len(self._buffer) else self._buffer.drops
        self._close_chunk()
        footer: dict[str, Any] = {
            "kind": "footer",
            "trace": self._identity,
            "events": self.events,
            "states": self._state_rows,
            "dropped": self.dropped_events,
            "dropped_at_end": sum(count for _, count in tail_drops),
        }
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
        if len(buffer):
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
