"""Our composites against what SGLang's own answered when it was recorded (`tests.allocator.composite_digests`)."""

from __future__ import annotations

import json

import pytest

from tests.allocator.composite_digests import CASES, EVERY, FILE, STEPS, digests
from tests.allocator.composite_program import Program, our_composite

pytestmark = pytest.mark.cpu
RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_ours_answer_and_place_as_was_recorded(case: tuple[str, int, bool, int]) -> None:
    layout, page_size, lazy, seed = case
    expected = RECORDED[repr(case)]
    assert len(expected) == STEPS // EVERY
    found = digests(Program(our_composite(layout, page_size, lazy=lazy, strategy="batched"), seed))
    same = [one == other for one, other in zip(found, expected, strict=True)]
    assert all(same), f"different from step {same.index(False) * EVERY} on, or in the {EVERY} after it"


def test_nothing_else_was_recorded() -> None:
    assert sorted(RECORDED) == sorted(map(repr, CASES))
