"""A composite whose numbers come late beside one whose numbers do not."""

from __future__ import annotations

from typing import Any

import torch

from replayer.ledger import SyncLedger
from tests.allocator.composite_state import composite_state, pools_of
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.allocator.small_composites import ENDS, THREE, make
from tests.engine.composites import Event

PAGE = 4


class Pair:
    """A composite with numbers that never come, and one with strategy `batched`: the same calls on both."""

    def __init__(self, layout: str = ENDS, **settings: Any) -> None:
        late = {"end_class": NeverEnd} | ({"float_class": NeverFloat} if layout == THREE else {})
        self.late = make(layout, PAGE, strategy="device", **late, **settings)
        self.plain = make(layout, PAGE, **settings)
        self.both = (self.late, self.plain)
        self.ledger = SyncLedger("cpu")

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Of one answer."""
        found, expected = (getattr(made, method)(*arguments, **keywords) for made in self.both)
        if isinstance(expected, torch.Tensor):
            assert found.tolist() == expected.tolist(), method
        else:
            assert found == expected, method
        return found

    def ask(self, method: str, *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        """The late one's answer, which is that of the other, and synchronisations on the way to it."""
        with self.ledger as ledger:
            for pool in pools_of(self.late).values():
                ledger.host(*pool.pinned_host_tensors, pinned=True)
            with ledger.call(method, audit=True) as record:
                found = getattr(self.late, method)(*arguments, **keywords)
        assert ledger.disagreements == []
        expected = getattr(self.plain, method)(*arguments, **keywords)
        if isinstance(expected, torch.Tensor):
            assert found.tolist() == expected.tolist(), method
        else:
            assert found == expected, method
        return found, record.total

    def forward(self, written: torch.Tensor | None = None) -> None:
        event = Event()
        for made in self.both:
            made.set_latest_forward_done_event(event)
            made.set_inflight_forward(event, written)

    def arrive(self, posted: list[int] | None = None) -> None:
        """All numbers that were sent are there, or those that were by then."""
        for pool, count in zip(pools_of(self.late).values(), posted or self.posted, strict=True):
            pool._read_back.arrived = count

    @property
    def posted(self) -> list[int]:
        """Numbers that the pools have sent."""
        return [pool._read_back.posted for pool in pools_of(self.late).values()]

    def shut(self) -> None:
        for made in self.both:
            made.set_disagg_move_gate(lambda: False)

    @property
    def is_settled(self) -> bool:
        return all(pool._is_settled for pool in pools_of(self.late).values())

    def same(self) -> bool:
        return composite_state(self.late) == composite_state(self.plain)


def full_pair(**settings: Any) -> tuple[Pair, torch.Tensor]:
    """Two ends with no room left, filled page by page, so that the last ones are next to both watermarks; and a forward that runs."""
    pair = Pair(**settings)
    taken = [pair.call("alloc", PAGE) for _ in range(pair.plain.available_size() // PAGE)]
    pair.forward()
    return pair, torch.cat(taken)


def flushed(pages: slice, **settings: Any) -> Pair:
    """`full_pair` after pages have been freed, by segment, and a flush that was not urgent: what moved waits for the forward."""
    pair, tokens = full_pair(**settings)
    for made in pair.both:
        made.free_segment(tokens.reshape(-1, PAGE)[pages].reshape(-1), start_pos=0)
        made.flush_opportunistic()
    assert not pair.is_settled
    return pair


def counted_in_part(pair: Pair, tokens: torch.Tensor) -> None:
    """Two frees of some of their pages' tokens: how many pages those of the first are has arrived, and of the second it has not."""
    for made in pair.both:
        made.free(tokens[5 * PAGE + 1 : 9 * PAGE - 1])
    counted = pair.posted
    for made in pair.both:
        made.free(tokens[1 : 2 * PAGE - 1])
    pair.arrive(counted)


INNER, OUTER = slice(2, 5), slice(-3, None)


def tokens_at(made: Any, first: int, last: int | None = None) -> torch.Tensor:
    """Of the full pool's physical pages from ``first`` through ``last``."""
    pages = made.full_attn_allocator.physical_to_virtual[first : (last or first) + 1]
    assert (pages > 0).all()
    return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
