"""Allocators against each other on the same calls, in one process, in turns.

Machines differ, and one machine differs from minute to minute, so no time is reported on its own account: candidates take turns, round
by round, each on fresh pools, and what counts is the ratio within a round. The order of turns changes from round to round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from recorder.trace import EventKind, Header
from replayer.bench_calls import KERNEL_KINDS, CallList, NoBytes, Timing, check_equal, load_calls, time_calls

#: What the name of every candidate of SGLang's begins with.
SGLANG: Final = "sglang"


@dataclass(frozen=True)
class Candidate:
    """Something to measure: a name, what builds its pools (by pool name, fresh) from a header, and what is in force while it runs."""

    name: str
    build: Callable[[Header], Mapping[str, Any]]
    around: Callable[[], AbstractContextManager[None]] = nullcontext


class Spread(NamedTuple):
    """Median, least and greatest of the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Measurement:
    """Timings of one trace: ``timings[candidate][round]``."""

    trace: str
    call_count: int
    timings: Mapping[str, Sequence[Timing]]

    @property
    def kinds(self) -> dict[EventKind, int]:
        """Calls by kind."""
        first = next(iter(self.timings.values()))[0]
        return first.calls

    def nanoseconds(self, candidate: str, kind: EventKind | None = None) -> Spread:
        """Time inside calls of one kind in one pass; without a kind, of all that count (`KERNEL_KINDS` do not)."""
        return _spread([_of(timing, kind) for timing in self.timings[candidate]])

    def ratio(self, candidate: str, reference: str, kind: EventKind | None = None) -> Spread:
        """``candidate``'s time over ``reference``'s, within each round."""
        pairs = zip(self.timings[candidate], self.timings[reference], strict=True)
        return _spread([_of(ours, kind) / max(1, _of(theirs, kind)) for ours, theirs in pairs])


def kvtape_candidate(allocator: str, strategy: str) -> Candidate:
    """An allocator by the name `replay` knows it by, with one lookup strategy."""

    def build(header: Header) -> Mapping[str, Any]:
        from replayer import targets

        targets.check_claims(header)
        options = targets.TargetOptions(allocator=allocator, strategy=strategy)
        stores: dict[str, Any] = {pool.name: NoBytes() for pool in header.pools}
        return targets.build_allocators(header, options, targets.build_buffer(header, "meta"), stores)

    return Candidate(f"{allocator} {strategy}", build)


def sglang_candidate(*, profiler_ranges: bool = True) -> Candidate:
    """SGLang's classes as they are, or without the profiler ranges that they open in every method."""

    def build(header: Header) -> Mapping[str, Any]:
        from replayer.targets_sglang import build_sglang_pools

        return build_sglang_pools(header, kvcache_for=lambda name: NoBytes())

    if profiler_ranges:
        return Candidate(SGLANG, build)
    from replayer.targets_sglang import without_profiler_ranges

    return Candidate(f"{SGLANG} without ranges", build, without_profiler_ranges)


def measure(
    path: Path | str,
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    limit: int | None = None,
    after_turn: Callable[[], None] = lambda: None,
) -> Measurement:
    """Check once that all candidates do the same, then time them in turns: one round to warm up, and ``rounds`` that count.

    Args:
        limit: only the first so many calls of the trace.
        after_turn: called after the check and after each candidate's turn, for a progress bar; see `turns`.

    Raises:
        ResultsDiffer: candidates that do not do the same.
        UsageError: a trace whose ids no candidate would hand out, or an allocator that is not there.
    """
    calls = load_calls(path, limit)
    check_equal({candidate.name: candidate.build(calls.header) for candidate in candidates}, calls)
    after_turn()
    timings: dict[str, list[Timing]] = {candidate.name: [] for candidate in candidates}
    for number in range(rounds + 1):
        first = number % len(candidates)
        for candidate in [*candidates[first:], *candidates[:first]]:
            timing = _turn(candidate, calls)
            if number:
                timings[candidate.name].append(timing)
            after_turn()
    return Measurement(Path(path).name.removesuffix(".msgpack.zst"), len(calls.calls), timings)


def turns(candidates: int, rounds: int) -> int:
    """How often `measure` calls ``after_turn``."""
    return 1 + candidates * (rounds + 1)


def _turn(candidate: Candidate, calls: CallList) -> Timing:
    pools = candidate.build(calls.header)
    with candidate.around():
        return time_calls(pools, calls)


def _of(timing: Timing, kind: EventKind | None) -> int:
    return timing.total(without=KERNEL_KINDS) if kind is None else timing.nanoseconds[kind]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
