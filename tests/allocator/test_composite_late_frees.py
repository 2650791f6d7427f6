"""Frees of a composite with a window read nothing with the strategy `device`, whichever tokens still have a window page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayer.ledger import SyncLedger
from tests.allocator.composite_state import check, composite_state, pools_of
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.allocator.small_composites import THREE, every_window, lay, make
from tests.engine.composites import Event

pytestmark = pytest.mark.cpu

PAGE = 4


class Requests:
    """Two requests of 8 and 4 pages, of one of which the first two pages have left the window; the larger one is what is freed."""

    def __init__(self, made: Any) -> None:
        self.made, self.page = made, made.page_size
        self.tokens, self.other = lay(made, 8 * self.page), lay(made, 4 * self.page)
        made.free_swa_segment(self.tokens[: 2 * self.page], start_pos=0)
        self.places = made.swa_attn_allocator.alloc_physical(2 * self.page)
        made.set_hicache_transfer_done_event("load", Event())

    def shuffled(self) -> torch.Tensor:
        """Tokens of every page, in no order; some twice where a page has several."""
        tokens = self.tokens.flip(0)
        return tokens if self.page == 1 else torch.cat([tokens[::2], tokens[:5]])

    def free(self) -> None:
        self.made.free(self.shuffled())

    def free_outside(self) -> None:
        self.made.free(self.tokens[: 2 * self.page])

    def free_swa(self) -> None:
        self.made.free_swa(self.shuffled())

    def free_swa_outside(self) -> None:
        self.made.free_swa(self.tokens[: 2 * self.page])

    def group(self) -> None:
        self.made.free_group_begin()
        self.made.free(self.shuffled())
        self.made.free_swa(self.tokens[2 * self.page : 4 * self.page])
        self.made.free_segment(self.other, start_pos=0)
        self.made.free_group_end()

    def group_with_new_pairs(self) -> None:
        """Ids are given other window pages while their free is queued."""
        self.made.free_group_begin()
        self.made.free(self.tokens)
        self.made.free_segment(self.other, start_pos=0)
        self.made.set_full_to_swa_mapping(self.tokens[self.page : 3 * self.page], self.places)
        self.made.free_group_end()


FREES = ("free", "free_outside", "free_swa", "free_swa_outside", "group", "group_with_new_pairs")


def classes(layout: str) -> dict[str, Any]:
    return {"end_class": NeverEnd} | ({"float_class": NeverFloat} if layout == THREE else {})


@pytest.mark.parametrize("numbers", ["at once", "late"])
@pytest.mark.parametrize("call", FREES)
@pytest.mark.parametrize("page_size", [1, PAGE])
@every_window
def test_frees_read_nothing_and_free_what_the_others_do(
    layout: str, page_size: int, call: str, numbers: str
) -> None:
    late = classes(layout) if numbers == "late" else {}
    one = Requests(make(layout, page_size, strategy="device", **late))
    other = Requests(make(layout, page_size))
    assert one.tokens.tolist() == other.tokens.tolist()
    pools = pools_of(one.made).values()
    waited = sum(pool.blocking_reads for pool in pools)
    with SyncLedger("cpu") as ledger:
        for pool in pools:
            ledger.host(*pool.pinned_host_tensors, pinned=True)
        with ledger.call(call, audit=True) as record:
            getattr(one, call)()
    assert (record.total, ledger.disagreements) == (0, [])
    assert sum(pool.blocking_reads for pool in pools) == waited
    before = composite_state(other.made)
    getattr(other, call)()
    after = composite_state(other.made)
    assert (after == before) == (call == "free_swa_outside")
    assert composite_state(one.made) == after


@pytest.mark.parametrize("page_size", [1, PAGE])
@every_window
def test_what_was_freed_without_a_count_can_be_had_again(layout: str, page_size: int) -> None:
    one = Requests(make(layout, page_size, strategy="device", **classes(layout)))
    other = Requests(make(layout, page_size))
    for each in (one, other):
        each.made.swa_attn_allocator.free_physical(each.places)
        each.free()
    most = other.made.available_size()
    for count in (most, page_size):
        answers = [each.made.alloc(count) for each in (one, other)]
        found, expected = (None if each is None else each.tolist() for each in answers)
        assert found == expected
    assert composite_state(one.made) == composite_state(other.made)
    check(one.made)
