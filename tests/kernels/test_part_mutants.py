"""Faults planted in the kernels that plan a flush that is not urgent: comparing plans finds each of them."""

from __future__ import annotations

from tests.kernels.interpreter import require_interpreter

require_interpreter()

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from allocator.kernels import flush, plan  # noqa: E402
from allocator.kernels.flush import TritonFlush  # noqa: E402
from tests.kernels.mutants import PART_MUTANTS, attribute_of, planted  # noqa: E402
from tests.kernels.part_bands import expect_same_in_part, named_part_bands  # noqa: E402

pytestmark = pytest.mark.cpu

BANDS = named_part_bands()


@pytest.mark.parametrize("name", PART_MUTANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, attribute_of(name), planted(name, tmp_path))
    # More blocks than are added up at a time.
    monkeypatch.setattr(plan, "SUMS", 2)
    # What a faulty kernel leaves unwritten reads as the padding page, and not as a page outside the buffer.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    # The odd ones first: they show most.
    for band in reversed(BANDS.values()):
        for block in (1024, 4):
            try:
                expect_same_in_part(band, TritonFlush, block=block)
            except AssertionError:
                return
    pytest.fail("no band shows the fault")
