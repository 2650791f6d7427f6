"""Room out of a prefix cache: ours asks it for as much as SGLang's does, in the same order, and ends where SGLang's ends."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from allocator import STRATEGIES
from allocator.composites.evictions import EvictParams
from replayer.targets_sglang import remove_cpu_stand_ins, sglang_version
from tests.allocator.cached_program import CachedProgram
from tests.allocator.composite_program import our_composite
from tests.engine.composites import LAYOUTS, composite

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23", reason="SGLang 0.5.23 is not installed (tools/build_sglang_env.sh)"
    ),
]

STEPS, SEED = 150, 6


@pytest.fixture(autouse=True)
def stand_ins_do_not_outlive_a_test() -> Iterator[None]:
    yield
    remove_cpu_stand_ins()


def run(program: CachedProgram) -> Iterator[Any]:
    for _ in range(STEPS):
        yield program.step(), program.sizes(), program.places()


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("layout", "prefer_swa"), [*((layout, False) for layout in LAYOUTS), ("full and swa", True)]
)
def test_both_ask_for_the_same_and_end_alike(
    layout: str, prefer_swa: bool, page_size: int, lazy: bool, set_up_server: Callable[..., None]
) -> None:
    set_up_server(role="decode" if prefer_swa else "null")
    theirs = CachedProgram(composite(layout, page_size, lazy=lazy), SEED)
    expected = list(run(theirs))
    asked = theirs.cache.asked
    assert len(asked) >= 5 and sum(map(sum, asked)) > 0
    # States are asked for last, and only where they lie beside a float.
    assert any(states for _, _, states, *_ in asked) == (layout == "full, swa and mamba")
    for strategy in STRATEGIES:
        made = our_composite(layout, page_size, lazy=lazy, strategy=strategy)
        if prefer_swa:
            made.prefer_swa_reclaim = True
        ours = CachedProgram(made, SEED)
        for number, (found, wanted) in enumerate(zip(run(ours), expected, strict=True)):
            assert found == wanted, (strategy, number)
        assert ours.cache.asked == theirs.cache.asked


def test_what_is_asked_has_sglangs_names() -> None:
    theirs = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache").EvictParams
    fields = [(field.name, field.default) for field in dataclasses.fields(EvictParams)]
    assert fields == [(field.name, field.default) for field in dataclasses.fields(theirs)]
