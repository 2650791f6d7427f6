"""Closes a `.partial` that its writer left behind, as the writer would have closed it.

The steps are in such an order that a kill between any two of them leaves a file this can be called on again:
the torn tail is cut off, footer and index are added, the file is on disk, and then it is given its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from .errors import NewerTrace, OutputExists, OutputRefused, TraceNotFound, TraceWriteFailed
from .frames import compress_frame, new_compressor
from .index import index_frame
from .limits import FORMAT_MAJOR, FORMAT_MINOR
from .locks import lock
from .reader import Survey, TraceReader
from .writer import DEFAULT_LEVEL, footer_map

_SUFFIX: Final = ".partial"


def finish_partial(path: Path | str, reason: str, *, force: bool = False) -> Path:
    """Give `NAME.partial` a footer with `reason` and an index, and the name NAME, which is returned.

    Every sound frame is kept and a torn tail is cut off. A footer that is there already stays as it is. `force`
    overwrites NAME. Raises, and leaves the file as it is:

        OutputRefused   the path does not end in `.partial`, or a process that lives is writing it
        OutputExists    NAME is there
        TraceNotFound, EmptyTrace (no event), NotATrace, NewerTrace
        DamagedTrace, ImpossibleEvent   it is damaged inside and not just cut

    or TraceWriteFailed when the system refuses (its sound frames are still there).
    """
    partial = Path(path)
    if not partial.name.endswith(_SUFFIX) or partial.name == _SUFFIX:
        raise OutputRefused(
            f"{partial}: only a file that its writer left behind, NAME{_SUFFIX}, can be closed"
        )
    final = partial.with_name(partial.name.removesuffix(_SUFFIX))
    if final.exists() and not force:
        raise OutputExists(f"{final} is already there; move it away or overwrite it with --force")
    try:
        file = os.open(partial, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise TraceNotFound(f"{partial}: no such file") from None
    except OSError as problem:
        raise OutputRefused(f"{partial} cannot be written: {problem.strerror or problem}") from None
    try:
        if not lock(file):
            raise OutputRefused(f"{partial}: a process is still writing this trace; end it first")
        identity, found = _survey(partial)
        # The reader has closed the file, and with it this process's lock on it.
        if not lock(file):
            raise OutputRefused(f"{partial}: a process is still writing this trace; end it first")
        try:
            _complete(file, identity, found, reason)
            os.replace(partial, final)
        except OSError as problem:
            raise TraceWriteFailed(
                f"{partial}: closing failed ({problem.strerror or problem}); its {found.events} events stay "
                "readable"
            ) from problem
    finally:
        os.close(file)
    return final


def _survey(partial: Path) -> tuple[str, Survey]:
    """(uuid, what is there)."""
    with TraceReader(partial) as reader:
        major, minor = reader.header.format
        if minor > FORMAT_MINOR:
            raise NewerTrace(
                f"{partial}: the trace is of format {major}.{minor}; what its footer must say is known to a kvtape "
                f"of that format, this one knows {FORMAT_MAJOR}.{FORMAT_MINOR}"
            )
        return reader.header.uuid, reader.survey()


def _complete(file: int, identity: str, found: Survey, reason: str) -> None:
    """Cut the torn tail off and add what is missing; on a refusal what was added is taken back."""
    if found.ended == "clean":
        os.fsync(file)
        return
    os.ftruncate(file, found.end)
    tail = b""
    if found.footer is None:
        footer = footer_map(
            identity,
            events=found.events,
            states=found.states,
            dropped=found.dropped,
            dropped_at_end=0,
            reason=reason,
        )
        tail = compress_frame(footer, new_compressor(DEFAULT_LEVEL))
    tail += index_frame(found.frames, found.offsets, found.first_seq)
    os.lseek(file, found.end, os.SEEK_SET)
    view = memoryview(tail)
    try:
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    except OSError:
        os.ftruncate(file, found.end)
        raise
