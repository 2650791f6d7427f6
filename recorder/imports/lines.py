"""Reads a log of JSON lines, plain or in zstd, with line numbers and bounded memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import zstandard

from ..trace.frames import ZSTD_MAGIC
from .errors import LogError, LogNotFound

MAX_LINE_BYTES: Final = 64 << 20
_PIECE: Final = 1 << 20
_WINDOW: Final = 128 << 20


@dataclass(frozen=True)
class LogEnding:
    """How a log ends. `last_line` counts from 1; `whole` says that the last line is a JSON object."""

    last_line: int
    whole: bool
    last: dict[str, Any]
    digest: str


def _pieces(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The log's bytes. A zstd stream that ends early gives what there is of it."""
    head = file.read(4)
    file.seek(0)
    if head != ZSTD_MAGIC:
        while piece := file.read(_PIECE):
            yield piece
        return
    try:
        stream = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
            file, read_across_frames=True
        )
        while piece := stream.read(_PIECE):
            yield piece
    except zstandard.ZstdError as problem:
        raise LogError(f"the compressed log is damaged ({problem})", path=path) from None


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise LogNotFound("no such file", path=path) from None
    except OSError as problem:
        raise LogNotFound(f"cannot be opened: {problem.strerror or problem}", path=path) from None


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) for every line that is not blank."""
    with _open(path) as file:
        number, rest = 0, b""
        for piece in _pieces(path, file):
            parts = (rest + piece).split(b"\n")
            rest = parts.pop()
            for part in parts:
                number += 1
                if part.strip():
                    yield number, part
            if len(rest) > MAX_LINE_BYTES:
                raise LogError(f"the line is longer than {MAX_LINE_BYTES} bytes", path=path, line=number + 1)
        if rest.strip():
            yield number + 1, rest


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises LogError."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise LogError(f"not a line of JSON ({problem})", path=path, line=number) from None
    if not isinstance(data, dict):
        raise LogError(f"a JSON {type(data).__name__} where an object must be", path=path, line=number)
    return data


def log_ending(path: Path) -> LogEnding:
    """How the log ends, from one pass over its lines without parsing them."""
    digest = hashlib.sha256()
    number, line = 0, b""
    for number, line in raw_lines(path):  # noqa: B007 (the last pair is used below)
        digest.update(line)
        digest.update(b"\n")
    if number == 0:
        raise LogError("the log is empty", path=path)
    try:
        last = parse_line(path, number, line)
    except LogError:
        return LogEnding(number, False, {}, digest.hexdigest())
    return LogEnding(number, True, last, digest.hexdigest())


def objects(path: Path, ending: LogEnding) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line; a last line that was cut in the middle is left out."""
    for number, line in raw_lines(path):
        if number == ending.last_line and not ending.whole:
            return
        yield number, parse_line(path, number, line)
