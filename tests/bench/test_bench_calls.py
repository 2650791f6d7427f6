"""A trace becomes exactly the calls it holds, candidates are compared call by call, and what is timed is only the calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recorder.trace import EventKind, TraceWriter
from replayer.bench import kvtape_candidate
from replayer.bench_calls import (
    KERNEL_KINDS,
    CallList,
    RecordedEvent,
    ResultsDiffer,
    Timing,
    check_equal,
    load_calls,
    time_calls,
)
from replayer.errors import UsageError
from tests.scenario import TWO_ENDS, PoolShape, Scenario, header_for

pytestmark = pytest.mark.cpu


def fresh(calls: CallList, strategy: str = "batched") -> dict[str, Any]:
    return dict(kvtape_candidate("kvtape", strategy).build(calls.header))


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "small.msgpack.zst")


class Spy:
    """Stands where an allocator stands, and writes down its calls."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self._name, self._log = name, log
        self.disagg_move_gate: Callable[[], bool] | None = None

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("__"):
            raise AttributeError(method)

        def called(*arguments: Any, **keywords: Any) -> None:
            plain = [value.tolist() if isinstance(value, torch.Tensor) else value for value in arguments]
            named = {
                name: value.tolist() if isinstance(value, torch.Tensor) else value
                for name, value in keywords.items()
            }
            self._log.append((self._name, method, plain, named))

        return called


def spied(calls: CallList) -> list[tuple[Any, ...]]:
    log: list[tuple[Any, ...]] = []
    time_calls({pool.name: Spy(pool.name, log) for pool in calls.header.pools}, calls)
    return log


def test_every_call_is_made_once_in_order_with_its_arguments(scenario: Scenario) -> None:
    first = scenario.alloc("full", 4)
    assert first is not None
    scenario.alloc_with_virtual("swa", first[:2])
    scenario.free_segment("swa", first[:2], 0)
    scenario.free_group_begin("full")
    scenario.free("full", first[1:3])
    scenario.free_group_end("full")
    scenario.flush("full", urgent=True)
    scenario.flush("full")
    assert spied(load_calls(scenario.close())) == [
        ("full", "alloc", [4], {}),
        ("swa", "alloc_with_virtual", [first[:2]], {}),
        ("swa", "clear_inverse_history", [], {}),
        ("swa", "free_segment", [first[:2]], {"start_pos": 0}),
        ("full", "free_group_begin", [], {}),
        ("full", "clear_inverse_history", [], {}),
        ("full", "free", [first[1:3]], {}),
        ("full", "clear_inverse_history", [], {}),
        ("full", "free_group_end", [], {}),
        ("full", "flush_for_allocation", [], {}),
        ("full", "flush_opportunistic", [], {}),
    ]


def test_growing_requests_carry_device_and_host_lengths(tmp_path: Path) -> None:
    scenario = Scenario(
        tmp_path / "grow.msgpack.zst",
        (PoolShape("full", "down", page_size=4), PoolShape("state", "up", "mamba")),
        total_bytes=64 * 256,
    )
    grown = scenario.alloc_extend("full", [0], [6], [-1])
    assert grown is not None
    scenario.alloc_decode("full", [7], [grown[-1]])
    extend, decode = spied(load_calls(scenario.close()))
    assert extend == ("full", "alloc_extend", [[0], [0], [6], [6], [-1], 6, None], {})
    assert decode == ("full", "alloc_decode", [[7], [7], [grown[-1]]], {})


def test_a_float_is_asked_by_side(tmp_path: Path) -> None:
    shapes = (PoolShape("up", "up"), PoolShape("middle", "float"), PoolShape("down", "down"))
    scenario = Scenario(tmp_path / "float.msgpack.zst", shapes)
    scenario.alloc("middle", 3)
    scenario.make_room("middle", "low", 64)
    scenario.compact_holes("middle", "high")
    assert [entry[1:] for entry in spied(load_calls(scenario.close()))] == [
        ("alloc", [3], {}),
        ("make_room", [], {"side": "low", "min_bytes": 64}),
        ("compact_holes", [], {"retreat_side": "high"}),
    ]


def test_forwards_become_the_two_calls_and_finish_untimed(scenario: Scenario) -> None:
    tokens = scenario.alloc("full", 2)
    assert tokens is not None
    scenario.forward_begin("full", 7, writes=tokens)
    scenario.forward_done(7)
    scenario.flush("full")
    calls = load_calls(scenario.close())
    assert [call.method for call in calls.calls] == [
        "alloc",
        "set_latest_forward_done_event",
        "set_inflight_forward",
        "flush_opportunistic",
    ]
    event = calls.events[7]
    assert calls.calls[1].arguments == (event,)
    assert calls.calls[2].arguments[0] is event
    assert calls.calls[2].arguments[1].tolist() == tokens
    assert not event.query()
    for action in calls.calls[3].before:
        action()
    assert event.query()
    calls.reset()
    assert not event.query()


def test_marks_and_leases_call_nothing_and_nested_events_are_left_to_their_callers(
    scenario: Scenario,
) -> None:
    scenario.alloc("full", 1)
    scenario.lease_begin(1, "full", [3])
    scenario.write(EventKind.LEASE_END, "full", value=1)
    scenario.write(EventKind.MARK, None, value=1)
    scenario.write(EventKind.FLUSH, "swa", 0, value=1, depth=1)
    scenario.alloc("full", 1)
    calls = load_calls(scenario.close())
    assert [(call.seq, call.method) for call in calls.calls] == [(0, "alloc"), (5, "alloc")]


def test_limit_takes_the_first_calls(scenario: Scenario) -> None:
    for size in (1, 2, 3):
        scenario.alloc("full", size)
    path = scenario.close()
    assert [call.arguments for call in load_calls(path, 2).calls] == [(1,), (2,)]
    assert len(load_calls(path, 9).calls) == 3


def test_a_trace_without_calls_cannot_be_timed(scenario: Scenario) -> None:
    scenario.write(EventKind.MARK, None, value=1)
    with pytest.raises(UsageError, match="no allocator call"):
        load_calls(scenario.close())


def test_ids_of_another_placement_rule_are_refused(tmp_path: Path) -> None:
    header = header_for(TWO_ENDS, 64 * 64)
    header.settings["placement"] = "free"
    path = tmp_path / "free.msgpack.zst"
    with TraceWriter(path, header) as writer:
        writer.append(EventKind.ALLOC, pool=0, time_us=0, value=1, result=[1])
    with pytest.raises(UsageError, match="placement"):
        load_calls(path)


def test_an_event_answers_as_recorded_for_the_call_and_then_as_it_did_last() -> None:
    event = RecordedEvent()
    assert event.query() is False
    event.expect((True, False))
    assert [event.query() for _ in range(3)] == [False, True, True]
    event.reset()
    assert event.query() is False
    event.finish()
    assert event.query() is True
    event.wait()


def test_recorded_answers_steer_the_flush(scenario: Scenario) -> None:
    tokens = scenario.alloc("full", 4)
    assert tokens is not None
    scenario.forward_begin("full", 3, writes=None)
    scenario.free("full", tokens[2:])
    assert scenario.flush("full") == 2
    # The moved pages wait for event 3. This flush asked, and was told that it had fired.
    scenario.events[3].fired = True
    scenario.pools["full"].flush_opportunistic()
    scenario.write(EventKind.FLUSH, "full", 0, value=0, queries=[(3, True)])
    calls = load_calls(scenario.close())
    pools = fresh(calls)
    time_calls(pools, calls)
    assert not pools["full"]._pending_reuse_pages_cpu
    assert calls.events[3].done


def test_a_shut_gate_is_shut_for_every_pass(scenario: Scenario) -> None:
    tokens = scenario.alloc("full", 4)
    assert tokens is not None
    scenario.free("full", tokens[2:])
    scenario.move_gate(is_open=False)
    assert scenario.flush("full", urgent=True) == 0
    scenario.move_gate(is_open=True)
    assert scenario.flush("full", urgent=True) == 2
    calls = load_calls(scenario.close())
    for _ in range(2):
        check_equal({"one": fresh(calls), "other": fresh(calls, "per-row")}, calls)


def test_timing_counts_every_call_under_its_kind(scenario: Scenario) -> None:
    tokens = scenario.alloc("full", 4)
    assert tokens is not None
    scenario.free("full", tokens[:1])
    scenario.free("full", tokens[1:2])
    scenario.flush("full", urgent=True)
    calls = load_calls(scenario.close())
    timing = time_calls(fresh(calls), calls)
    assert timing.calls == {EventKind.ALLOC: 1, EventKind.FREE: 2, EventKind.FLUSH: 1}
    assert timing.nanoseconds.keys() == timing.calls.keys()
    assert all(spent > 0 for spent in timing.nanoseconds.values())
    assert gc.isenabled()


def test_totals_leave_kinds_out() -> None:
    timing = Timing({EventKind.ALLOC: 5, EventKind.ALLOC_EXTEND: 70, EventKind.ALLOC_DECODE: 900}, {})
    assert timing.total() == 975
    assert timing.total(without=KERNEL_KINDS) == 5


def test_a_result_other_than_the_recorded_one_is_named(scenario: Scenario) -> None:
    scenario.alloc("full", 2)
    scenario.write(EventKind.ALLOC, "full", torch.tensor([60, 61]), value=2)
    calls = load_calls(scenario.close())
    with pytest.raises(
        ResultsDiffer,
        match=r"event 1, alloc on pool 'full': ours answers 2 ids .* the trace has 2 ids \[60, 61\]",
    ):
        check_equal({"ours": fresh(calls)}, calls)


def test_candidates_that_answer_differently_are_named(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "unrecorded.msgpack.zst", results=False)
    scenario.alloc("full", 2)
    calls = load_calls(scenario.close())
    used = fresh(calls)
    used["full"].alloc(1)
    with pytest.raises(ResultsDiffer, match=r"event 0, .*: used answers .*, ours has"):
        check_equal({"ours": fresh(calls), "used": used}, calls)


def test_candidates_that_end_up_differently_are_named(scenario: Scenario) -> None:
    scenario.alloc("full", 2)
    calls = load_calls(scenario.close())
    used = fresh(calls)
    used["swa"].alloc(1)
    with pytest.raises(ResultsDiffer, match=r"after the last call, .* is not the same in used and ours"):
        check_equal({"ours": fresh(calls), "used": used}, calls)


def test_a_method_that_is_missing_is_a_usage_error(scenario: Scenario) -> None:
    scenario.alloc("full", 2)
    calls = load_calls(scenario.close())
    with pytest.raises(UsageError, match="object has no method alloc"):
        time_calls({"full": object(), "swa": object()}, calls)
