"""One replay from a file to an outcome, and the search for the first wrong event when a check fails late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from recorder.trace import Chunk, Header, ImpossibleEvent, Recovery, TraceReader
from replayer.blame import raised_inside
from replayer.calling import FlushRecord, MoveLog
from replayer.checks import CheckOptions, Checks
from replayer.checks.drain import drain
from replayer.checks.joint import JointChecks
from replayer.composite_drive import CompositeDriver
from replayer.drive import Driver
from replayer.failure import CheckFailure
from replayer.hazards import Hazards
from replayer.logprob import Probe
from replayer.pool_state import Extent
from replayer.targets import Target, TargetOptions, build_target


@dataclass(frozen=True)
class ReplayOptions:
    """``ids``: ``auto`` takes recorded ids as they are where the engine's placement rule is ours. ``until``: events to drive."""

    path: Path
    target: TargetOptions = field(default_factory=TargetOptions)
    checks: CheckOptions | None = field(default_factory=CheckOptions)
    ledger: bool = True
    ids: str = "auto"
    until: int | None = None
    flush_every: int = 0
    flush_when_short: bool = False
    drain: bool = True


@dataclass
class PoolPeaks:
    """Largest values seen after flushes and at the end, in pages; ``fragmentation`` is holes and pending over the band.
    ``least_available`` is the smallest ``available_size()``, in tokens; None before the first look."""

    band: int = 0
    live: int = 0
    holes: int = 0
    pending: int = 0
    fragmentation: float = 0.0
    least_available: int | None = None


@dataclass(frozen=True)
class Gap:
    """The first place where events were not recorded; what the allocator holds from there on is unknown, so the replay ends there.

    ``dropped`` events are missing before event ``before_event``. ``last_event`` is the last one in the trace, None where that is not known
    (the file was not closed)."""

    before_event: int
    dropped: int
    last_event: int | None = None


@dataclass
class Outcome:
    """Everything a report says about one replay."""

    options: ReplayOptions
    header: Header
    events: int = 0
    nested: int = 0
    failure: CheckFailure | None = None
    narrowed_from: int | None = None
    interrupted: bool = False
    recovery: Recovery | None = None
    dropped: int = 0
    gap: Gap | None = None
    reason: str = ""
    held: Counter[str] = field(default_factory=Counter)
    flushes: list[FlushRecord] = field(default_factory=list)
    moved_outside_flushes: int = 0
    refused: int = 0
    filled_under_a_write: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    nanoseconds: dict[str, int] = field(default_factory=dict)
    kv_nanoseconds: int = 0
    wall_nanoseconds: int = 0
    peaks: dict[str, PoolPeaks] = field(default_factory=dict)
    sync_lines: list[tuple[str, str, int]] = field(default_factory=list)
    sync_calls: dict[str, dict[str, int]] = field(default_factory=dict)
    ledger_disagreements: int = 0
    kv_form: str = ""
    ids: str = ""
    recent_moves: list[dict[str, int]] = field(default_factory=list)
    logprob_compared: int = 0
    logprob_tokens: int = 0
    logprob_largest: float = 0.0

    @property
    def verdict(self) -> str:
        if self.failure is not None:
            return "failed"
        return "interrupted" if self.interrupted else "held"


Progress = Callable[[int], None]

#: Events between sweeps in the passes that look for the first wrong event: each pass starts at the last clean sweep of the one before.
NARROWING = (64, 1)


def replay(options: ReplayOptions, progress: Progress | None = None) -> Outcome:
    """Replay a trace; when a check fails, replay again with more checks to name the first wrong event.

    Raises:
        TraceError: the file is no trace, damaged inside, or holds impossible events.
        UsageError: a target that does not exist.
    """
    outcome, checks = _run(options, progress)
    if outcome.failure is None or checks is None or options.checks is None:
        return outcome
    found = outcome.failure
    if options.checks.every == 1 and checks.last_sweep >= found.seq - 1:
        return outcome  # everything was right one event before
    for sweep_every in NARROWING:
        assert outcome.failure is not None
        closer = replace(
            options,
            checks=replace(
                options.checks, every=1, sweep_every=sweep_every, first=max(0, checks.last_sweep + 1)
            ),
            until=outcome.failure.seq + 1,
            ledger=options.ledger and outcome.failure.check == "C11",
            drain=outcome.failure.call.startswith("drain"),
        )
        again, checks_again = _run(closer, None)
        if again.failure is None or checks_again is None or again.failure.seq > outcome.failure.seq:
            break
        outcome.failure, outcome.recent_moves, checks = again.failure, again.recent_moves, checks_again
    if outcome.failure.seq != found.seq:
        outcome.narrowed_from = found.seq
    return outcome


def _run(options: ReplayOptions, progress: Progress | None) -> tuple[Outcome, Checks | None]:
    begin = perf_counter_ns()
    if options.target.device == "cpu":
        torch.set_num_threads(1)  # thousands of tiny operations: a second thread only waits
    with TraceReader(options.path) as reader:
        header = reader.header
        hazards = Hazards()
        moves = MoveLog(hazards.log)
        target = build_target(header, options.target, moves)
        pools = target.pools
        ids = options.ids
        if ids == "auto":
            ids = "mapped" if header.settings.get("placement") == "free" else "recorded"
        outcome = Outcome(options, header, ids=ids, kv_form=next(iter(pools.values())).store.form)
        outcome.peaks = {name: PoolPeaks() for name in pools}
        ledger = _ledger(options)
        probe = None
        checks = None
        if options.checks is not None:
            probe = Probe(options.target.device) if "C14" in options.checks.enabled else None
            checks = _checks(target, hazards, options.checks, header, probe)
            checks.compares_recorded = (
                ids == "recorded" and not options.flush_every and not options.flush_when_short
            )
        hazards.leases_shut_gates = header.settings.get("move_gate") == "leases"
        driver = _driver(target, hazards, moves, checks, ledger, ids, options)
        try:
            _drive(reader, driver, checks, outcome, options, progress)
        except CheckFailure as failure:
            outcome.failure = failure
        except ImpossibleEvent as error:
            error.args = (f"{options.path}: {error}",)
            raise
        except KeyboardInterrupt:
            outcome.interrupted = True
        except Exception as error:
            theirs = None if hasattr(error, "exit_code") else raised_inside(error, target.allocators)
            if theirs is None:
                raise
            theirs.seq, theirs.call = driver.seq, driver.call_name
            outcome.failure = theirs
        finally:
            if ledger is not None:
                _read_ledger(ledger, outcome)
                ledger.close()
        outcome.recovery = reader.recovered
        _read_footer(reader, outcome)
        _read_driver(driver, checks, probe, outcome)
        outcome.filled_under_a_write = hazards.filled_under_a_write
        outcome.moved_outside_flushes = moves.total() - sum(record.moves for record in driver.flushes)
    outcome.wall_nanoseconds = perf_counter_ns() - begin
    return outcome, checks


def _checks(
    target: Target, hazards: Hazards, options: CheckOptions, header: Header, probe: Probe | None
) -> Checks:
    if target.composite is None:
        return Checks(target.pools, hazards, options, header.total_bytes, probe)
    return JointChecks(target.pools, hazards, options, header.total_bytes, probe, target.composite)


def _driver(
    target: Target,
    hazards: Hazards,
    moves: MoveLog,
    checks: Checks | None,
    ledger: Any,
    ids: str,
    options: ReplayOptions,
) -> Driver:
    policy: dict[str, Any] = {
        "flush_every": options.flush_every,
        "flush_when_short": options.flush_when_short,
        "int32_rows": options.target.allocator == "sglang",
    }
    if target.composite is None:
        return Driver(target.pools, hazards, moves, checks=checks, ledger=ledger, ids=ids, **policy)
    assert checks is None or isinstance(checks, JointChecks)
    return CompositeDriver(target, hazards, moves, checks=checks, ledger=ledger, ids=ids, **policy)


def _drive(
    reader: TraceReader,
    driver: Driver,
    checks: Checks | None,
    outcome: Outcome,
    options: ReplayOptions,
    progress: Progress | None,
) -> None:
    each = None if checks is None else _after_each(driver, checks, outcome)
    waiting: Chunk | None = None
    reached_end = True

    def go(chunk: Chunk) -> bool:
        gap = _first_gap(chunk, options.until)
        more = driver.drive(chunk, options.until if gap is None else gap.before_event, each)
        outcome.gap = gap
        outcome.dropped = 0 if gap is None else gap.dropped
        if progress is not None:
            progress(len(chunk))
        return more and gap is None

    # States come after the chunk they belong to, so each chunk waits for what follows it.
    for item in reader.items():
        if not isinstance(item, Chunk):
            if checks is not None:
                checks.states.update({row.after_seq: row for row in item})
            continue
        if waiting is not None and not go(waiting):
            reached_end = False
            break
        waiting = item
    if reached_end and waiting is not None:
        reached_end = go(waiting)
    if checks is None:
        return
    _note_peaks(driver, outcome)
    try:
        checks.everything(driver.seq)
    except CheckFailure as failure:
        failure.seq, failure.call = driver.seq, failure.call or "sweep after the last event"
        raise
    stopped_on_purpose = options.until is not None or outcome.gap is not None
    if options.drain and (reached_end or stopped_on_purpose) and not reader.recovered:
        drain(driver, checks)


def _first_gap(chunk: Chunk, until: int | None) -> Gap | None:
    """The first place in the chunk with events missing, unless all that is asked for lies before it."""
    if not len(chunk.drops):
        return None
    at = int(chunk.drops[:, 0].min())
    seq = chunk.first_seq + at
    if until is not None and until <= seq:
        return None
    return Gap(seq, int(chunk.drops[chunk.drops[:, 0] == at, 1].sum()))


def _read_footer(reader: TraceReader, outcome: Outcome) -> None:
    """What the writer knew when it closed the file; nothing where it did not, or the file is damaged behind the part that was driven."""
    footer = reader.footer or reader.find_footer()
    if footer is None:
        return
    outcome.reason, outcome.dropped = footer.reason, footer.dropped
    until = outcome.options.until
    if outcome.gap is not None:
        outcome.gap = replace(outcome.gap, last_event=footer.events - 1)
    elif footer.dropped_at_end and outcome.verdict == "held" and (until is None or until > footer.events):
        outcome.gap = Gap(footer.events, footer.dropped_at_end, footer.events - 1)


def _after_each(driver: Driver, checks: Checks, outcome: Outcome) -> Callable[[], None]:
    seen: list[Extent] = []

    def after() -> None:
        nonlocal seen
        try:
            checks.after_event(driver.seq, driver.flushes)
        except CheckFailure as failure:
            failure.seq = driver.seq
            failure.call = failure.call or driver.call_name
            raise
        if checks.extents is not seen:  # the chain was looked at
            if checks.extents != seen:  # most flushes find nothing to do
                _note_peaks(driver, outcome)
            seen = checks.extents

    return after


def _note_peaks(driver: Driver, outcome: Outcome) -> None:
    for state in driver.by_number:
        peaks = outcome.peaks[state.name]
        low, high = state.band()
        holes, pending = state.holes(), state.pending()
        peaks.band, peaks.holes, peaks.pending = (
            max(peaks.band, high - low),
            max(peaks.holes, holes),
            max(peaks.pending, pending),
        )
        peaks.live = max(peaks.live, state.live_count())
        available = state.known_available
        if available is None:
            available = state.allocator.available_size()
        if peaks.least_available is None or available < peaks.least_available:
            peaks.least_available = available
        if high > low:
            peaks.fragmentation = max(peaks.fragmentation, (holes + pending) / (high - low))


def _ledger(options: ReplayOptions) -> Any:
    if not options.ledger:
        return None
    from replayer.ledger import SyncLedger

    # The first audited call imports much of torch; that is not to be taken for the allocator's time.
    with SyncLedger(options.target.device) as first, first.call("warm-up", 0, audit=True):
        torch.zeros(1)
    return SyncLedger(options.target.device)


def _read_ledger(ledger: Any, outcome: Outcome) -> None:
    outcome.sync_lines = [(site.line, site.kind, count) for site, count in ledger.by_site().most_common()]
    outcome.sync_calls = {
        str(kind): {
            "calls": counts.calls,
            "device_to_host": counts.device_to_host,
            "host_to_device": counts.host_to_device,
            "waits": counts.waits,
        }
        for kind, counts in ledger.by_kind_of_call().items()
    }
    outcome.ledger_disagreements = len(ledger.disagreements)


def _read_driver(driver: Driver, checks: Checks | None, probe: Probe | None, outcome: Outcome) -> None:
    outcome.events, outcome.nested = driver.driven, driver.nested
    outcome.flushes, outcome.refused = driver.flushes, driver.refused
    outcome.calls, outcome.nanoseconds = driver.calls, dict(driver.nanoseconds)
    outcome.kv_nanoseconds = sum(state.store.nanoseconds for state in driver.by_number)
    if checks is not None:
        outcome.held = checks.held
        if outcome.failure is not None:
            outcome.recent_moves = checks.recent_moves(outcome.failure)
    if probe is not None:
        outcome.logprob_compared, outcome.logprob_tokens = probe.compared, probe.tokens
        outcome.logprob_largest = probe.largest_difference
