"""What our composites say of sizes, and what they answer where a device's numbers come late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator.errors import AllocatorError, BindError, DuplicateFreeError, NotAllocatedError
from tests.allocator.composite_program import our_composite
from tests.allocator.composite_state import check, composite_state, pools_of
from tests.allocator.delayed import NeverEnd, NeverFloat, SlowEnd, SlowFloat
from tests.allocator.test_composites_programs import program
from tests.engine.composites import LAYOUTS

pytestmark = pytest.mark.cpu

STEPS = 120
LATE = {"never": (NeverEnd, NeverFloat), "slow": (SlowEnd, SlowFloat)}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_that_come_late_change_no_answer(layout: str, page_size: int, lazy: bool, late: str) -> None:
    """Strategy ``device`` where the device's numbers do not come at once, as on a busy GPU."""
    end, middle = LATE[late]
    classes = {"end_class": end} | ({"float_class": middle} if layout == LAYOUTS[2] else {})
    expected = program(layout, page_size, lazy=lazy, seed=70 + page_size, strategy="batched")
    run = program(layout, page_size, lazy=lazy, seed=70 + page_size, strategy="device", **classes)
    for number in range(STEPS):
        assert run.step() == expected.step(), number
        if number % 5 == 0:
            assert run.sizes() == expected.sizes(), number
            assert run.places() == expected.places(), number
    assert composite_state(run.made) == composite_state(expected.made)
    assert expected.refused + expected.moved
    assert not any(pool._read_back.immediate for pool in pools_of(run.made).values())


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_said_to_be_available_is(layout: str, page_size: int, lazy: bool) -> None:
    """C10, for both sides together: so many tokens are handed out, and a page more only if room is made for it."""
    run = program(layout, page_size, lazy=lazy, seed=90 + page_size, strategy="batched")
    tried = 0
    for number in range(STEPS):
        run.step()
        if number % 7:
            continue
        made, available = run.made, run.made.available_size()
        twin = copy.deepcopy(made)
        assert twin.alloc(available) is not None
        check(twin)
        if layout == "full and mamba":
            continue  # here what a flush of the states would give counts, as in SGLang's class
        shut = copy.deepcopy(made)
        for pool in pools_of(shut).values():
            pool.disagg_move_gate = lambda: not lazy
        before = composite_state(shut)
        # A float can still be asked to give back what it holds and does not use; two ends cannot.
        ids = shut.full_attn_allocator.free_id_count * page_size
        too_many = available if layout == "full and swa" else ids
        assert shut.alloc(too_many + page_size) is None
        assert composite_state(shut) == before
        tried += 1
    assert tried > 15 or layout == "full and mamba"


WRONG: dict[str, tuple[Callable[[Any, torch.Tensor], object], type[AllocatorError]]] = {
    "an id that is none": (lambda made, tokens: made.free(torch.cat([tokens[:1], torch.tensor([-1])])), NotAllocatedError),
    "a segment without window pages": (lambda made, tokens: made.free_segment(tokens[8:], start_pos=8), NotAllocatedError),
    "a page twice": (lambda made, tokens: made.free_segment(tokens[[0, 1, 2, 3, 0, 1, 2, 3]], start_pos=0), DuplicateFreeError),
    "a window place not taken": (
        lambda made, tokens: made.set_full_to_swa_mapping(tokens[8:], torch.arange(200, 208)), BindError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_told_later_where_answers_come_late(call: str, layout: str) -> None:
    """The pools find it on the device; a later call raises it, and until then no pool of the buffer is written to."""
    classes = {"end_class": NeverEnd} | ({"float_class": NeverFloat} if layout == LAYOUTS[2] else {})
    made = our_composite(layout, 4, lazy=True, strategy="device", **classes)
    tokens = made.alloc(16)
    made.free_swa(tokens[8:])
    wrong, error = WRONG[call]
    tables = [pool.virtual_to_physical.tolist() for pool in pools_of(made).values()]
    with pytest.raises(error):
        wrong(made, tokens)
        made.alloc(4)
        made.full_attn_allocator._errors.look(wait=True)
    kept = [pool.virtual_to_physical.tolist() for pool in pools_of(made).values()]
    assert kept == tables
    made.clear()
    assert made.alloc(16) is not None
    check(made)
