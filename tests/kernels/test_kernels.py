"""Triton kernels beside torch operations: the same plans, tables and bytes, whatever the band looks like."""

from __future__ import annotations

from tests.kernels.interpreter import require_interpreter

require_interpreter()

import pytest  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from allocator.kernels.flush import TritonFlush  # noqa: E402
from tests.kernels.bands import Band, expect_same, named_bands  # noqa: E402

pytestmark = pytest.mark.cpu

BANDS = named_bands()
#: Blocks smaller than windows, equal to them, and larger; one program and several.
TUNINGS = ({}, {"block": 4, "_most_programs": 3}, {"block": 8, "_chunk": 2, "_most_programs": 1})


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
@pytest.mark.parametrize("name", BANDS)
def test_named_bands(name: str, tuning: dict[str, int]) -> None:
    expect_same(BANDS[name], TritonFlush, **tuning)


@st.composite
def bands(draw: st.DrawFn) -> Band:
    size = draw(st.integers(1, 90))
    density = draw(st.sampled_from([0, 1, 5, 9, 10]))
    holds = draw(st.lists(st.integers(0, 9).map(lambda n: n < density), min_size=size, max_size=size))
    if all(holds):
        holds[draw(st.integers(0, size - 1))] = False
    return Band(
        holds=tuple(holds),
        grows_up=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 4])),
        entry_bytes=draw(st.sampled_from([7, 12, 32, 40])),
        seed=draw(st.integers(0, 1000)),
        lead=draw(st.integers(1, 3)),
        spare=draw(st.integers(0, 3)) + 2,
        on_device=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(bands(), st.sampled_from([4, 16, 1024]), st.sampled_from([1, 2, 2048]), st.integers(1, 5))
def test_any_band(band: Band, block: int, chunk: int, programs: int) -> None:
    expect_same(band, TritonFlush, block=block, _chunk=chunk, _most_programs=programs)
