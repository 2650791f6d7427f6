"""What our composites say of sizes, and what they answer where a device's numbers come late."""

from __future__ import annotations

import copy

import pytest

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
