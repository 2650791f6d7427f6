"""The plan of a flush that is not urgent, in Triton kernels beside torch operations and beside a walk over pages."""

from __future__ import annotations

from tests.kernels.interpreter import require_interpreter

require_interpreter()

from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from allocator.flush_ops import Holes, TorchFlush  # noqa: E402
from allocator.kernels import part_plan  # noqa: E402
from allocator.kernels import plan as urgent_plan  # noqa: E402
from allocator.kernels.flush import TritonFlush  # noqa: E402
from tests.kernels.compiled import PART_KERNELS  # noqa: E402
from tests.kernels.part_bands import (  # noqa: E402
    OTHER_TOKENS,
    PartBand,
    expect_same_in_part,
    named_part_bands,
)
from tests.kernels.test_kernels import OnlyMemory, Recorder  # noqa: E402

pytestmark = pytest.mark.cpu

BANDS = named_part_bands()
#: Blocks larger than windows, and smaller.
BLOCKS = (1024, 4)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", BANDS)
def test_named_bands(name: str, block: int) -> None:
    expect_same_in_part(BANDS[name], TritonFlush, block=block)


@st.composite
def part_bands(draw: st.DrawFn) -> PartBand:
    kinds = draw(st.sampled_from(["L.", "LLLL.", "L....", "L.-", "LL--.", ".-", "L-"]))
    places = draw(st.text(kinds, min_size=1, max_size=90))
    live = [x for x, place in enumerate(places) if place == "L"]
    token = st.sampled_from([*OTHER_TOKENS, *live])
    return PartBand(
        places=places,
        grows_up=draw(st.booleans()),
        page_size=draw(st.sampled_from([1, 2, 3, 16])),
        cap=draw(st.sampled_from([0, 1, 3, 4096])),
        written=draw(st.none() | st.lists(token, min_size=1, max_size=20).map(tuple)),
        is_void=draw(st.sampled_from([None, False, True])),
        most_live=draw(st.sampled_from([0, 0, 5])),
        # A list has a row at least.
        padding=draw(st.sampled_from([0, 1, 40])) if "." in places else draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 1000)),
        lead=draw(st.integers(1, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(part_bands(), st.sampled_from([2, 4, 16, 1024]))
def test_any_band(band: PartBand, block: int) -> None:
    expect_same_in_part(band, TritonFlush, block=block)


@pytest.mark.parametrize("grows_up", [True, False])
def test_more_blocks_than_are_added_up_at_a_time(grows_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgent_plan, "SUMS", 2)
    band = PartBand(".." + "LL.-" * 15, grows_up, written=(45,))
    assert expect_same_in_part(band, TritonFlush, block=4)["moves"] > 8


GUARD = 64


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("grows_up", [True, False])
def test_numbers_of_a_frozen_pool_that_may_be_anything_lead_nowhere(
    grows_up: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored is all over the plan and nowhere else, and what is loaded does not come from beside a list."""
    band = PartBand("L.-L..L." * 3, grows_up, written=(6,), is_frozen=True, padding=12)
    made, reference = band.pool(TritonFlush, "cpu", block=block), band.pool(TorchFlush, "cpu")
    guarded: list[torch.Tensor] = []

    def empty(size: int, **kind: Any) -> torch.Tensor:
        guarded.append(torch.full((size + 2 * GUARD,), -7, **kind))
        return guarded[-1][GUARD:-GUARD]

    window, holes, rows, written, _ = band.arguments(made)
    length = holes.ascending.shape[0]
    beside = torch.full((length + 2 * GUARD,), -9)
    ascending = beside[GUARD : GUARD + length].copy_(holes.ascending)
    for count in (0, -1, -20, length, length + 1, length + 20, 2**40, -(2**40)):
        wrong = Holes(ascending, torch.tensor(count))
        expected = reference.ops.plan_in_part(window, wrong, rows, written)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            plan = made.ops.plan_in_part(window, wrong, rows, written)
        assert all((each[:GUARD] == -7).all() and (each[-GUARD:] == -7).all() for each in guarded)
        moves = int(plan.moves)
        for name in ("moves", "touching", "unfilled", "free", "mark"):
            assert getattr(plan, name) == getattr(expected, name), (count, name)
        for name in ("src_pages", "dst_pages"):
            assert torch.equal(getattr(plan, name)[:moves], getattr(expected, name)[:moves]), (count, name)
        assert -9 not in plan.holes and -7 not in plan.holes
    assert len(guarded) == 8


@pytest.mark.parametrize(("places", "launches"), [("L." * 32, 1), ("L." * 32 + ".", 3)])
def test_a_plan_is_launches_and_nothing_else(
    places: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Any, Any, dict[str, Any]]] = []
    # With a list of holes that is longer than a block either way.
    band = PartBand(places, padding=70, written=(20,), is_void=False)
    made = band.pool(TritonFlush, "cpu", block=64)
    window, holes, rows, written, is_void = band.arguments(made)
    assert written is not None
    tokens = written.contiguous()
    with monkeypatch.context() as patch:
        for name in PART_KERNELS:
            patch.setattr(part_plan, name, Recorder(getattr(part_plan, name), launched))
        with OnlyMemory():
            plan = made.ops.plan_in_part(window, holes, rows, tokens, is_void)
    assert len(launched) == launches
    for kernel, grid, arguments in launched:
        kernel[grid](**arguments)
    assert plan.moves == 10 and plan.src_pages[:10].tolist() == list(range(made.mark - 1, made.mark - 20, -2))
