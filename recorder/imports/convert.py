"""One call log to one trace file: finds out whose log it is, builds the header, streams the calls over."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..trace import Header, OutputExists, TraceWriter
from ..trace.errors import DamagedTrace
from ..trace.header import header_from_map, header_to_map
from ..trace.writer import partial_path
from .errors import BadOverride, LogError
from .fields import Line
from .lines import LogEnding, log_ending, objects
from .sglang_jsonl import convert_sglang, sglang_header
from .vllm_jsonl import convert_vllm, vllm_header

ENGINES: Final = ("sglang", "vllm")
CONVERT_LEVEL: Final = 19
CONVERT_CHUNK_EVENTS: Final = 16384
"""Twice the chunk of a recording: nothing can be lost here, and larger chunks are read faster and are
smaller.
"""
_NAMESPACE: Final = uuid.UUID("7b9d1d53-4f0c-4f0b-9f43-0d6f2f0a6d11")


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote. `log_ended` is "clean" or "cut"; `last_line` the number of its lines."""

    path: Path
    engine: str
    events: int
    states: int
    log_ended: str
    last_line: int
    size: int


def detect_engine(line: Line) -> str:
    """ "sglang" or "vllm", from the log's first line. Raises LogError."""
    if "header" in line.data:
        return "sglang"
    if line.data.get("kind") == "pool_init":
        return "vllm"
    raise line.error('neither a "header" line (SGLang) nor a "pool_init" line (vLLM) comes first')


def convert_log(
    log: Path,
    output: Path,
    *,
    engine: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
    level: int = CONVERT_LEVEL,
) -> Converted:
    """Convert `log` to the trace `output`.

    `overrides` maps dotted header fields (`provenance.hardware`, `pools.full.layout`) to values. Raises
    LogError (line and reason), BadOverride, OutputExists or TraceWriteFailed; after an error nothing is left
    behind.
    """
    for existing in (output, partial_path(output)):
        if existing.exists() and not force:
            raise OutputExists(
                f"{existing} is already there; choose another name or overwrite it with --force"
            )
    ending = log_ending(log)
    lines = _lines(log, ending)
    first = next(lines, None)
    if first is None:
        raise LogError("the log's only line is cut", path=log, line=1)
    found = detect_engine(first)
    if engine is not None and engine != found:
        raise first.error(f"this is a log of {found}, not of {engine}")
    if found == "sglang":
        ended = "clean" if ending.whole and "footer" in ending.last else "cut"
        header = sglang_header(first, log.name, ended)
    else:
        ended = "clean" if ending.whole else "cut"
        header = vllm_header(first, log.name, ended)
    header = _overridden(header, dict(overrides or {}), first)
    header.uuid = str(uuid.uuid5(_NAMESPACE, f"{ending.digest} {sorted((overrides or {}).items())!r}"))
    try:
        writer = TraceWriter(output, header, chunk_events=CONVERT_CHUNK_EVENTS, level=level, force=force)
    except ValueError as problem:
        raise first.error(f"the header cannot be: {problem}") from None
    try:
        if found == "sglang":
            counts = convert_sglang(lines, writer)
        else:
            null_block = first.integer("null_block") if first.has("null_block") else 0
            counts = convert_vllm(lines, writer, null_block)
        if writer.events == 0:
            raise LogError("the log holds no call", path=log)
        writer.close()
    except BaseException:
        writer.abort()
        partial_path(output).unlink(missing_ok=True)
        raise
    return Converted(
        output, found, writer.events, counts.get("states", 0), ended, ending.last_line, output.stat().st_size
    )


def _override_value(value: Any, present: Any) -> Any:
    """Text stays text in a text field; elsewhere it is JSON, or text when it is no JSON."""
    if not isinstance(value, str) or isinstance(present, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _lines(log: Path, ending: LogEnding) -> Iterator[Line]:
    for number, data in objects(log, ending):
        yield Line(log, number, data)


def _overridden(header: Header, overrides: dict[str, Any], first: Line) -> Header:
    """Header with fields replaced; `pools.NAME.FIELD` addresses a pool by name."""
    body = header_to_map(header)
    for path, value in overrides.items():
        target: Any = body
        *parents, last = path.split(".")
        for part in parents:
            if isinstance(target, list):
                target = next((pool for pool in target if pool.get("name") == part), None)
            else:
                target = target.get(part) if isinstance(target, dict) else None
            if target is None:
                raise BadOverride(f"--set {path}: the header has no {part!r}")
        if not isinstance(target, dict) or path in ("format", "kind", "signature", "pools"):
            raise BadOverride(f"--set {path}: this field cannot be set")
        target[last] = _override_value(value, target.get(last))
    try:
        return header_from_map(body)
    except DamagedTrace as problem:
        raise (
            BadOverride(f"--set: {problem.reason}") if overrides else first.error(problem.reason)
        ) from None
