"""`tools/drive_sglang.py` makes the calls of `traces/kimi_gb200`, one by one.

`data/mooncake_conversation_170.jsonl.zst` is the first 170 lines of the conversation log published with Mooncake (kvcache-ai/Mooncake,
FAST25-release/traces, Apache-2.0): enough to evict, to flush urgently and to refuse state slots.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from replayer.bench_calls import NOT_RECORDED, Call, load_calls
from replayer.targets_sglang import remove_cpu_stand_ins, sglang_version

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23" or find_spec("openai") is None,
        reason="SGLang 0.5.23 with its scheduler is not installed (tools/build_sglang_env.sh)",
    ),
]

REPOSITORY = Path(__file__).parents[2]
REQUESTS = 170
WORKLOAD = Path(__file__).parent / "data" / f"mooncake_conversation_{REQUESTS}.jsonl.zst"


@pytest.fixture
def drive_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    monkeypatch.delenv("KVTAPE_RECORD", raising=False)
    path = list(sys.path)
    import drive_sglang

    yield drive_sglang
    sys.path[:] = path
    remove_cpu_stand_ins()


def build(drive_sglang: Any, **settings: Any) -> tuple[Any, Any, Any]:
    """The parts, their allocators by pool, and a driver that has not begun."""
    from drive.sglang_parts import Parts

    chosen = drive_sglang.Settings(**settings)
    workload = drive_sglang.read_workload(WORKLOAD, REQUESTS)
    assert len(workload) == REQUESTS
    parts = Parts(max_running=chosen.max_running, max_tokens=200_000)
    driver = drive_sglang.Driver(parts, workload, chosen, drive_sglang.SimulatedClock())
    return parts, {"full": parts.full, "mamba": parts.states}, driver


def ids(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class Heard:
    """A call as it was made: pool, method, the id tensors among its arguments, its result."""

    def __init__(
        self, pool: str, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        given = [*arguments, *keywords.values()]
        self.call = pool, method, [ids(value) for value in given if isinstance(value, torch.Tensor)]
        self.result = ids(result)


def listen(allocators: dict[str, Any], methods: tuple[str, ...]) -> list[Heard]:
    """The list in which every outermost call on the allocators will be, but flushes of nothing."""
    heard: list[Heard] = []
    inside = [False]

    def wrap(pool: str, allocator: Any, method: str) -> None:
        original = getattr(allocator, method)

        def call(*arguments: Any, **keywords: Any) -> Any:
            nothing_to_do = allocator._free_phys_pages.numel() == 0 and not allocator._pending_reuse
            if inside[0] or (method == "flush_opportunistic" and nothing_to_do):
                return original(*arguments, **keywords)
            inside[0] = True
            try:
                result = original(*arguments, **keywords)
            finally:
                inside[0] = False
            heard.append(Heard(pool, method, arguments, keywords, result))
            return result

        setattr(allocator, method, call)

    for pool, allocator in allocators.items():
        for method in methods:
            wrap(pool, allocator, method)
    return heard


def calls_before_request(number: int) -> list[Call]:
    """The calls of the trace up to the one that gives request ``number`` its state slot."""
    calls = load_calls(REPOSITORY / "traces" / "kimi_gb200.msgpack.zst", 20_000).calls
    slots = 0
    for index, call in enumerate(calls):
        if (call.pool, call.method) == ("mamba", "alloc") and call.recorded is not None:
            if slots == number:
                return calls[:index]
            slots += 1
    raise AssertionError(f"the trace's first {len(calls)} calls have no request {number}")


def test_every_call_is_the_traces(drive_sglang: Any) -> None:
    _, allocators, driver = build(drive_sglang)
    heard = listen(allocators, drive_sglang.CallCounter.METHODS)
    driver.run()
    expected = calls_before_request(REQUESTS)
    assert len(heard) > len(expected) > 10_000
    for call, made in zip(expected, heard, strict=False):
        given = [*call.arguments, *call.keywords.values()]
        wanted = call.pool, call.method, [ids(value) for value in given if isinstance(value, torch.Tensor)]
        assert made.call == wanted, f"event {call.seq}"
        if call.recorded is not NOT_RECORDED:
            assert made.result == ids(call.recorded), f"event {call.seq}: {call.method}"
    refused = [made for made in heard[: len(expected)] if made.call[1] == "alloc" and made.result is None]
    assert refused


@pytest.mark.parametrize("split_prompts", [False, True])
def test_a_run_is_deterministic_and_keeps_what_it_should(drive_sglang: Any, split_prompts: bool) -> None:
    ended = []
    for _ in range(2):
        parts, allocators, driver = build(drive_sglang, split_prompts=split_prompts, cached_states=30)
        counter = drive_sglang.CallCounter(allocators)
        driver.run()
        ended.append((dict(counter.calls), counter.digests()))
        assert driver.requests_done == REQUESTS
        # All that is left is what the tree holds and the states of cached conversations.
        assert parts.full.allocated_count() == parts.tree.full_evictable_size()
        assert parts.states.allocated_count() == 30
        assert parts.composite.verify_byte_accounting() == []
        assert counter.calls["full", "pages moved"] > 0
    assert ended[0] == ended[1]


def test_an_idle_service_finishes_its_forward(drive_sglang: Any) -> None:
    """A request that comes long after the last one is done finds no forward in flight."""
    parts, _, driver = build(drive_sglang)
    first = driver._waiting.popleft()
    driver._waiting.clear()
    driver._waiting.append(first)
    driver._waiting.append(
        drive_sglang.LoggedRequest(1, 100_000, first.input_length, 1, [*first.blocks[:-1], 10_000])
    )
    seen = []
    extend = parts.extend
    parts.extend = lambda req: (
        seen.append((req.prefix_len, driver._in_flight and driver._in_flight.query())),
        extend(req),
    )
    driver.run()
    assert driver._clock.microseconds() == 100_025_000
    shared = (first.input_length - 1) // drive_sglang.BLOCK_TOKENS * drive_sglang.BLOCK_TOKENS
    assert seen == [(0, None), (shared, True)]
