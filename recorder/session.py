"""One file being recorded: a bounded queue from the engine's threads to a writer thread, and what happens when either fails.

The engine's side is `put`: append a tuple to a deque, never wait (unless told to), never raise. The writer's side turns tuples into events
of a `TraceWriter`. Order in the file is the order of `put`, so an event's place says when the allocator acted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from .private_text import without_paths
from .settings import Settings
from .staging import Staging, arrived, lost
from .trace import EmptyTrace, Header, TraceWriter
from .trace.limits import CLOSE_CHUNK_IDS

log = logging.getLogger("kvtape")

Item = tuple[Any, ...]
"""(write, time, ...): `write(sink, item)` is called by the writer thread."""

ITEM_BYTES: Final = 2560
"""Memory a queued event is taken to need: the tuple, its integers, and four copies of up to 64 ids, which are the bulk; larger
copies are counted one by one (`Staging.held_bytes`)."""
QUEUE_SHARE: Final = 4
"""The queue may hold a quarter of the recorder's memory, a pinned ring another; the open chunk and its encoding need the rest."""
CHUNK_SHARE: Final = 32 * 8
"""Ids in the open chunk: encoding takes up to ten times their bytes for a moment."""
MAX_REQUESTS: Final = 1 << 16
"""Request names remembered; one that comes back later gets a new number and the same name."""
NOT_EVENTS: Final[set[Callable[[Any, Any], None]]] = set()
"""Functions of items that are no events; modules that have such add theirs."""
BREATH_EVENTS: Final = 256
"""Events after which the writer thread lets go of the interpreter. Often enough that the engine waits 2 or 3 ms at most, seldom enough
that a busy engine, which then keeps it for a switch interval of 5 ms, does not starve the writer: 30,000 events a second."""
CLOSE_SECONDS: Final = 10.0

_clock: Callable[[], int] = time.monotonic_ns


def set_clock(clock: Callable[[], int] | None) -> None:
    """Time of events from `clock` (microseconds, never falling) instead of the monotonic clock: for drivers with simulated time.
    Concerns sessions that begin later."""
    global _clock
    _clock = time.monotonic_ns if clock is None else lambda: clock() * 1000


class Sink:
    """What the writer thread writes to: the trace, and the names of requests."""

    def __init__(self, writer: TraceWriter, settings: Settings, staging: Staging) -> None:
        self.writer = writer
        self.ids = staging.release
        self._settings = settings
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._named = 0

    def request(self, name: str | None) -> int:
        """The number of a request in this file, -1 for none. Its name is written as a hash unless request ids are kept."""
        if name is None:
            return -1
        # By its hash in any case: clients choose ids, and may choose long ones.
        hashed = self._hashed(name)
        number = self._numbers.get(hashed)
        if number is not None:
            self._numbers.move_to_end(hashed)
            return number
        number, self._named = self._named, self._named + 1
        self._numbers[hashed] = number
        if len(self._numbers) > MAX_REQUESTS:
            self._numbers.popitem(last=False)
        self.writer.name_request(number, name if self._settings.keep_request_ids else hashed)
        return number

    def _hashed(self, name: str) -> str:
        return hashlib.blake2b(self._settings.salt + name.encode(errors="replace"), digest_size=8).hexdigest()


def take_place(sink: Sink, item: Item) -> None:
    """Fills the queue beside an event that is as large as several."""


def write_loss(sink: Sink, item: Item) -> None:
    """Instead of an event some of whose ids were lost: what the others hold is given back, and it is counted as dropped. A state is no
    event: without it there is one comparison less."""
    _release(sink, item)
    if item[0] not in NOT_EVENTS:
        sink.writer.dropped(1)


def _release(sink: Sink, item: Item) -> None:
    for field in item:
        if type(field) is tuple:
            _release(sink, field)
        elif hasattr(field, "take") or hasattr(field, "nbytes"):
            sink.ids(field)


def write_drops(sink: Sink, item: Item) -> None:
    """`item`: (write_drops, time, count)."""
    sink.writer.dropped(item[2])


class Session:
    """Records to one file, from the first `put` to `close`.

    Args:
        path: the file; written as `NAME.partial` until it is closed.
        header: of the trace; the pools are known when the first event comes.
        staging: what the hooks capture ids with; the writer gives them back to it.
        on_failure: called once, from whichever thread it happens on, with a sentence, when recording had to end.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        settings: Settings,
        staging: Staging,
        on_failure: Callable[[str], None],
    ) -> None:
        self.path = path
        self.settings = settings
        self.active = True
        self.dropped = 0
        #: Nanoseconds; for hooks on a hot path, whose writers divide.
        self.clock_ns: Callable[[], int] = _clock
        self.reason = ""
        #: Events on their way to the writer. Hooks append to it themselves, after `has_room`: a call less on the engine's thread.
        self.queue: deque[Item] = deque()
        self.most_items = settings.memory // QUEUE_SHARE // ITEM_BYTES
        self.drops_waiting = 0
        self._header = header
        self._staging = staging
        self._on_failure = on_failure
        self._block = settings.on_overflow == "block"
        self._drop_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="kvtape-writer", daemon=True)
        self._thread.start()

    # -- the engine's threads

    def has_room(self) -> bool:
        """Whether an event may be captured now. If not it has been counted as dropped (or, with `block`, room was waited for).

        A hook on a hot path asks `len(queue) < most_items and not drops_waiting` itself and comes here only if that is false.
        """
        if self._block:
            while len(self.queue) >= self.most_items:
                if not self.is_writing:
                    return False
                time.sleep(0.0005)
        elif len(self.queue) >= self.most_items:
            self.drop()
            return False
        if self.drops_waiting:
            self.put_drops()
        return True

    def clock(self) -> int:
        """The time of an event in microseconds."""
        return self.clock_ns() // 1000

    def put(self, item: Item, ids_bytes: int = 0) -> None:
        """Queue an event; `has_room` said yes. `ids_bytes`: memory of ids in it that no `Staging` counts."""
        self.queue.append(item)
        # The queue's bound is a number of events: one that is as large as many takes as many places.
        for _ in range(ids_bytes // ITEM_BYTES):
            self.queue.append((take_place, 0))

    def drop(self) -> None:
        """Count an event that is not recorded; the file says where it is missing."""
        with self._drop_lock:
            self.dropped += 1
            self.drops_waiting += 1

    @property
    def is_writing(self) -> bool:
        """Whether the writer thread is there and recording goes on."""
        return self.active and self._thread.is_alive()

    def put_drops(self) -> None:
        """Say at this place of the queue how many events are missing."""
        with self._drop_lock:
            self.queue.append((write_drops, 0, self.drops_waiting))
            self.drops_waiting = 0

    # -- the end

    def close(self, reason: str = "", seconds: float = CLOSE_SECONDS) -> None:
        """End the recording: what is queued is written, the file gets its footer and its name. Waits `seconds` at most."""
        self.reason = self.reason or reason
        self.active = False
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _fail(self, reason: str) -> None:
        """`reason` may name files: it goes to the log as it is, to the file without them."""
        self.active = False
        self.reason = self.reason or without_paths(reason)
        self._stop.set()
        self._on_failure(f"{reason} ({self.path})")

    # -- the writer's thread

    def _write_all(self) -> None:
        writer: TraceWriter | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            writer = TraceWriter(
                self.path,
                self._header,
                chunk_events=self.settings.chunk_events,
                chunk_ids=min(CLOSE_CHUNK_IDS, max(4096, self.settings.memory // CHUNK_SHARE)),
            )
            self._loop(Sink(writer, self.settings, self._staging), writer)
            if self.drops_waiting:
                writer.dropped(self.drops_waiting)
            writer.close(reason=self.reason)
        except EmptyTrace:
            pass  # no event was recorded, and no file is left
        except BaseException as problem:
            self._fail(f"writing failed: {str(problem) or type(problem).__name__}")
            self._give_up(writer)

    def _give_up(self, writer: TraceWriter | None) -> None:
        """After a failure: say in the file why it ends, if the file can still be written."""
        self.queue.clear()
        if writer is None:
            return
        try:
            writer.close(reason=self.reason)
        except Exception as problem:
            log.debug("the file could not be closed either: %s", problem)

    def _loop(self, sink: Sink, writer: TraceWriter) -> None:
        chunk_seconds = self.settings.chunk_ms / 1000
        pause = min(0.05, chunk_seconds / 4)
        flushed = time.monotonic()
        while True:
            stopping = self._stop.is_set()
            done = self._drain(sink)
            now = time.monotonic()
            if now - flushed >= chunk_seconds:
                writer.flush()
                flushed = now
            if stopping:
                self._finish(sink)
                return
            if not done:
                self._stop.wait(pause)

    def _drain(self, sink: Sink) -> int:
        """Write what is queued and has arrived; the number of events."""
        queue = self.queue
        done = 0
        while queue:
            item = queue[0]
            if not arrived(item):
                break
            queue.popleft()
            if lost(item):
                write_loss(sink, item)
                self.dropped += item[0] not in NOT_EVENTS
            else:
                item[0](sink, item)
            done += 1
            if done % BREATH_EVENTS == 0:
                # Lets the engine's thread have the interpreter now instead of after a switch interval of 5 ms.
                time.sleep(0.0001)
                if done >= 4096:
                    break
        return done

    def _finish(self, sink: Sink) -> None:
        """Write the rest; device copies still under way are given some seconds."""
        while self.queue:
            if not self._drain(sink) and not _wait_until(lambda: arrived(self.queue[0]), CLOSE_SECONDS / 2):
                left = len(self.queue)
                self.reason = self.reason or f"{left} events were still on the device when recording ended"
                self.queue.clear()


def _wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.002) -> bool:
    """Whether `condition()` became true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
