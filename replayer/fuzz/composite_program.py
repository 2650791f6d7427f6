"""One program of calls on a composite: on all sides, compared, and written down as a trace of level ``composite``."""

from __future__ import annotations

from recorder.trace import EventKind
from replayer.fuzz.program import Program, token_ids
from replayer.fuzz.sides import Side


class CompositeProgram(Program):
    """`Program`, and the calls that go to the composite: those without a pool's name."""

    # -- alloc

    def take(self, need_size: int) -> list[int] | None:
        """``alloc``."""
        return self._ids(EventKind.ALLOC, None, lambda side: side.composite.alloc(need_size), value=need_size)

    def extend(self, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        """``alloc_extend``."""
        tokens = sum(seq) - sum(prefix)
        return self._ids(
            EventKind.ALLOC_EXTEND,
            None,
            lambda side: side.composite.alloc_extend(
                token_ids(prefix),
                token_ids(prefix),
                token_ids(seq),
                token_ids(seq),
                token_ids(last),
                tokens,
            ),
            value=tokens,
            list0=prefix,
            list1=seq,
            list2=last,
        )

    def extend_swa_tail(self, prefix: int, seq: int, last: int, tail: int) -> list[int] | None:
        """``alloc_extend_swa_tail``."""
        return self._ids(
            EventKind.ALLOC_EXTEND_SWA_TAIL,
            None,
            lambda side: side.composite.alloc_extend_swa_tail(
                token_ids([prefix]),
                token_ids([prefix]),
                token_ids([seq]),
                token_ids([seq]),
                token_ids([last]),
                seq - prefix,
                tail,
            ),
            value=seq - prefix,
            value2=tail,
            list0=[prefix],
            list1=[seq],
            list2=[last],
        )

    def decode(self, seq: list[int], last: list[int]) -> list[int] | None:
        """``alloc_decode``."""
        return self._ids(
            EventKind.ALLOC_DECODE,
            None,
            lambda side: side.composite.alloc_decode(token_ids(seq), token_ids(seq), token_ids(last)),
            list1=seq,
            list2=last,
        )

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> int:
        return self._number(
            EventKind.ENSURE_CAPACITY,
            None,
            lambda side: side.composite.ensure_capacity(full_tokens, swa_tokens),
            value=full_tokens,
            value2=swa_tokens,
        )

    def set_full_to_swa_mapping(self, tokens: list[int], places: list[int]) -> None:
        self._call(
            EventKind.SET_FULL_TO_SWA_MAPPING,
            None,
            lambda side: side.composite.set_full_to_swa_mapping(token_ids(tokens), token_ids(places)),
            list0=tokens,
            list1=places,
        )

    # -- free

    def give(self, kind: EventKind, tokens: list[int]) -> None:
        """``free``, ``free_swa`` or ``free_full``, as the kind says."""
        method = kind.name.lower()
        self._call(kind, None, lambda side: getattr(side.composite, method)(token_ids(tokens)), list0=tokens)

    def give_segment(self, kind: EventKind, tokens: list[int]) -> None:
        """``free_segment``, ``free_swa_segment`` or ``free_full_segment``, from a page border on."""
        method = kind.name.lower()
        self._call(
            kind,
            None,
            lambda side: getattr(side.composite, method)(token_ids(tokens), start_pos=0),
            list0=tokens,
            value=0,
        )

    def group_begin(self) -> None:
        self._call(EventKind.FREE_GROUP_BEGIN, None, lambda side: side.composite.free_group_begin())

    def group_end(self) -> None:
        self._call(EventKind.FREE_GROUP_END, None, lambda side: side.composite.free_group_end())

    def flush_deferred_full_frees(self) -> None:
        self._call(
            EventKind.FLUSH_DEFERRED_FULL_FREES, None, lambda side: side.composite.flush_deferred_full_frees()
        )

    # -- copies to and from the host

    def backup(self, number: int, pool: str, places: list[int], slots: list[int], pages: list[int]) -> None:
        self._copy(EventKind.BACKUP_BEGIN, number, pool, places, slots, pages)

    def load_back(
        self, number: int, pool: str, places: list[int], slots: list[int], pages: list[int]
    ) -> None:
        self._copy(EventKind.LOAD_BACK_BEGIN, number, pool, places, slots, pages)

    def _copy(
        self, kind: EventKind, number: int, pool: str, places: list[int], slots: list[int], pages: list[int]
    ) -> None:
        what = "load" if kind is EventKind.LOAD_BACK_BEGIN else "backup"
        self._call(
            kind,
            pool,
            lambda side: side.composite.set_hicache_transfer_done_event(
                (pool, number, what), side.copy(number)
            ),
            value=number,
            list0=places,
            list1=slots,
            list2=pages,
        )

    def copy_done(self, number: int, pool: str) -> None:
        self._call(
            EventKind.HOST_COPY_DONE,
            pool,
            lambda side: setattr(side.copy(number), "fired", True),
            value=number,
        )

    # -- states

    def prepare_mamba_allocation(self, target_size: int) -> None:
        def prepare(side: Side) -> None:
            side.composite.prepare_mamba_allocation(target_size)

        self._call(EventKind.PREPARE_MAMBA_ALLOCATION, None, prepare, value=target_size)

    def slot_alloc(self, need_size: int) -> list[int] | None:
        return self._ids(
            EventKind.SLOT_ALLOC, "mamba", lambda side: side.slots.alloc(need_size), value=need_size
        )

    def slot_free(self, slots: list[int]) -> None:
        self._call(EventKind.SLOT_FREE, "mamba", lambda side: side.slots.free(token_ids(slots)), list0=slots)

    # -- the rest

    def flush_all(self) -> int:
        """``flush_opportunistic``."""
        return self._number(EventKind.FLUSH, None, lambda side: side.composite.flush_opportunistic(), value=0)

    def launch(self, number: int, writes: list[int] | None) -> None:
        def begin(side: Side) -> None:
            event = side.event(number)
            side.composite.set_latest_forward_done_event(event)
            side.composite.set_inflight_forward(event, None if writes is None else token_ids(writes))

        self._call(EventKind.FORWARD_BEGIN, None, begin, value=number, list0=writes)

    def clear(self) -> None:
        self._call(EventKind.CLEAR, None, lambda side: side.composite.clear())
