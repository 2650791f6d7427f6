"""What is kept about SGLang's sub-pools while they are recorded, and how the writer thread turns their calls into events."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.sglang_header import Engine, header_of
from recorder.ranks import rank_name
from recorder.session import NOT_EVENTS, Item, Session, Sink
from recorder.staging import Captured
from recorder.state_digest import mix64_on_device
from recorder.trace import NONE, UNSET, StateRow

if TYPE_CHECKING:
    from recorder.process import Recorder

Arguments = tuple[int, int, Captured, Captured, Captured]
"""value, value2, list0, list1, list2 of an event."""
NO_ARGUMENTS: Final[Arguments] = (NONE, NONE, None, None, None)
MARK: Final = "_kvtape_pool"
"""Attribute of an allocator that is recorded: its SubPool."""
DISAGG_GATE: Final = "disagg_move_gate"
TRANSFER_GATE: Final = "host_transfer_move_gate"
ALLOCATES: Final = 2
COUNTS: Final = 1
NO_RESULT: Final = 0
LARGE_TABLES: Final = 200_000
"""Rows of all tables of a buffer above which states are taken less often."""


class SubPool:
    """What an allocator carries while it is recorded."""

    __slots__ = ("last_event", "number", "queue", "session", "tape")

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape, self.number = tape, number
        self.session: Session | None = None
        self.queue: deque[Item] = deque()
        #: Number of the forward that this pool was told of last.
        self.last_event = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of an allocator is not recorded."""
        return type(None), ()

    def begin(self) -> Session:
        """The session, opened at the first call on any sub-pool of the buffer."""
        self.session = self.tape.session or self.tape.begin()
        self.queue = self.session.queue
        return self.session


class Tape:
    """The sub-pools of one buffer and the file their calls go to, opened at the first call, when all of them are known."""

    def __init__(self, recorder: Recorder, buffer: Any, engine: Engine) -> None:
        self.recorder = recorder
        self.engine = engine
        # Weakly: the engine may give up a buffer of many gigabytes while it is recorded.
        self.buffer = weakref.ref(buffer)
        self.allocators: list[Any] = []
        self.session: Session | None = None
        self.state_every = 0
        self.calls_to_state = 0
        self.gates: dict[str, bool] = {}

    def add(self, allocator: Any) -> None:
        """Register a sub-pool as it is made."""
        if self.session is not None:
            raise RuntimeError(f"sub-pool {allocator.sub_pool_name!r} was made after recording had begun")
        allocator._kvtape_pool = SubPool(self, len(self.allocators))
        self.allocators.append(weakref.ref(allocator))

    def begin(self) -> Session:
        """The session, with the header that says what the sub-pools are."""
        allocators = [allocator for reference in self.allocators if (allocator := reference()) is not None]
        served = self.recorder.settings.provenance != "driven"
        header = header_of(allocators, self.engine, served=served)
        # A digest costs time with the size of the tables: 1 ms for 200,000 pages, on the engine's thread where that is a CPU.
        rows = sum(pool.num_virtual_ids for pool in header.pools)
        self.state_every = self.recorder.settings.state_every * max(1, rows // LARGE_TABLES)
        self.calls_to_state = self.state_every
        self.session = self.recorder.open(self.engine.name, rank_name(header.rank), header)
        return self.session

    def put_state(self, session: Session) -> None:
        """Queue the state of every sub-pool: counts the allocators keep, digests of the tables computed on their device."""
        allocators = [allocator for reference in self.allocators if (allocator := reference()) is not None]
        if not all(getattr(allocator, "_is_settled", True) for allocator in allocators):
            # Numbers of a flush are on their way from the device, and asking for a size would wait for them. After the next call, then.
            self.calls_to_state = 1
            return
        self.calls_to_state = self.state_every
        capture = self.recorder.staging.capture
        pools: list[tuple[str, dict[str, int], Captured, Captured]] = []
        for allocator in allocators:
            free = allocator.free_virtual_ids
            pools.append(
                (
                    allocator.sub_pool_name,
                    _figures(allocator),
                    capture(mix64_on_device(allocator.virtual_to_physical[: allocator.num_virtual_ids])),
                    None if free is None else capture(mix64_on_device(free)),
                )
            )
        # The digests stand in the item itself too: the writer waits until those that come from a device have arrived.
        digests = tuple(digest for pool in pools for digest in pool[2:])
        session.queue.append((_write_state, session.clock_ns(), pools, *digests))


def _figures(allocator: Any) -> dict[str, int]:
    """Counts the allocator keeps on the host; asking for them changes nothing in it."""
    figures = {
        "allocated_count": int(allocator.allocated_count()),
        "available_size": int(allocator._available_tokens()),
        "holes": len(allocator._free_phys_pages),
        "pending": len(allocator._pending_reuse_pages_cpu),
    }
    if hasattr(allocator, "low_wm_page"):
        figures["low_watermark"], figures["high_watermark"] = allocator.low_wm_page, allocator.high_wm_page
    else:
        figures["watermark"] = int(allocator.watermark_physical)
    return figures


# -- the writer thread's side


def write_call(sink: Sink, item: Item) -> None:
    _, time_ns, kind, pool, depth, request, arguments, form, result, asked, *_ = item
    value, value2, list0, list1, list2 = arguments
    ids = sink.ids
    if form == ALLOCATES:
        result = ids(result)
    elif form == NO_RESULT:
        result = UNSET
    else:
        was_made = getattr(result, "was_made", None)
        if was_made is not None and not was_made():
            return  # an urgent flush that was left to the device, which found it needless: nobody made it
        # An allocator may answer with a number that is still on its way from the device: it is waited for here, not on the engine's thread.
        result = int(result)
    sink.writer.append(
        kind,
        pool=pool,
        time_us=time_ns // 1000,
        value=int(value),
        value2=int(value2),
        list0=ids(list0),
        list1=ids(list1),
        list2=ids(list2),
        result=result,
        depth=depth,
        request=sink.request(request),
        queries=asked or (),
        trusted=True,
    )


def _write_state(sink: Sink, item: Item) -> None:
    rows: dict[str, dict[str, int | bytes | None]] = {}
    for name, figures, table, free in item[2]:
        rows[name] = dict(figures)
        for figure, digest in (("virtual_to_physical_mix64", table), ("free_virtual_ids_mix64", free)):
            values = sink.ids(digest)
            if values is not None:
                rows[name][figure] = int(values[0])
    if sink.writer.events:
        sink.writer.state(StateRow(sink.writer.events - 1, rows))


NOT_EVENTS.add(_write_state)
