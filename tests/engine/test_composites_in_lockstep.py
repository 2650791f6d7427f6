"""Our composites against SGLang's: the same answers, tables, frontiers, lists and sizes after every call of seeded programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import STRATEGIES
from replayer.targets_sglang import sglang_version
from tests.allocator.composite_digests import FILE, of_sglang
from tests.allocator.composite_program import Program, our_composite
from tests.engine.composites import LAYOUTS, composite

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23", reason="SGLang 0.5.23 is not installed (tools/build_sglang_env.sh)"
    ),
    pytest.mark.usefixtures("sglang_on_a_cpu"),
]

STEPS = 120


def run(program: Program) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    for _ in range(STEPS):
        yield program.step(), program.sizes(), program.places()


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ours_answer_and_place_as_sglangs_do(layout: str, page_size: int, lazy: bool) -> None:
    seed = 1000 + page_size
    theirs = Program(composite(layout, page_size, lazy=lazy), seed)
    assert not theirs.is_ours
    expected = list(run(theirs))
    assert len(theirs.counts) >= 10 and (theirs.refused or layout == "full and mamba" or lazy)
    for strategy in STRATEGIES:
        ours = Program(our_composite(layout, page_size, lazy=lazy, strategy=strategy), seed)
        assert ours.is_ours
        for number, (found, wanted) in enumerate(zip(run(ours), expected, strict=True)):
            assert found == wanted, (strategy, number)
        assert ours.counts == theirs.counts


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_a_window_pool_of_cheaper_pages(lazy: bool) -> None:
    """Fewer ids than window pages."""
    expected = list(run(Program(composite(LAYOUTS[0], 4, lazy=lazy, layers=(3, 1)), 4)))
    ours = Program(our_composite(LAYOUTS[0], 4, lazy=lazy, strategy="batched", layers=(3, 1)), 4)
    for number, (found, wanted) in enumerate(zip(run(ours), expected, strict=True)):
        assert found == wanted, number


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_public_name_of_sglangs_is_there_or_known_to_be_the_engines(layout: str) -> None:
    theirs, ours = composite(layout, 4, lazy=True), our_composite(layout, 4, lazy=True, strategy="batched")
    public = {name for name in dir(theirs) if not name.startswith("_")}
    missing = {name for name in public if not hasattr(ours, name)}
    assert missing <= THE_ENGINES, missing - THE_ENGINES


#: What makes objects of the scheduler or reads the server's settings, static pools' lists, and parts of other classes that these inherit.
THE_ENGINES = {
    "create_prefill_budget", "max_new_tokens_for_memory", "merge_and_sort_free", "resize", "free_page_reps_group",
    "full_page_reps_group", "full_free_group", "swa_req_ring", "swa_ring_cost_tokens",
}  # fmt: skip


def test_the_recorded_digests_are_sglangs() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == of_sglang()
