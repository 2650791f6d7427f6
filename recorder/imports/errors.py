"""What can be wrong with a call log."""

from __future__ import annotations

from pathlib import Path


class LogError(Exception):
    """A line of a call log cannot be converted. `line` counts from 1."""

    exit_code: int = 65

    def __init__(self, reason: str, *, path: Path | str | None = None, line: int | None = None) -> None:
        self.reason = reason
        self.path = path
        self.line = line
        where = ", ".join(
            [*([] if path is None else [str(path)]), *([] if line is None else [f"line {line}"])]
        )
        super().__init__(f"{where}: {reason}" if where else reason)


class LogNotFound(LogError):
    """There is no log at the given path."""

    exit_code = 66


class BadOverride(LogError):
    """A `--set` of a header field that cannot be."""

    exit_code = 2
