"""The event kinds of a trace and what each one carries: the one table that writer, reader, `kvtape info` and
the documentation use.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final


class EventKind(enum.IntEnum):
    """One call on an allocator, or what surrounds it. Values are part of the file format: never renumbered.

    From 27 on since format 1.2.
    """

    ALLOC = 1
    ALLOC_EXTEND = 2
    ALLOC_DECODE = 3
    ALLOC_WITH_VIRTUAL = 4
    BIND = 5
    UNBIND = 6
    FREE = 7
    FREE_SEGMENT = 8
    FREE_GROUP_BEGIN = 9
    FREE_GROUP_END = 10
    FLUSH = 11
    MAKE_ROOM = 12
    COMPACT_HOLES = 13
    ALLOC_PHYSICAL = 14
    FREE_PHYSICAL = 15
    CANCEL_PHYSICAL = 16
    FORWARD_BEGIN = 17
    FORWARD_DONE = 18
    SET_LATEST_FORWARD_DONE_EVENT = 19
    SET_INFLIGHT_FORWARD = 20
    MOVE_GATE = 21
    LEASE_BEGIN = 22
    LEASE_END = 23
    CLEAR = 24
    RESIZE = 25
    MARK = 26
    FREE_SWA = 27
    FREE_SWA_SEGMENT = 28
    FREE_FULL = 29
    FREE_FULL_SEGMENT = 30
    ALLOC_EXTEND_SWA_TAIL = 31
    ENSURE_CAPACITY = 32
    SET_FULL_TO_SWA_MAPPING = 33
    PREPARE_MAMBA_ALLOCATION = 34
    FLUSH_DEFERRED_FULL_FREES = 35
    SLOT_ALLOC = 36
    SLOT_FREE = 37
    BACKUP_BEGIN = 38
    LOAD_BACK_BEGIN = 39
    HOST_COPY_DONE = 40
    HOST_FREE = 41


class ResultKind(enum.IntEnum):
    """What an event says about the call's return value."""

    NOT_RECORDED = 0
    NULL = 1
    IDS = 2
    INTEGER = 3


class MarkCode(enum.IntEnum):
    """`value` of a MARK event: something that happened beside the allocator calls. `value2` is given in
    brackets.
    """

    STEP = 1
    """A scheduler step ended [number of requests in it]."""
    REQUEST_ARRIVE = 2
    """A request came in [prompt tokens]."""
    REQUEST_FINISH = 3
    """A request's cache was given up, its last call [tokens it held]."""
    PREEMPT = 4
    """A running request was thrown out to make room [tokens computed so far]."""
    ALLOC_FAIL = 5
    """The engine's own accounting refused a request before any allocator call [tokens asked for]."""
    CACHE_RESET = 6
    """The prefix cache was emptied."""
    TRANSFER = 7
    """The engine told the allocator of a host transfer's event [event, or -1]. No recorder writes it yet."""


SUB_POOL: Final = "sub_pool"
COMPOSITE: Final = "composite"
LEVELS: Final = (SUB_POOL, COMPOSITE)
"""`level` of a header: calls are those on single sub-pools, or those on the composite that joins them as well."""

NONE: Final = -1
"""`value`, `value2`, `request` and `pool` of an event that has none."""


@dataclass(frozen=True)
class KindSchema:
    """What an event of one kind carries.

    `value`/`value2`/`list0`.. are the meanings (empty: not used). `required` names the lists that must be
    present, `needs_value` says that `value` must be given, `choices` limits it, `needs_pool` that the event
    names one pool. `results` are the result kinds that can occur. `composite`: in a trace at composite level
    an event without a pool is a call on the composite; `composite_only`: there is no such event at another
    level.
    """

    value: str = ""
    value2: str = ""
    list0: str = ""
    list1: str = ""
    list2: str = ""
    result: str = ""
    required: tuple[int, ...] = ()
    needs_value: bool = False
    choices: tuple[int, ...] = ()
    needs_pool: bool = True
    results: frozenset[ResultKind] = field(default_factory=lambda: frozenset({ResultKind.NOT_RECORDED}))
    composite: bool = False
    composite_only: bool = False

    def needs_pool_at(self, level: str) -> bool:
        """Whether an event of a trace of this level must name a pool."""
        return self.needs_pool and not (self.composite and level == COMPOSITE)

    def occurs_at(self, level: str) -> bool:
        """Whether a trace of this level can have such an event."""
        return level == COMPOSITE or not self.composite_only

    def list_meaning(self, slot: int) -> str:
        """Meaning of argument list `slot` (0 to 2); empty when the kind has no such list."""
        return (self.list0, self.list1, self.list2)[slot]


_IDS = frozenset({ResultKind.NOT_RECORDED, ResultKind.NULL, ResultKind.IDS})
_INTEGER = frozenset({ResultKind.NOT_RECORDED, ResultKind.INTEGER})
_TOKENS = "token ids or null"
_OF_COMPOSITE: Final[dict[str, Any]] = {"needs_pool": False, "composite_only": True}
_HOST_COPY: Final[dict[str, Any]] = {
    "list0": "physical page ids",
    "list1": "host slots",
    "list2": "virtual page ids (optional)",
    "required": (0, 1),
    "needs_value": True,
}

SCHEMA: Final[dict[EventKind, KindSchema]] = {
    EventKind.ALLOC: KindSchema(
        value="need_size (tokens)", result=_TOKENS, needs_value=True, results=_IDS, composite=True
    ),
    EventKind.ALLOC_EXTEND: KindSchema(
        value="extend_num_tokens",
        value2="num_new_pages or -1",
        list0="prefix_lens",
        list1="seq_lens",
        list2="last_loc",
        result=_TOKENS,
        required=(0, 1, 2),
        needs_value=True,
        results=_IDS,
        composite=True,
    ),
    EventKind.ALLOC_DECODE: KindSchema(
        list1="seq_lens", list2="last_loc", result=_TOKENS, required=(1, 2), results=_IDS, composite=True
    ),
    EventKind.ALLOC_WITH_VIRTUAL: KindSchema(list0="virtual page ids", required=(0,)),
    EventKind.BIND: KindSchema(list0="virtual page ids", list1="physical page ids", required=(0, 1)),
    EventKind.UNBIND: KindSchema(list0="virtual page ids", required=(0,)),
    EventKind.FREE: KindSchema(
        list0="token ids",
        list1="virtual page ids the caller derived (optional)",
        required=(0,),
        composite=True,
    ),
    EventKind.FREE_SEGMENT: KindSchema(
        value="start_pos", list0="token ids", required=(0,), needs_value=True, composite=True
    ),
    EventKind.FREE_GROUP_BEGIN: KindSchema(composite=True),
    EventKind.FREE_GROUP_END: KindSchema(composite=True),
    EventKind.FLUSH: KindSchema(
        value="urgent 0/1",
        result="pages moved",
        needs_value=True,
        choices=(0, 1),
        results=_INTEGER,
        composite=True,
    ),
    EventKind.MAKE_ROOM: KindSchema(
        value="side: 0 low, 1 high",
        value2="min_bytes",
        result="bytes open",
        needs_value=True,
        choices=(0, 1),
        results=_INTEGER,
    ),
    EventKind.COMPACT_HOLES: KindSchema(
        value="side: 0 low, 1 high", result="pages moved", needs_value=True, choices=(0, 1), results=_INTEGER
    ),
    EventKind.ALLOC_PHYSICAL: KindSchema(
        value="need_size (tokens)", result="physical token ids or null", needs_value=True, results=_IDS
    ),
    EventKind.FREE_PHYSICAL: KindSchema(list0="physical token ids", required=(0,)),
    EventKind.CANCEL_PHYSICAL: KindSchema(list0="physical token ids", required=(0,)),
    EventKind.FORWARD_BEGIN: KindSchema(
        value="event",
        list0="write set token ids (optional)",
        list1="read set token ids (optional)",
        needs_value=True,
        needs_pool=False,
    ),
    EventKind.FORWARD_DONE: KindSchema(value="event", needs_value=True, needs_pool=False),
    EventKind.SET_LATEST_FORWARD_DONE_EVENT: KindSchema(value="event, or -1 for None", composite=True),
    EventKind.SET_INFLIGHT_FORWARD: KindSchema(
        value="event, or -1 for None", list0="write set token ids (optional)", composite=True
    ),
    EventKind.MOVE_GATE: KindSchema(value="open 0/1", needs_value=True, choices=(0, 1), needs_pool=False),
    EventKind.LEASE_BEGIN: KindSchema(
        value="lease number",
        list0="physical page ids",
        list1="virtual page ids (optional)",
        required=(0,),
        needs_value=True,
    ),
    EventKind.LEASE_END: KindSchema(value="lease number", needs_value=True),
    EventKind.CLEAR: KindSchema(needs_pool=False),
    EventKind.RESIZE: KindSchema(value="max_slots", value2="num_virtual_ids or -1", needs_value=True),
    EventKind.MARK: KindSchema(value="mark code", value2="see MarkCode", needs_value=True, needs_pool=False),
    EventKind.FREE_SWA: KindSchema(list0="token ids", required=(0,), **_OF_COMPOSITE),
    EventKind.FREE_SWA_SEGMENT: KindSchema(
        value="start_pos", list0="token ids", required=(0,), needs_value=True, **_OF_COMPOSITE
    ),
    EventKind.FREE_FULL: KindSchema(list0="token ids", required=(0,), **_OF_COMPOSITE),
    EventKind.FREE_FULL_SEGMENT: KindSchema(
        value="start_pos", list0="token ids", required=(0,), needs_value=True, **_OF_COMPOSITE
    ),
    EventKind.ALLOC_EXTEND_SWA_TAIL: KindSchema(
        value="extend_num_tokens",
        value2="swa_tail_len",
        list0="prefix_lens",
        list1="seq_lens",
        list2="last_loc",
        result=_TOKENS,
        required=(0, 1, 2),
        needs_value=True,
        results=_IDS,
        **_OF_COMPOSITE,
    ),
    EventKind.ENSURE_CAPACITY: KindSchema(
        value="full_tokens",
        value2="swa_tokens",
        result="0/1",
        needs_value=True,
        results=_INTEGER,
        **_OF_COMPOSITE,
    ),
    EventKind.SET_FULL_TO_SWA_MAPPING: KindSchema(
        list0="token ids", list1="physical token ids of swa", required=(0, 1), **_OF_COMPOSITE
    ),
    EventKind.PREPARE_MAMBA_ALLOCATION: KindSchema(value="target_size", needs_value=True, **_OF_COMPOSITE),
    EventKind.FLUSH_DEFERRED_FULL_FREES: KindSchema(**_OF_COMPOSITE),
    EventKind.SLOT_ALLOC: KindSchema(
        value="need_size (slots)",
        result="slot ids or null",
        needs_value=True,
        results=_IDS,
        composite_only=True,
    ),
    EventKind.SLOT_FREE: KindSchema(list0="slot ids", required=(0,), composite_only=True),
    EventKind.BACKUP_BEGIN: KindSchema(value="copy number", **_HOST_COPY),
    EventKind.LOAD_BACK_BEGIN: KindSchema(value="copy number", **_HOST_COPY),
    EventKind.HOST_COPY_DONE: KindSchema(value="copy number", needs_value=True, needs_pool=False),
    EventKind.HOST_FREE: KindSchema(list0="host slots", required=(0,)),
}

ARGUMENT_SLOTS: Final = (0, 1, 2)
RESULT_SLOT: Final = 3
QUERY_SLOT: Final = 4
SLOT_NAMES: Final = ("list0", "list1", "list2", "result", "queries")
