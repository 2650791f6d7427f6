"""Synchronisations inside allocator calls by three counts that have to agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.verdicts import Results
from recorder.trace import Chunk, TraceReader
from replayer.calling import MoveLog
from replayer.drive import Driver
from replayer.hazards import Hazards
from replayer.ledger.three_counts import Counted, ThreeCounts
from replayer.targets import TargetOptions, build_pools

REPOSITORY = Path(__file__).resolve().parents[2]
#: Name of the trace and events driven of it; every event is some dozens of entries in the profiler's memory.
TRACES = (("sglang_tiny_swa_p16", 1200), ("sglang_server_smollm2", 1200), ("kimi_gb200", 1500))
#: Of a trace's flushes, those that may wait for a number that capacity depends on.
MOST_BLOCKING_READS = 0.01


class UncountedMoves(MoveLog):
    """A `MoveLog` that asks the device nothing: reading how many pages moved would make every late number arrive."""

    def moved_pages(self, pool: str) -> int:
        return 0

    def moved(self, pool: str, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None: ...


# -- that the counts themselves work here


def _known(device: str) -> list[tuple[str, Callable[[], Any], tuple[int, int, int]]]:
    """What is done, and what ledger, warnings and profiler have to say of it."""
    tensor = torch.arange(8, device=device)
    doubled = torch.tensor([1, 1, 2, 3], device=device)
    on_cuda = torch.device(device).type == "cuda"
    pinned = torch.empty(8, dtype=torch.int64, device="cpu", pin_memory=on_cuda)

    def wait_for_event() -> None:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    return [
        ("kernels only", lambda: tensor.index_select(0, tensor).cumsum(0).sort(), (0, 0, 0)),
        ("item", lambda: tensor[0].item(), (1, 1, 1)),
        ("tolist", lambda: tensor.tolist(), (1, 1, 1)),
        ("nonzero", lambda: tensor.nonzero(), (1, 1, 1)),
        ("unique", lambda: doubled.unique(), (1, 1, 1)),
        ("a list to the device", lambda: torch.tensor([1, 2, 3], device=device), (1, 1, 1)),
        ("copy to pinned memory, not blocking", lambda: pinned.copy_(tensor, non_blocking=True), (0, 0, 0)),
        ("wait for an event", wait_for_event, (1, 0, 1)),
    ]


def check_counts(results: Results, device: str, strategies: list[str], until: int | None) -> None:
    """First on operations whose cost is known, then on every call of the first events of three traces."""
    if torch.device(device).type != "cuda":
        reason = "needs CUDA: a CPU neither warns of synchronisations nor has a runtime to profile"
        results.add("three counts of known operations", None, reason)
    else:
        _check_known(results, device)
    for name, events in TRACES:
        for strategy in strategies:
            if results.has_time(f"counting of {name}, {strategy}", 5.0 if until is None else 0.0):
                _check_trace(results, name, strategy, device, until or events)


def _check_known(results: Results, device: str) -> None:
    known = _known(device)
    for _, work, _ in known:
        work()  # what is done once only is done before it counts
    three = ThreeCounts(device)
    with three.session():
        for name, work, _ in known:
            with three.call(name):
                work()
    three.close()
    wrong = []
    for counted, (name, _, expected) in zip(three.calls, known, strict=True):
        found = (counted.ledger, counted.warned, counted.runtime)
        results.row(
            "known operations",
            operation=name,
            ledger=found[0],
            warnings=found[1],
            profiler=found[2],
            expected=str(expected),
        )
        if found != expected:
            wrong.append(f"{name}: {found} instead of {expected} ({counted.runtime_calls})")
    results.add(
        "three counts of known operations",
        not wrong,
        "; ".join(wrong) or f"{len(known)} as expected",
        "ledger, warnings, profiler",
    )


def drive(name: str, strategy: str, device: str, until: int) -> tuple[list[Counted], int]:
    """Every call of the first events of a trace, counted, and how often an allocator waited for a number it could not do without."""
    three = ThreeCounts(device)
    hazards = Hazards()
    moves = UncountedMoves(hazards.log)
    with TraceReader(REPOSITORY / "traces" / f"{name}.msgpack.zst") as reader:
        pools = build_pools(reader.header, TargetOptions(strategy=strategy, device=device, kv="stamp"), moves)
        driver = Driver(pools, hazards, moves, checks=None, ledger=three, ids="recorded")  # type: ignore[arg-type]
        with three.session():
            for item in reader.items():
                if isinstance(item, Chunk) and not driver.drive(item, until):
                    break
    three.close()
    blocking = sum(getattr(state.allocator, "blocking_reads", 0) for state in pools.values())
    return three.calls, blocking


def _check_trace(results: Results, name: str, strategy: str, device: str, until: int) -> None:
    calls, blocking = drive(name, strategy, device, until)
    flushes = [counted for counted in calls if counted.kind == "_flush"]
    outside = [counted for counted in calls if counted.kind not in ("_flush", "flush")]
    for what, counted in (("flushes", flushes), ("other calls", outside)):
        results.row(
            "synchronisations", trace=name, strategy=strategy, calls=what, count=len(counted),
            ledger=sum(each.ledger for each in counted), warnings=_sum(counted, "warned"), profiler=_sum(counted, "runtime"),
            blocking_reads=blocking, differing=_differing(counted),
        )  # fmt: skip
    label = f"{name}, {strategy}"
    measured = [each for each in calls if each.agrees is not None]
    if torch.device(device).type != "cuda":
        results.add(f"three counts agree, {label}", None, "needs CUDA; the ledger alone counts here")
    elif len(measured) != len(calls):
        results.add(
            f"three counts agree, {label}",
            False,
            f"the profiler has only {len(measured):,} of {len(calls):,} calls",
            "all of them",
        )
    else:
        wrong = [each for each in measured if not each.agrees]
        found = f"{len(calls):,} calls" if not wrong else "; ".join(_difference(each) for each in wrong[:3])
        results.add(f"three counts agree, {label}", not wrong, found, "no call on which they differ")
    if strategy != "device":
        return
    # Calls inside calls are counted in both.
    outermost = [each for each in calls if each.kind != "_flush"]
    ledger, warned, runtime = (
        sum(each.ledger for each in outermost),
        _sum(outermost, "warned"),
        _sum(outermost, "runtime"),
    )
    # A blocking read waits for an event, of which torch has no warning.
    counts = [ledger - blocking, warned, None if runtime is None else runtime - blocking]
    shown = " / ".join("not measured" if count is None else str(count) for count in counts)
    found = f"{shown} and {blocking} blocking reads in {len(flushes)} flushes"
    is_cuda = torch.device(device).type == "cuda"
    allowed = blocking <= MOST_BLOCKING_READS * len(flushes)
    held = not any(counts) and allowed and not (is_cuda and None in counts)
    results.add(
        f"no synchronisation, {label}",
        held,
        found,
        "0 by every count, blocking reads in 1 of 100 flushes at most",
    )


def _sum(counted: list[Counted], name: str) -> int | None:
    values = [getattr(each, name) for each in counted]
    return None if any(value is None for value in values) else sum(values)


def _differing(counted: list[Counted]) -> int | None:
    verdicts = [each.agrees for each in counted]
    return None if any(verdict is None for verdict in verdicts) else sum(not verdict for verdict in verdicts)


def _difference(each: Counted) -> str:
    return (
        f"event {each.seq}, {each.kind}: ledger {each.ledger} ({each.unwarned} without a warning), warnings {each.warned}, "
        f"profiler {each.runtime} {each.runtime_calls}"
    )
