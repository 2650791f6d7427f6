"""Faults of kvtape's recorder, planted inside a real engine: ``RECORDER_FAULT`` names one. Tests see that the engine does not notice."""

from __future__ import annotations

import errno
import itertools
import os
from typing import Any

HOOK_FAILS_AT = 500
WRITER_FAILS_AT = 400
DISK_HAS_BYTES = 6000


def install(fault: str) -> None:
    """Plant ``dying writer``, ``raising hook`` or ``full disk``; nothing for an empty name."""
    if not fault:
        return
    import recorder.engines.sglang_batches
    import recorder.staging
    import recorder.trace.writer
    from recorder.trace import TraceWriter

    count = itertools.count()

    if fault == "raising hook":
        memory = recorder.staging.MEMORY

        class Memory:
            """Gives copies of this process's memory, until it fails."""

            def __getitem__(self, part: slice) -> bytes:
                if next(count) == HOOK_FAILS_AT:
                    raise RuntimeError("a fault planted in the hook")
                copied: bytes = memory[part]
                return copied

        recorder.staging.MEMORY = recorder.engines.sglang_batches.MEMORY = Memory()  # type: ignore[misc]
    elif fault == "dying writer":
        append = TraceWriter.append

        def failing(writer: TraceWriter, *args: Any, **kwargs: Any) -> int:
            if next(count) == WRITER_FAILS_AT:
                raise RuntimeError("a fault planted in the writer thread")
            return append(writer, *args, **kwargs)

        TraceWriter.append = failing  # type: ignore[method-assign]
    elif fault == "full disk":
        recorder.trace.writer.os = _FullDisk()  # type: ignore[attr-defined]
    else:
        raise ValueError(f"RECORDER_FAULT is {fault!r}")


class _FullDisk:
    """The module `os` for a writer whose disk has room for DISK_HAS_BYTES."""

    def __init__(self) -> None:
        self._left = DISK_HAS_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: Any) -> int:
        fits = min(len(data), self._left)
        self._left -= fits
        if fits == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, bytes(data[:fits]))
