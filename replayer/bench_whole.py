"""Whole replays and the trace file itself, measured in one run: checks against the time inside the allocator, reading, size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns

from recorder.trace import Chunk, TraceReader
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions


@dataclass(frozen=True)
class WholeReplay:
    """Medians over rounds for one trace.

    Attributes:
        inside_seconds: time inside allocator calls and KV bytes in a replay with neither checks nor ledger.
        checked, counted: wall time of a replay with all checks, and with all checks and the sync ledger, each as a multiple of the
            time inside the allocator of the same round.
        file_bytes, events: of the trace.
        columns_per_second, everything_per_second: events read into arrays, without and with all id lists expanded.
    """

    trace: str
    inside_seconds: float
    checked: float
    counted: float
    file_bytes: int
    events: int
    columns_per_second: float
    everything_per_second: float


def measure_whole(path: Path, rounds: int, strategy: str, after_turn: Callable[[], object]) -> WholeReplay:
    """Replay ``path`` three ways in each of ``rounds`` rounds after one to warm up, then read it.

    Raises:
        TraceError, UsageError: as `replayer.replay.replay`.
    """
    target = TargetOptions(strategy=strategy)
    bare = ReplayOptions(path, target, None, ledger=False)
    checked = ReplayOptions(path, target, CheckOptions(), ledger=False)
    counted = ReplayOptions(path, target, CheckOptions(), ledger=True)
    inside, checks_ratio, ledger_ratio = [], [], []
    for round_number in range(rounds + 1):
        outcome = replay(bare)
        nanoseconds = sum(outcome.nanoseconds.values())
        walls = [replay(options).wall_nanoseconds for options in (checked, counted)]
        after_turn()
        if round_number:
            inside.append(nanoseconds / 1e9)
            checks_ratio.append(walls[0] / nanoseconds)
            ledger_ratio.append(walls[1] / nanoseconds)
    events, columns = _reading(path, rounds, lambda chunk: None)
    _, everything = _reading(path, rounds, _expand)
    return WholeReplay(
        path.name,
        median(inside),
        median(checks_ratio),
        median(ledger_ratio),
        path.stat().st_size,
        events,
        events / columns,
        events / everything,
    )


def _reading(path: Path, rounds: int, use: Callable[[Chunk], object]) -> tuple[int, float]:
    """Number of events, and median seconds to read them and ``use`` each chunk."""
    seconds: list[float] = []
    events = 0
    for _ in range(2 * rounds + 1):
        begin, events = perf_counter_ns(), 0
        with TraceReader(path) as reader:
            for chunk in reader.chunks():
                events += len(chunk)
                use(chunk)
        seconds.append((perf_counter_ns() - begin) / 1e9)
    return events, median(seconds[1:])


def _expand(chunk: Chunk) -> Sequence[object]:
    return chunk.list0, chunk.list1, chunk.list2, chunk.result, chunk.queries
