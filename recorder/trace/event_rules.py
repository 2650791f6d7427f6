"""What an event of each kind may be, in a form that is quick to ask: every recorded call is checked against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .errors import ImpossibleEvent, TooManyIds
from .limits import MAX_EVENT_IDS
from .schema import (
    ARGUMENT_SLOTS,
    LEVELS,
    NONE,
    QUERY_SLOT,
    RESULT_SLOT,
    SCHEMA,
    EventKind,
    KindSchema,
    ResultKind,
)

if TYPE_CHECKING:
    from .writer import TraceWriter


class EventRules:
    """The schema of one event kind as one set and a few flags: checking an event is on the path of every
    recorded call.
    """

    __slots__ = ("choices", "kind", "lowest_pool", "needs_value", "number", "schema", "shapes")

    def __init__(self, kind: EventKind, schema: KindSchema, level: str) -> None:
        self.kind = kind
        self.schema = schema
        self.number = int(kind)
        self.lowest_pool = 0 if schema.needs_pool_at(level) else NONE
        self.choices = schema.choices
        self.needs_value = schema.needs_value
        self.shapes = frozenset(
            shape_of(slots | (result == ResultKind.IDS) << RESULT_SLOT | asked << QUERY_SLOT, result)
            for slots in range(1 << len(ARGUMENT_SLOTS))
            if not self._misfit(slots)
            for result in schema.results
            for asked in (0, 1)
        )

    def _misfit(self, slots: int) -> str:
        """What is wrong with a mask of lists; empty when the kind may have these."""
        if any(slots >> slot & 1 and not self.schema.list_meaning(slot) for slot in ARGUMENT_SLOTS):
            return "a list that its kind does not have"
        if any(not slots >> slot & 1 for slot in self.schema.required):
            return "not all the lists its kind must have"
        return ""

    def refusal(
        self, writer: TraceWriter, pool: int, value: int, depth: int, slots: int, result: int, size: int
    ) -> ImpossibleEvent | TooManyIds:
        """Why an event of this kind may not be written."""
        if not self.lowest_pool <= pool < writer.pool_count:
            return self.impossible(writer, f"pool {pool}")
        if misfit := self._misfit(slots):
            return self.impossible(writer, misfit)
        if result not in self.schema.results:
            return self.impossible(writer, "a result that its kind does not have")
        if self.choices and value not in self.choices:
            return self.impossible(writer, f"value {value} ({self.schema.value})")
        if self.needs_value and value == NONE:
            return self.impossible(writer, f"no value ({self.schema.value})")
        if size > MAX_EVENT_IDS:
            limit = f"the format's limit is {MAX_EVENT_IDS}"
            return TooManyIds(f"event {writer.events} ({self.kind.name}) has {size} ids; {limit}")
        return self.impossible(writer, f"depth {depth}")

    def impossible(self, writer: TraceWriter, problem: str) -> ImpossibleEvent:
        """The error for an event of this kind."""
        return ImpossibleEvent(f"event {writer.events} ({self.kind.name}) has {problem}")


def shape_of(slots: int, result: int) -> int:
    """Which lists an event has and what kind of result, as one number."""
    return slots | result << (QUERY_SLOT + 1)


RULES: Final = {
    level: {
        int(kind): EventRules(kind, schema, level)
        for kind, schema in SCHEMA.items()
        if schema.occurs_at(level)
    }
    for level in LEVELS
}


def no_such_kind(writer: TraceWriter, kind: EventKind | int) -> Exception:
    if kind not in SCHEMA:
        return ValueError(f"{kind} is no event kind")
    level = writer.header.level
    return ImpossibleEvent(
        f"event {writer.events} ({EventKind(kind).name}) is none of a trace of level {level}"
    )
