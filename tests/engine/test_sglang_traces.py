"""kvtape's allocator and SGLang's do the same on the traces that they are timed on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replayer.bench import kvtape_candidate, measure, sglang_candidate
from replayer.bench_calls import check_equal, load_calls
from replayer.targets_sglang import (
    ALLOCATOR_MODULE,
    import_sglang,
    remove_cpu_stand_ins,
    sglang_version,
    without_profiler_ranges,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() is None, reason="SGLang is not installed (tools/build_sglang_env.sh)"
    ),
]

TRACES = Path(__file__).parents[2] / "traces"
#: Calls of a trace that are compared; None is all of them. The Kimi trace takes minutes.
LIMITS = {
    "sglang_tiny_swa_p1": None,
    "sglang_tiny_swa_p16": None,
    "sglang_smollm2_swa_p16": None,
    "kimi_gb200": 20_000,
}


@pytest.fixture(autouse=True)
def stand_ins_do_not_outlive_a_test() -> Iterator[None]:
    yield
    remove_cpu_stand_ins()


@pytest.mark.parametrize("name", LIMITS)
def test_every_call_and_the_last_state_are_equal(name: str) -> None:
    calls = load_calls(TRACES / f"{name}.msgpack.zst", LIMITS[name])
    candidates = [kvtape_candidate("kvtape", "batched"), sglang_candidate()]
    check_equal({candidate.name: candidate.build(calls.header) for candidate in candidates}, calls)


def test_both_are_measured() -> None:
    candidates = [
        kvtape_candidate("kvtape", "batched"),
        sglang_candidate(),
        sglang_candidate(profiler_ranges=False),
    ]
    measured = measure(TRACES / "sglang_tiny_swa_p1.msgpack.zst", candidates, rounds=1, limit=500)
    assert measured.ratio("kvtape batched", "sglang").median > 0
    assert measured.ratio("kvtape batched", "sglang without ranges").median > 0


def test_profiler_ranges_are_left_out_inside_the_block_only() -> None:
    allocators = import_sglang(ALLOCATOR_MODULE)
    assert allocators.record_function is torch.profiler.record_function
    with without_profiler_ranges():
        assert allocators.record_function is not torch.profiler.record_function
        with allocators.record_function("MultiEndedAlloc.alloc"):
            pass
    assert allocators.record_function is torch.profiler.record_function
