"""One program: each call is made on all sides, compared, and written down as a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from recorder.trace import UNSET, EventKind, ImpossibleEvent, StateRow, TraceWriter
from replayer.checks import CheckOptions
from replayer.failure import CheckFailure
from replayer.fuzz.shapes import Setting
from replayer.fuzz.sides import Disagreement, Side, ids_of, number_of
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions

SIDES = ("low", "high")


class Program:
    """A program while it runs. The first of ``targets`` is the reference: its answers are the trace's.

    Raises:
        Disagreement: from any call, when two sides differ or one refuses; the trace ends with that call and the reference's state.
    """

    def __init__(
        self, path: Path, setting: Setting, targets: Sequence[tuple[str, TargetOptions]], how: str
    ) -> None:
        header = setting.header(how)
        self.path, self.setting = path, setting
        self.sides = [Side(name, header, target) for name, target in targets]
        self.numbers = {pool.name: number for number, pool in enumerate(header.pools)}
        self.writer = TraceWriter(path, header, force=True)
        self.seq = -1
        self.counts: Counter[str] = Counter()
        self.failed: Disagreement | None = None

    @property
    def reference(self) -> Side:
        return self.sides[0]

    # -- calls

    def available(self, pool: str | None) -> int:
        """What the reference says is available, in tokens; without a pool, to the composite."""
        try:
            return self.reference.available(pool)
        except Disagreement as untold:
            self.failed = Disagreement(untold.message, self.seq, untold.target)
            raise self.failed from None

    def alloc(self, pool: str, need_size: int) -> list[int] | None:
        return self._ids(
            EventKind.ALLOC, pool, lambda side: side.pools[pool].alloc(need_size), value=need_size
        )

    def alloc_extend(self, pool: str, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        tokens = sum(seq) - sum(prefix)
        return self._ids(
            EventKind.ALLOC_EXTEND,
            pool,
            lambda side: side.pools[pool].alloc_extend(
                token_ids(prefix), token_ids(prefix), token_ids(seq), token_ids(seq), token_ids(last), tokens
            ),
            value=tokens,
            list0=prefix,
            list1=seq,
            list2=last,
        )

    def alloc_decode(self, pool: str, seq: list[int], last: list[int]) -> list[int] | None:
        return self._ids(
            EventKind.ALLOC_DECODE,
            pool,
            lambda side: side.pools[pool].alloc_decode(token_ids(seq), token_ids(seq), token_ids(last)),
            list1=seq,
            list2=last,
        )

    def alloc_with_virtual(self, pool: str, pages: list[int]) -> None:
        self._call(
            EventKind.ALLOC_WITH_VIRTUAL,
            pool,
            lambda side: side.pools[pool].alloc_with_virtual(token_ids(pages)),
            list0=pages,
        )

    def alloc_physical(self, pool: str, need_size: int) -> list[int] | None:
        return self._ids(
            EventKind.ALLOC_PHYSICAL,
            pool,
            lambda side: side.pools[pool].alloc_physical(need_size),
            value=need_size,
        )

    def free_physical(self, pool: str, tokens: list[int], *, cancel: bool) -> None:
        kind = EventKind.CANCEL_PHYSICAL if cancel else EventKind.FREE_PHYSICAL
        method = "cancel_physical_reservation" if cancel else "free_physical"
        self._call(
            kind, pool, lambda side: getattr(side.pools[pool], method)(token_ids(tokens)), list0=tokens
        )

    def bind(self, pool: str, pages: list[int], physical: list[int]) -> None:
        self._call(
            EventKind.BIND,
            pool,
            lambda side: side.pools[pool].bind(token_ids(pages), token_ids(physical)),
            list0=pages,
            list1=physical,
        )

    def unbind(self, pool: str, pages: list[int]) -> None:
        self._call(
            EventKind.UNBIND,
            pool,
            lambda side: _nothing(side.pools[pool].virtual_to_physical.index_fill_(0, token_ids(pages), -1)),
            list0=pages,
        )

    def free(self, pool: str, tokens: list[int], pages: list[int] | None = None) -> None:
        named = {} if pages is None else {"_pages": pages}
        self._call(
            EventKind.FREE,
            pool,
            lambda side: side.pools[pool].free(
                token_ids(tokens), **{name: token_ids(one) for name, one in named.items()}
            ),
            list0=tokens,
            list1=pages,
        )

    def free_segment(self, pool: str, tokens: list[int], start: int) -> None:
        self._call(
            EventKind.FREE_SEGMENT,
            pool,
            lambda side: side.pools[pool].free_segment(token_ids(tokens), start_pos=start),
            list0=tokens,
            value=start,
        )

    def free_group_begin(self, pool: str) -> None:
        self._call(EventKind.FREE_GROUP_BEGIN, pool, lambda side: side.pools[pool].free_group_begin())

    def free_group_end(self, pool: str) -> None:
        self._call(EventKind.FREE_GROUP_END, pool, lambda side: side.pools[pool].free_group_end())

    def flush(self, pool: str, *, urgent: bool) -> int:
        method = "flush_for_allocation" if urgent else "flush_opportunistic"
        return self._number(
            EventKind.FLUSH, pool, lambda side: getattr(side.pools[pool], method)(), value=int(urgent)
        )

    def make_room(self, pool: str, side: str, min_bytes: int) -> int:
        return self._number(
            EventKind.MAKE_ROOM,
            pool,
            lambda each: each.pools[pool].make_room(side=side, min_bytes=min_bytes),
            value=SIDES.index(side),
            value2=min_bytes,
        )

    def compact_holes(self, pool: str, side: str) -> int:
        return self._number(
            EventKind.COMPACT_HOLES,
            pool,
            lambda each: each.pools[pool].compact_holes(retreat_side=side),
            value=SIDES.index(side),
        )

    def forward_begin(self, pool: str, number: int, writes: list[int] | None) -> None:
        def begin(side: Side) -> None:
            event = side.event(number)
            side.pools[pool].set_latest_forward_done_event(event)
            side.pools[pool].set_inflight_forward(event, None if writes is None else token_ids(writes))

        self._call(EventKind.FORWARD_BEGIN, pool, begin, value=number, list0=writes)

    def forward_done(self, number: int) -> None:
        self._call(
            EventKind.FORWARD_DONE,
            None,
            lambda side: setattr(side.event(number), "fired", True),
            value=number,
        )

    def move_gate(self, *, is_open: bool) -> None:
        self._call(EventKind.MOVE_GATE, None, lambda side: side.shut_or_open(is_open), value=int(is_open))

    def clear(self) -> None:
        def clear(side: Side) -> None:
            for made in side.pools.values():
                made.clear()

        self._call(EventKind.CLEAR, None, clear)

    # -- the end

    def close(self) -> None:
        """Write the reference's last state, unless it does not tell, and the file's end."""
        with suppress(Disagreement):
            self.writer.state(StateRow(self.seq, self.reference.recorded_state()))
        self.writer.close()

    def judge(self, target: TargetOptions) -> None:
        """Replay the closed trace with every check after every event.

        Raises:
            Disagreement: a check failed, or the trace contradicts itself, which only wrong answers can make it do.
        """
        name = f"{target.allocator} {target.strategy}"
        try:
            outcome = replay(ReplayOptions(self.path, target, CheckOptions(every=1, logprob_every=2)))
        except ImpossibleEvent as error:
            raise Disagreement(
                f"the replay on {name} calls the trace impossible: {error}", target=target
            ) from None
        if outcome.failure is not None:
            raise Disagreement(f"on {name}, {outcome.failure}", outcome.failure.seq, target)
        if outcome.ledger_disagreements:
            raise Disagreement(
                f"the sync ledger's two counts differ in {outcome.ledger_disagreements} calls", target=target
            )
        self.counts["checks"] += sum(outcome.held.values())

    # -- one event

    def _ids(
        self, kind: EventKind, pool: str | None, make: Callable[[Side], Any], **arguments: Any
    ) -> list[int] | None:
        answer: list[int] | None = self._call(kind, pool, make, answers=ids_of, **arguments)
        self.counts["refused"] += answer is None
        return answer

    def _number(
        self, kind: EventKind, pool: str | None, make: Callable[[Side], Any], **arguments: Any
    ) -> int:
        answer: int = self._call(kind, pool, make, answers=number_of, **arguments)
        self.counts["flushes that moved"] += bool(kind is EventKind.FLUSH and answer)
        return answer

    def _call(
        self,
        kind: EventKind,
        pool: str | None,
        make: Callable[[Side], Any],
        *,
        answers: Callable[[Any, str], Any] | None = None,
        **arguments: Any,
    ) -> Any:
        self.seq += 1
        found: list[Any] = []
        refusal: Disagreement | None = None
        for side in self.sides:
            try:
                answer = make(side)
                found.append(None if answers is None else answers(answer, kind.name.lower()))
            except CheckFailure as wrong:
                said = f"on {side.name}, {wrong.message}: {wrong.found}"
                refusal = refusal or Disagreement(said, self.seq, side.target)
                found.append(UNSET)
            except (
                Exception,
                SystemExit,
            ) as error:  # whatever an allocator raises for a call that is allowed
                said = f"{side.name} refuses the call: {type(error).__name__}: {error}"
                refusal = refusal or Disagreement(said, self.seq, side.target)
                found.append(UNSET)
        self.writer.append(
            kind,
            pool=-1 if pool is None else self.numbers[pool],
            time_us=self.seq * 10,
            result=UNSET if answers is None else found[0],
            **arguments,
        )
        self.counts["calls"] += 1
        self.counts[f"call {kind.name.lower()}"] += 1
        try:
            self.failed = refusal or self._difference(kind, found)
        except Disagreement as untold:
            self.failed = Disagreement(untold.message, self.seq, untold.target)
        if self.failed is not None:
            raise self.failed
        return found[0]

    def _difference(self, kind: EventKind, answers: list[Any]) -> Disagreement | None:
        """The first figure in which a side differs from the reference."""
        reference = self.reference
        for side, answer in zip(self.sides, answers, strict=True):
            if answer != answers[0]:
                return Disagreement(
                    f"{side.name} answers {answer} to {kind.name.lower()}, {reference.name} {answers[0]}",
                    self.seq,
                    side.target,
                )
        pending = False
        for pool in self.numbers:
            expected = reference.figures(pool)
            pending = pending or bool(expected["pending"])
            for side in self.sides[1:]:
                for figure, value in side.figures(pool).items():
                    if value != expected[figure]:
                        return Disagreement(
                            f"after {kind.name.lower()}, {figure} of pool {pool!r} is {value} on {side.name}, "
                            f"{expected[figure]} on {reference.name}",
                            self.seq,
                            side.target,
                        )
        together = reference.joint_figures()
        for side in self.sides[1:]:
            for figure, value in side.joint_figures().items():
                if value != together.get(figure):
                    return Disagreement(
                        f"after {kind.name.lower()}, {figure} of the composite is {value} on {side.name}, "
                        f"{together.get(figure)} on {reference.name}",
                        self.seq,
                        side.target,
                    )
        self.counts["states with pages pending"] += pending
        self.counts["calls behind a shut gate"] += not reference.gate_open
        return None


def token_ids(ids: Sequence[int]) -> torch.Tensor:
    """int64 ``[n]`` on the host, a tensor of its own for every call."""
    return torch.tensor(ids, dtype=torch.int64)


def _nothing(_: object) -> None:
    return None
