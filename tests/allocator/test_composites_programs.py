"""Seeded programs on our composites: every strategy answers and places alike, tables and bytes hold after every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allocator import STRATEGIES, kv_store_for
from tests.allocator.composite_program import Program, our_composite
from tests.allocator.composite_state import Stamps, check
from tests.allocator.delayed import NeverEnd, NeverFloat
from tests.engine.composites import LAYOUTS

pytestmark = pytest.mark.cpu

STEPS = 120


def program(layout: str, page_size: int, *, lazy: bool, seed: int, strategy: str, **settings: Any) -> Program:
    return Program(our_composite(layout, page_size, lazy=lazy, strategy=strategy, **settings), seed)


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_lists_bands_and_bytes_hold_after_every_call(layout: str, page_size: int, lazy: bool) -> None:
    run = program(layout, page_size, lazy=lazy, seed=page_size, strategy="batched", store=kv_store_for)
    stamps = Stamps(run.made)
    compared = 0
    for _ in range(STEPS):
        run.step()
        check(run.made)
        compared += stamps.look()
    assert compared > STEPS


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_strategies_answer_and_place_alike(layout: str, page_size: int, lazy: bool) -> None:
    runs = {
        name: program(layout, page_size, lazy=lazy, seed=50 + page_size, strategy=name) for name in STRATEGIES
    }
    expected = runs.pop("per-row")
    for number in range(STEPS):
        answer, sizes, places = expected.step(), expected.sizes(), expected.places()
        for name, run in runs.items():
            assert run.step() == answer, (name, number)
            assert run.sizes() == sizes, (name, number)
            assert run.places() == places, (name, number)
    assert expected.refused


@pytest.mark.parametrize(("strategy", "late"), [*((name, False) for name in STRATEGIES), ("device", True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_default_device_is_of_no_matter(layout: str, strategy: str, late: bool) -> None:
    """An engine may load its model, and make its pools, inside ``with torch.device(...)``."""
    classes = {"end_class": NeverEnd} | ({"float_class": NeverFloat} if layout == LAYOUTS[2] else {})
    with torch.device("meta"):
        made = our_composite(layout, 4, lazy=True, strategy=strategy, **(classes if late else {}))
    tokens = made.alloc(64)
    with torch.device("meta"):
        made.free_segment(tokens[8:24], start_pos=8)
        made.free(tokens[33:50])
        assert int(made.flush_opportunistic()) >= 0
        made.full_attn_allocator.flush_for_allocation()
        assert made.available_size() > 0
        assert made.alloc(16).device.type == "cpu"
    check(made)
