"""Forwards that are still running while the allocator works, simulated so that a wrong move has the effect it would have on a GPU.

A forward's kernels were launched with physical places. When the trace starts one, those places are noted; when it is over, its writes
land *there*, wherever the tokens are by then. A forward is over when the trace says so, when its event answers true, or, for what comes
after on the stream, when the allocator orders the stream behind it; with it every forward launched before. Where the engine keeps one
slot for the running forward (SGLang's ``set_inflight_forward``), the next one takes the place of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replayer.content import IntArray, Words
from replayer.failure import CHECKS, CheckFailure
from replayer.host_copies import HostCopies
from replayer.leases import Leases
from replayer.oracle import shown
from replayer.tokens import Tokens

if TYPE_CHECKING:
    from replayer.pool_state import PoolState


class ReplayEvent:
    """A forward-done event that answers what the engine's event answered.

    ``query()`` gives the recorded answers of the running call in their order, and outside them what is known: once true, always true.
    ``wait()`` is the stream wait: it orders, it does not make ``query()`` true, and it is no synchronisation.
    """

    def __init__(self, number: int, hazards: Hazards) -> None:
        self.number = number
        self.fired = False
        self.answers: list[bool] = []
        self._hazards = hazards

    def query(self) -> bool:
        answer = self.answers.pop(0) if self.answers else self.fired
        if answer and not self.fired:
            self.fired = True
            self._hazards.finished_through(self.number)
        return answer

    def wait(self, stream: Any = None) -> None:
        self._hazards.finished_through(self.number)


@dataclass(slots=True)
class _Writer:
    number: int
    state: PoolState
    tokens: Tokens
    generations: IntArray
    physical_tokens: IntArray
    #: `PoolOracle.endings` at the launch.
    endings: int
    landed: bool = False

    def physical_pages(self) -> IntArray:
        return self.physical_tokens // self.state.page_size


@dataclass
class _Reader:
    number: int
    state: PoolState
    tokens: Tokens
    generations: IntArray
    physical_tokens: IntArray
    words: Words


class Hazards:
    """All running forwards, copies and leases of a replay.

    Contents follow at once (a forward's writes land inside the call that waited for it); judging follows after the call, from the log,
    so that a page moved *before* the wait is told from one moved after.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self._landed_through = -1
        self._judged_through = -1
        self._writers: dict[str, list[_Writer]] = {}
        self._readers: list[_Reader] = []
        self._latest: dict[str, int] = {}
        self._latest_events: dict[str, ReplayEvent] = {}
        self._slot: dict[str, tuple[ReplayEvent, IntArray | None]] = {}
        #: Goes up with whatever changes which forwards run and what they write.
        self.epoch = 0
        self.read_failures: list[CheckFailure] = []
        self.leases = Leases()
        self.copies = HostCopies(self.log, self._read_failed)
        self.gate_open: dict[str, bool] = {}
        #: The engine's gate is shut while any lease is open, whatever pool it is on, and the trace does not repeat that.
        self.leases_shut_gates = False
        #: Places filled by a move or handed out while a forward that was to write them, before they were freed, had not finished.
        self.filled_under_a_write = 0
        #: Entered around writes of our own that happen inside an allocator's call, so that they are not taken for its own.
        self.uncounted: Callable[[], AbstractContextManager[Any]] = nullcontext
        #: Checks that may raise; the others are simulated all the same.
        self.enabled: frozenset[str] = frozenset(CHECKS)

    # -- what the trace says

    def set_latest(self, pool: str, event: ReplayEvent | None) -> None:
        self._latest[pool] = -1 if event is None else event.number
        self.epoch += 1
        if event is None:
            self._latest_events.pop(pool, None)
        else:
            self._latest_events[pool] = event

    def begin_writing(self, state: PoolState, event: ReplayEvent, tokens: Tokens | None) -> None:
        """A forward was launched that writes ``tokens`` (virtual ones that live), None for none in this pool. The allocator keeps one
        slot, so the forward before it is taken to be over as far as its writes go: the engine must see to that."""
        self.epoch += 1
        self._slot[state.name] = event, None if tokens is None else tokens.pages
        writers = self._writers.get(state.name)
        if writers:
            for writer in writers:
                if not writer.landed:
                    self._land(writer)
            writers.clear()
        if tokens is None or not len(tokens) or event.number <= self._landed_through:
            return
        oracle = state.oracle
        generations, places = oracle.generation[tokens.pages], state.places_of(tokens)
        self._writers.setdefault(state.name, []).append(
            _Writer(event.number, state, tokens, generations, places, oracle.endings)
        )

    def begin_reading(self, state: PoolState, event: ReplayEvent, tokens: IntArray) -> None:
        """A forward was launched that reads ``tokens`` at the places they have now."""
        physical = state.physical_tokens(tokens)
        own = Tokens.split(tokens, state.page_size)
        generations = state.oracle.generation[own.pages]
        self._readers.append(
            _Reader(event.number, state, own, generations, physical, state.oracle.words_of(own))
        )
        state.held_by[physical // state.page_size] = event.number

    def finished_through(self, number: int) -> None:
        """The stream is past forward ``number`` and all before it."""
        self.log.append(("finished", number))
        if number <= self._landed_through:
            return
        self._landed_through = number
        with self.uncounted():
            for writers in self._writers.values():
                for writer in writers:
                    if writer.number <= number and not writer.landed:
                        self._land(writer)
            for reader in [reader for reader in self._readers if reader.number <= number]:
                self._readers.remove(reader)
                self._compare_read(reader)

    def may_move(self, pool: str) -> bool:
        """Whether the engine lets the allocator move pages of this pool now: what its gate answers."""
        return self.gate_open.get(pool, True) and not (self.leases_shut_gates and self.leases)

    def judge_transfer_target(self, state: PoolState, places: IntArray) -> None:
        """Places are written from outside from now on. A stream orders a forward before its next owner's writes, but not before a
        transfer's: a page of a finished request that the next step still writes is no target (vllm-project/vllm#45357).

        Raises:
            CheckFailure: C7.
        """
        for writer in self._writers.get(state.name, ()):
            hit = np.intersect1d(places, writer.physical_pages())
            if writer.number > self._judged_through and len(hit):
                self._fail(
                    "C7",
                    state,
                    hit,
                    f"pages that unfinished forward {writer.number} writes were made the target of a transfer",
                )

    def forget(self, state: PoolState) -> None:
        """The pool was cleared."""
        self.leases.forget(state)
        self.copies.forget(state)
        self._latest.pop(state.name, None)
        self._latest_events.pop(state.name, None)
        self._slot.pop(state.name, None)
        self._writers.pop(state.name, None)
        self._readers = [reader for reader in self._readers if reader.state is not state]

    # -- the allocator's moves, judged in order

    def judge_moves(self, state: PoolState, src_pages: IntArray, dst_pages: IntArray) -> None:
        """Pages were moved now. Notes which places must keep their bytes for a reader.

        Raises:
            CheckFailure: C7, C8 or C9.
        """
        if not self.may_move(state.name):
            self._fail("C9", state, src_pages, "pages were moved while a move gate is shut")
        if state.awaiting_load:
            self._fail(
                "C9",
                state,
                src_pages,
                "pages were moved while places reserved for a load wait for it to be queued",
            )
        for pages in (src_pages, dst_pages):
            self._require_unleased(state, pages, "moved or filled before their lease ended")
        self._judge_copies(state, src_pages, "moved")
        self._judge_from_outside(state, dst_pages, "moved into")
        for writer in self._writers.get(state.name, ()):
            if writer.number <= self._judged_through:
                continue
            self._judge_against_writer(writer, state, src_pages, dst_pages)
        self._judge_overwritten(state, dst_pages, "moved into")
        reader = self._latest.get(state.name, -1)
        if reader > self._judged_through:
            state.held_by[src_pages] = reader

    def _judge_against_writer(
        self, writer: _Writer, state: PoolState, src_pages: IntArray, dst_pages: IntArray
    ) -> None:
        written = writer.physical_tokens[self._still_owned(writer)] // state.page_size
        for pages, what in ((src_pages, "moved"), (dst_pages, "moved into")):
            hit = np.intersect1d(pages, written)
            if len(hit):
                self._fail(
                    "C7", state, hit, f"pages that unfinished forward {writer.number} writes were {what}"
                )
        self.filled_under_a_write += state.count_common(dst_pages, writer.physical_pages())

    @staticmethod
    def _still_owned(writer: _Writer) -> npt.NDArray[np.bool_]:
        """Tokens that have not been freed since the forward was launched. SGLang frees the last page of a finished request while the
        forward that still writes its next token runs; the allocator cannot know that place any more (the id is unmapped), and keeping
        it unused until then is the engine's part. Such places are counted, not judged."""
        oracle, pages = writer.state.oracle, writer.tokens.pages
        owned: npt.NDArray[np.bool_] = oracle.live[pages] & (oracle.generation[pages] == writer.generations)
        return owned

    def judge_handed_out(self, state: PoolState, physical_pages: IntArray) -> None:
        """Places were given to new virtual pages.

        Raises:
            CheckFailure: C8 or C9.
        """
        self._judge_overwritten(state, physical_pages, "handed out")
        self._judge_from_outside(state, physical_pages, "handed out")
        self._require_unleased(state, physical_pages, "handed out")
        for writer in self._writers.get(state.name, ()):
            if writer.number > self._judged_through:
                self.filled_under_a_write += state.count_common(physical_pages, writer.physical_pages())

    def _require_unleased(self, state: PoolState, places: IntArray, what: str) -> None:
        if not self.leases:
            return
        leased = state.leased[places] > 0
        if np.count_nonzero(leased):
            self._fail("C9", state, places[leased], f"leased pages were {what}")

    def _judge_copies(self, state: PoolState, places: IntArray, what: str) -> None:
        for copy in self.copies.unfinished(state):
            hit = np.intersect1d(places, copy.hold.places)
            if len(hit):
                uses = "writes" if copy.is_load else "reads"
                self._fail(
                    "C7" if copy.is_load else "C8",
                    state,
                    hit,
                    f"pages that unfinished {copy.name} {uses} were {what}",
                )

    def _judge_from_outside(self, state: PoolState, places: IntArray, what: str) -> None:
        """Places that get new contents, against what copies and leases use: in this pool, and where another pool's bytes were left."""
        self._judge_copies(state, places, what)
        lease = self.leases.overwritten(state, places)
        if lease is not None:
            self._fail(
                "C9",
                state,
                places,
                f"bytes of pool {lease.state.name!r} under lease {lease.number} were {what}",
            )
        copy = self.copies.overwritten(state, places)
        if copy is not None:
            self._fail(
                "C7" if copy.is_load else "C8", state, places,
                f"bytes of pool {copy.hold.state.name!r} that unfinished {copy.name} uses were {what}",
            )  # fmt: skip

    def judge_finished(self, number: int) -> None:
        if number > self._judged_through:
            self._judged_through = number
            self.epoch += 1
            for writers in self._writers.values():
                writers[:] = [writer for writer in writers if writer.number > number]

    @property
    def judged_through(self) -> int:
        """Forwards up to this one are over, as far as judging has come."""
        return self._judged_through

    def latest_unfired(self, pool: str) -> ReplayEvent | None:
        """The event of the forward launched last in this pool, None once it has answered true. Where the stream was ordered behind it the
        forward is over and the event need not have fired."""
        event = self._latest_events.get(pool)
        return None if event is None or event.fired else event

    def places_to_be_written(self, state: PoolState) -> set[int]:
        """Where those pages are now that the forward launched last was to write, unless its event has fired. It may be over all the same,
        where the stream was ordered behind it; an allocator need not have noticed."""
        event, pages = self._slot.get(state.name, (None, None))
        if event is None or event.fired or pages is None:
            return set()
        return set(state.placed_physical[pages].tolist())

    def nothing_runs(self, pool: str) -> bool:
        """Whether no forward can hold pages of this pool."""
        return self._latest.get(pool, -1) <= self._judged_through and not any(
            writer.number > self._judged_through for writer in self._writers.get(pool, ())
        )

    def _judge_overwritten(self, state: PoolState, pages: IntArray, what: str) -> None:
        held = state.held_by[pages]
        reads = held > self._judged_through
        if np.count_nonzero(reads):
            hit = pages[reads]
            numbers: Sequence[int] = sorted({int(number) for number in held[reads]})
            self._fail(
                "C8",
                state,
                hit,
                f"pages that unfinished forward {shown(np.array(numbers))} reads were {what}",
            )

    def _fail(self, check: str, state: PoolState, physical: IntArray, message: str) -> None:
        if check not in self.enabled:
            return
        virtual = state.placed_virtual[physical]
        raise CheckFailure(
            check,
            f"{message}: physical page(s) {shown(physical)}",
            state.name,
            [int(page) for page in virtual if page >= 0],
        )

    # -- effects

    def _land(self, writer: _Writer) -> None:
        writer.landed = True
        # A token freed meanwhile gets a write nobody reads; its place belongs to a later forward on the same stream.
        tokens, places, oracle = writer.tokens, writer.physical_tokens, writer.state.oracle
        if oracle.endings != writer.endings:
            owned = self._still_owned(writer)
            if np.count_nonzero(owned) < len(tokens):
                tokens, places = tokens.kept(owned), places[owned]
        writer.state.store.write_tokens(places, oracle.written(tokens))

    def _compare_read(self, reader: _Reader) -> None:
        state = reader.state
        pages = reader.tokens.pages
        same = state.oracle.live[pages] & (state.oracle.generation[pages] == reader.generations)
        expected = reader.words.copy()
        expected[same] = state.oracle.words_of(reader.tokens.kept(same))
        physical_pages, physical_offsets = np.divmod(reader.physical_tokens, state.page_size)
        contents = np.zeros((len(pages), state.page_size), dtype=np.uint64)
        contents[np.arange(len(pages)), physical_offsets] = expected
        wrong = state.store.differing(physical_pages, contents)[np.arange(len(pages)), physical_offsets]
        if wrong.any():
            self._read_failed(
                CheckFailure(
                    "C8",
                    f"forward {reader.number} read other bytes than it was launched for, at physical page(s) "
                    f"{shown(np.unique(physical_pages[wrong]))}",
                    state.name,
                    [int(page) for page in np.unique(pages[wrong])],
                )
            )

    def _read_failed(self, failure: CheckFailure) -> None:
        if failure.check in self.enabled:
            self.read_failures.append(failure)
