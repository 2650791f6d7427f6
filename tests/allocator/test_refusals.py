"""A call that cannot be right raises an error that names ids, pool and state, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from allocator import MultiEndedAllocator
from allocator.errors import (
    AllocatorError,
    BindError,
    ConfigurationError,
    DuplicateFreeError,
    FreeGroupError,
    MoveGateClosedError,
    NotAllocatedError,
    NotIdOwnerError,
    OutOfRoomError,
    PageAlignmentError,
    UnknownStrategyError,
)
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.allocator.pools import two_ends, whole_state

pytestmark = pytest.mark.cpu


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


TWICE = (*range(8, 12), *range(8, 12))

REFUSED: list[tuple[str, type[AllocatorError], list[int], Callable[[MultiEndedAllocator], object]]] = [
    ("freed twice", NotAllocatedError, [4], lambda a: a.free(ids(16))),
    ("another token of a freed page (sglang#27779)", NotAllocatedError, [4], lambda a: a.free(ids(18))),
    ("never allocated", NotAllocatedError, [40], lambda a: a.free(ids(160))),
    ("a freed -1 beside a live id (sglang#38836)", NotAllocatedError, [-1], lambda a: a.free(ids(8, -1))),
    ("the padding page (sglang#38519)", NotAllocatedError, [0], lambda a: a.free(ids(0, 8))),
    ("out of range", NotAllocatedError, [2500], lambda a: a.free(ids(10_000))),
    ("a segment that is not live", NotAllocatedError, [4], lambda a: a.free_segment(torch.arange(16, 20), start_pos=0)),
    ("one page twice in a segment (vllm#42571)", DuplicateFreeError, [2], lambda a: a.free_segment(ids(*TWICE), start_pos=0)),
    ("one page twice by its pages", DuplicateFreeError, [3], lambda a: a.free(ids(12, 12), _pages=ids(3, 3))),
    ("a size between pages", PageAlignmentError, [], lambda a: a.alloc(6)),
    ("a segment that starts inside a page", PageAlignmentError, [], lambda a: a.free_segment(ids(9, 10, 11), start_pos=1)),
    ("a live id bound again", BindError, [2], lambda a: a.alloc_with_virtual(ids(2))),
    ("an id out of range bound", BindError, [999], lambda a: a.alloc_with_virtual(ids(50, 999))),
    ("an id bound twice in one call", BindError, [50], lambda a: a.alloc_with_virtual(ids(50, 51, 50))),
    ("bind outside the band", BindError, [5], lambda a: a.bind(ids(50), ids(5))),
    ("unbind of an owner", NotAllocatedError, [2], lambda a: a.unbind(ids(2))),
    ("more than there is", OutOfRoomError, [], lambda a: a.alloc_with_virtual(torch.arange(6, 64))),
    ("an end of no group", FreeGroupError, [], lambda a: a.free_group_end()),
    ("a cancelled reservation that is none", NotAllocatedError, [], lambda a: a.cancel_physical_reservation(ids(8, 9, 10, 11))),
    ("half a page released", PageAlignmentError, [], lambda a: a.free_physical(ids(8, 9))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "bad", "call"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("strategy", ["batched", "device"])
def test_refused_and_nothing_changed(
    strategy: str,
    lazy: bool,
    error: type[AllocatorError],
    bad: list[int],
    call: Callable[[MultiEndedAllocator], object],
) -> None:
    full, swa = two_ends(lazy=lazy, strategy=strategy)
    full.alloc(16)
    swa.alloc(8)
    full.free(ids(16))
    before = whole_state(full), whole_state(swa)
    with pytest.raises(error) as raised:
        call(full)
    assert (whole_state(full), whole_state(swa)) == before
    assert raised.value.pool == "full"
    assert raised.value.ids == bad
    assert "full" in str(raised.value) and all(str(number) in str(raised.value) for number in bad)


def test_a_repeat_at_page_size_one_is_found_and_undone() -> None:
    full, _ = two_ends(page_size=1)
    given = full.alloc(6)
    assert given is not None
    before = whole_state(full)
    with pytest.raises(DuplicateFreeError, match="5"):
        full.free(ids(4, 5, 5))
    assert whole_state(full) == before


@pytest.mark.parametrize(
    ("strategy", "end_class"),
    [("batched", MultiEndedAllocator), ("device", MultiEndedAllocator), ("device", NeverEnd)],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_any_subset_of_a_page_frees_it_once(
    rows: int, strategy: str, end_class: type[MultiEndedAllocator]
) -> None:
    full, _ = two_ends(strategy=strategy, end_class=end_class)
    full.alloc(16)
    given = ids(9, 8, 11, 15)
    full.free(given if rows == 1 else given.reshape(rows, -1))
    assert full.allocated_count() == 8
    assert full.free_virtual_ids is not None and full.free_virtual_ids.tolist()[-2:] == [2, 3]


def test_a_bad_free_in_a_group_frees_nothing_of_it() -> None:
    full, _ = two_ends()
    full.alloc(16)
    before = whole_state(full)
    full.free_group_begin()
    full.free(ids(8))
    full.free(ids(160))
    with pytest.raises(NotAllocatedError, match="40"):
        full.free_group_end()
    assert whole_state(full) == before
    with pytest.raises(FreeGroupError):
        full.free_group_end()


def test_groups_do_not_nest() -> None:
    full, _ = two_ends()
    full.free_group_begin()
    with pytest.raises(FreeGroupError):
        full.free_group_begin()


def test_a_refused_alloc_changes_nothing() -> None:
    full, swa = two_ends()
    full.alloc(full.available_size())
    before = whole_state(full), whole_state(swa)
    assert full.alloc(4) is None
    assert full.alloc_extend(ids(0), ids(0), ids(9), ids(9), ids(-1), 9) is None
    assert full.alloc_decode(ids(1), ids(1), ids(-1)) is None
    assert (whole_state(full), whole_state(swa)) == before


def test_eager_compaction_does_not_move_behind_a_gate() -> None:
    full, _ = two_ends(lazy=False)
    full.alloc(16)
    full.disagg_move_gate = lambda: False
    before = whole_state(full)
    with pytest.raises(MoveGateClosedError):
        full.free(ids(8))
    assert whole_state(full) == before
    with pytest.raises(MoveGateClosedError):
        full.free_segment(torch.arange(8, 16), start_pos=0)
    assert whole_state(full) == before


def test_only_the_owner_hands_out_ids() -> None:
    full, _ = two_ends()
    guest = MultiEndedAllocator(
        kvcache=full.get_kvcache(), unified_buffer=full.unified_buffer, sub_pool_name="full", device="cpu", is_id_owner=False,
        virtual_num_pages=500, page_size=4,
    )  # fmt: skip
    assert guest.virtual_to_physical.shape[0] == 501
    for call in (lambda: guest.alloc(4), lambda: guest.alloc_decode(ids(1), ids(1), ids(-1))):
        with pytest.raises(NotIdOwnerError):
            call()


def test_impossible_configurations() -> None:
    full, _ = two_ends()
    common = {
        "kvcache": None,
        "unified_buffer": full.unified_buffer,
        "sub_pool_name": "full",
        "device": "cpu",
    }
    with pytest.raises(UnknownStrategyError, match="batched"):
        MultiEndedAllocator(**common, is_id_owner=True, strategy="guess")
    with pytest.raises(ConfigurationError):
        MultiEndedAllocator(**common, is_id_owner=True, virtual_num_pages=9)
    with pytest.raises(ConfigurationError):
        MultiEndedAllocator(**common, is_id_owner=True, shards_under_dcp=True)
    with pytest.raises(ConfigurationError):
        MultiEndedAllocator(**common, is_id_owner=True, page_size=512)

    class Derived(MultiEndedAllocator): ...

    with pytest.raises(ConfigurationError, match="DeviceMultiEndedAllocator"):
        Derived(**common, is_id_owner=True, strategy="device")
    # What it says of itself is what it does.
    for planned_there in (NeverEnd, NeverFloat):
        for given in ({"strategy": "batched"}, {}):
            with pytest.raises(ConfigurationError, match="its strategy is 'device', not 'batched'"):
                planned_there(**common, is_id_owner=True, **given)


def test_ids_handed_out_are_not_views_of_the_free_list() -> None:
    """Megatron-LM#6584: what an alloc returned must not change under its owner when others free and allocate."""
    full, _ = two_ends(page_size=1)
    first = full.alloc(5)
    assert first is not None
    kept = first.tolist()
    for _ in range(400):
        other = full.alloc(9)
        assert other is not None
        full.free(other)
    assert first.tolist() == kept
