"""The trace file format: schema, streaming writer, reader with index and recovery (docs/trace-format.md)."""

from __future__ import annotations

from .chunk import Chunk, Ragged
from .errors import (
    DamagedTrace,
    EmptyTrace,
    ImpossibleEvent,
    NewerTrace,
    NoSuchEvent,
    NotATrace,
    OutputExists,
    OutputRefused,
    TooManyIds,
    TraceError,
    TraceNotFound,
    TraceWriteFailed,
    UnknownForm,
)
from .finish import finish_partial
from .header import Header, PoolHeader, Provenance
from .limits import FORMAT_MAJOR, FORMAT_MINOR
from .reader import Footer, Recovery, TraceReader
from .schema import COMPOSITE, NONE, SCHEMA, SUB_POOL, EventKind, KindSchema, MarkCode, ResultKind
from .states import StateBatch, StateRow
from .writer import UNSET, TraceWriter

__all__ = [
    "COMPOSITE",
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "NONE",
    "SCHEMA",
    "SUB_POOL",
    "UNSET",
    "Chunk",
    "DamagedTrace",
    "EmptyTrace",
    "EventKind",
    "Footer",
    "Header",
    "ImpossibleEvent",
    "KindSchema",
    "MarkCode",
    "NewerTrace",
    "NoSuchEvent",
    "NotATrace",
    "OutputExists",
    "OutputRefused",
    "PoolHeader",
    "Provenance",
    "Ragged",
    "Recovery",
    "ResultKind",
    "StateBatch",
    "StateRow",
    "TooManyIds",
    "TraceError",
    "TraceNotFound",
    "TraceReader",
    "TraceWriteFailed",
    "TraceWriter",
    "UnknownForm",
    "finish_partial",
]
