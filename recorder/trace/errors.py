"""What can go wrong with a trace file, one class per cause.

Each class carries the exit code a command ends with. Messages say what is wrong, where (file, frame, byte
offset, event) and what to do about it.
"""

from __future__ import annotations

from pathlib import Path


class TraceError(Exception):
    """Base of every expected failure around a trace file."""

    exit_code: int = 65


class TraceNotFound(TraceError):
    """There is no file at the given path (or it cannot be opened)."""

    exit_code = 66


class OutputExists(TraceError):
    """The output file is already there and overwriting was not asked for."""

    exit_code = 2


class NoSuchEvent(TraceError):
    """An event number outside the trace was asked for."""

    exit_code = 2


class NotATrace(TraceError):
    """The file is something else: text, gzip, another zstd or msgpack file."""


class EmptyTrace(TraceError):
    """The file has no bytes, or a header and no event."""


class NewerTrace(TraceError):
    """The file needs a reader of a newer format version than this one."""


class ImpossibleEvent(TraceError):
    """An event breaks the schema: unknown pool, a list that must be there and is not, an answer that cannot
    be.
    """


class TooManyIds(TraceError):
    """One call carries more ids than the format allows in a chunk (writer side)."""


class TraceWriteFailed(TraceError):
    """The operating system refused a write (full disk, file gone). The `.partial` file keeps a readable
    prefix.
    """

    exit_code = 70


class OutputRefused(TraceWriteFailed):
    """The output file cannot be created: no such folder, or no permission."""

    exit_code = 2


class DamagedTrace(TraceError):
    """Bytes inside the file are wrong. `frame` counts from 0, `offset` is where that frame starts in the
    file.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: Path | str | None = None,
        frame: int | None = None,
        offset: int | None = None,
        after_seq: int | None = None,
    ) -> None:
        self.reason = reason
        self.path = path
        self.frame = frame
        self.offset = offset
        self.after_seq = after_seq
        super().__init__(self._text())

    def _text(self) -> str:
        where = [] if self.path is None else [f"{self.path}"]
        if self.frame is not None:
            where.append(f"frame {self.frame}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        if self.after_seq is not None:
            where.append("before any event" if self.after_seq < 0 else f"after event {self.after_seq}")
        text = f"the trace is damaged: {self.reason}"
        if where:
            text = f"{', '.join(where)}: {text}"
        return f"{text}. Fetch the file again; everything before this place can still be read."

    def located(self, path: Path, frame: int, offset: int, after_seq: int) -> DamagedTrace:
        """The same damage with its place in the file filled in (what was known already is kept)."""
        return type(self)(
            self.reason,
            path=self.path if self.path is not None else path,
            frame=self.frame if self.frame is not None else frame,
            offset=self.offset if self.offset is not None else offset,
            after_seq=self.after_seq if self.after_seq is not None else after_seq,
        )


class UnknownForm(DamagedTrace):
    """A column or list is stored in a form this version does not know; of a newer version's file that is no
    damage.
    """
