"""What a replay found, as figures (for machines) and as text (for people); both say the same."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from replayer.failure import CHECKS
from replayer.history import last_events
from replayer.replay import Outcome
from replayer.targets import bytes_text

if TYPE_CHECKING:
    from rich.console import Console


def figures(outcome: Outcome, *, per_flush: bool = False) -> dict[str, Any]:
    """Everything that is reported, ready for JSON. Times are seconds."""
    header, options = outcome.header, outcome.options
    flushes = outcome.flushes
    inside = {name: nanoseconds / 1e9 for name, nanoseconds in sorted(outcome.nanoseconds.items())}
    total_inside = sum(inside.values()) - outcome.kv_nanoseconds / 1e9
    result: dict[str, Any] = {
        "trace": str(options.path),
        "verdict": outcome.verdict,
        "provenance": {
            "kind": header.provenance.kind,
            "how": header.provenance.how,
            "hardware": header.provenance.hardware,
            "engine": f"{header.engine} {header.engine_version}".strip(),
        },
        "target": {
            "allocator": options.target.allocator,
            "strategy": options.target.strategy,
            "device": options.target.device,
            "kv": outcome.kv_form,
            "ids": outcome.ids,
        },
        "events": outcome.events,
        "nested_events": outcome.nested,
        "events_not_recorded": outcome.dropped,
        "failure": _failure(outcome),
        "missing": _missing(outcome),
        "gap": _gap(outcome),
        "recording_ended": outcome.reason,
        "checks": {check: outcome.held.get(check, 0) for check in CHECKS if check not in ("CALL",)},
        "allocs_refused": outcome.refused,
        "flushes": {
            "count": len(flushes),
            "urgent": sum(record.urgent for record in flushes),
            "with_moves": sum(record.moves > 0 for record in flushes),
            "pages_moved": sum(record.moves for record in flushes),
            "bytes_moved": sum(record.nbytes for record in flushes),
            "pages_moved_outside": outcome.moved_outside_flushes,
            "seconds": sum(record.nanoseconds for record in flushes) / 1e9,
        },
        "filled_under_a_write": outcome.filled_under_a_write,
        "syncs": _syncs(outcome),
        "log_probabilities": {
            "requests_compared": outcome.logprob_compared,
            "tokens_read": outcome.logprob_tokens,
            "largest_difference": outcome.logprob_largest,
        },
        "peaks_pages": {
            name: {"band": peak.band, "live": peak.live, "holes": peak.holes, "pending": peak.pending,
                   "fragmentation": round(peak.fragmentation, 4), "least_available_tokens": peak.least_available}
            for name, peak in outcome.peaks.items()
        },
        "seconds": {
            "wall": outcome.wall_nanoseconds / 1e9,
            "inside_allocator": total_inside,
            "kv_bytes": outcome.kv_nanoseconds / 1e9,
            "harness": outcome.wall_nanoseconds / 1e9 - total_inside - outcome.kv_nanoseconds / 1e9,
            "by_call": inside,
            "ledger_on": options.ledger,
        },
    }  # fmt: skip
    if per_flush:
        result["per_flush"] = [
            {"event": r.seq, "pool": r.pool, "urgent": r.urgent, "moves": r.moves, "bytes": r.nbytes,
             "device_to_host": r.device_to_host, "host_to_device": r.host_to_device, "waits": r.waits,
             "seconds": r.nanoseconds / 1e9}
            for r in flushes
        ]  # fmt: skip
    return result


def spread(values: Iterable[int]) -> dict[str, Any]:
    """Minimum, median, maximum, total, and how often each value came."""
    listed = list(values)
    if not listed:
        return {"min": 0, "median": 0, "max": 0, "total": 0, "histogram": {}}
    histogram = dict(sorted(Counter(listed).items()))
    return {
        "min": min(listed),
        "median": median(listed),
        "max": max(listed),
        "total": sum(listed),
        "histogram": histogram,
    }


def _syncs(outcome: Outcome) -> dict[str, Any] | None:
    if not outcome.options.ledger:
        return None
    return {
        "per_flush": {
            kind: spread(getattr(record, kind) for record in outcome.flushes)
            for kind in ("device_to_host", "host_to_device", "waits")
        },
        "per_call": outcome.sync_calls,
        "per_line": [
            {"line": line, "kind": kind, "count": count} for line, kind, count in outcome.sync_lines
        ],
        "ledger_disagreements": outcome.ledger_disagreements,
    }


def _missing(outcome: Outcome) -> str | None:
    recovery = outcome.recovery
    if recovery is None:
        return None
    return (
        f"{recovery.reason}: everything up to event {recovery.last_seq} was replayed, "
        f"{recovery.bytes_missing} byte(s) from byte {recovery.byte_offset} (frame {recovery.frame}) could not be read"
    )


def _gap(outcome: Outcome) -> dict[str, Any] | None:
    gap = outcome.gap
    if gap is None:
        return None
    if gap.last_event is None:
        rest = f"the events from {gap.before_event} on were not replayed"
    elif gap.last_event < gap.before_event:
        rest = "all that was recorded was replayed"
    else:
        count = gap.last_event - gap.before_event + 1
        rest = f"events {gap.before_event} to {gap.last_event} ({count:,}) were not replayed"
    return {
        "before_event": gap.before_event,
        "dropped": gap.dropped,
        "last_event": gap.last_event,
        "about": (
            f"{gap.dropped:,} event(s) were dropped while recording, just before event {gap.before_event}: what the allocator held "
            f"from there on is unknown, {rest}"
        ),
    }


def reproduce_command(outcome: Outcome) -> str:
    """The command that shows the same failure."""
    options = outcome.options
    assert outcome.failure is not None
    parts = ["replay", str(options.path), "--until", str(outcome.failure.seq + 1), "--check-every", "event"]
    if options.target.allocator != "kvtape":
        parts += ["--allocator", options.target.allocator]
    if options.target.strategy != "batched":
        parts += ["--strategy", options.target.strategy]
    if options.target.kv != "auto":
        parts += ["--kv", options.target.kv]
    if options.ids != "auto":
        parts += ["--ids", options.ids]
    if options.flush_every:
        parts += ["--flush-every", str(options.flush_every)]
    if options.flush_when_short:
        parts += ["--flush-when-short"]
    return shlex.join(parts)


def _failure(outcome: Outcome) -> dict[str, Any] | None:
    failure = outcome.failure
    if failure is None:
        return None
    touched = [] if outcome.ids == "mapped" or not failure.pages else last_events(
        outcome.options.path, failure.pool, failure.pages, failure.seq
    )  # fmt: skip
    return {
        "check": failure.check,
        "about": CHECKS[failure.check],
        "event": failure.seq,
        "call": failure.call,
        "pool": failure.pool,
        "pages": failure.pages,
        "message": failure.message,
        "expected": failure.expected,
        "found": failure.found,
        "narrowed_from_event": outcome.narrowed_from,
        "last_events_on_these_pages": [{"event": seq, "kind": kind} for seq, kind in touched],
        "last_moves_of_these_pages": outcome.recent_moves,
        "reproduce": reproduce_command(outcome),
    }


def print_report(found: dict[str, Any], console: Console) -> None:
    """``figures`` as text."""
    from rich.markup import escape
    from rich.table import Table

    words = {
        "held": "[bold green]HELD[/]",
        "failed": "[bold red]FAILED[/]",
        "interrupted": "[bold yellow]INTERRUPTED[/]",
    }
    origin, target = found["provenance"], found["target"]
    console.print(f"{words[found['verdict']]}  {escape(found['trace'])}")
    console.print(
        f"  {escape(origin['kind'])}: {escape(origin['how'])}"
        + (f" ({escape(origin['hardware'])})" if origin["hardware"] else "")
    )
    console.print(
        f"  {found['events']:,} events of {escape(origin['engine'])}, driven against {escape(target['allocator'])}, "
        f"strategy {escape(target['strategy'])}, {escape(target['device'])}, kv {target['kv']}, ids {target['ids']}"
    )
    print_incomplete(found, console)
    if found["failure"]:
        _print_failure(found["failure"], console)
    held = "  ".join(f"{check} {count:,}" for check, count in found["checks"].items() if count)
    not_run = " ".join(check for check, count in found["checks"].items() if not count)
    console.print(f"  checks held: {held}")
    if not_run:
        console.print(f"  nothing to check or not asked for: {not_run}")
    flushes = found["flushes"]
    console.print(
        f"  flushes {flushes['count']:,} ({flushes['urgent']:,} urgent, {flushes['with_moves']:,} that moved), "
        f"{flushes['pages_moved']:,} pages moved = {bytes_text(flushes['bytes_moved'])}"
        + (
            f", {flushes['pages_moved_outside']:,} moved outside flushes"
            if flushes["pages_moved_outside"]
            else ""
        )
        + f"; allocs refused {found['allocs_refused']:,}"
    )
    if found["filled_under_a_write"]:
        console.print(
            f"  note: {found['filled_under_a_write']} page(s) were filled or handed out while a forward that was to "
            "write them, before the engine freed them, had not finished"
        )
    probe = found["log_probabilities"]
    if probe["requests_compared"]:
        console.print(
            f"  log-probabilities: {probe['requests_compared']:,} requests, {probe['tokens_read']:,} tokens read, "
            f"largest difference {probe['largest_difference']}"
        )
    _print_syncs(found["syncs"], console)
    peaks = Table(title="peaks, in pages", title_justify="left", box=None, padding=(0, 2))
    for column in ("pool", "band", "live", "holes", "pending", "fragmentation", "least available, in tokens"):
        peaks.add_column(column, justify="left" if column == "pool" else "right")
    for name, peak in found["peaks_pages"].items():
        peaks.add_row(
            escape(name),
            *(f"{peak[key]:,}" for key in ("band", "live", "holes", "pending")),
            f"{peak['fragmentation']:.1%}",
            "-" if peak["least_available_tokens"] is None else f"{peak['least_available_tokens']:,}",
        )
    console.print(peaks)
    seconds = found["seconds"]
    console.print(
        f"  time: {seconds['wall']:.2f} s, of it {seconds['inside_allocator']:.2f} s inside the allocator"
        + (" (with the ledger's overhead; --no-ledger for clean times)" if seconds["ledger_on"] else "")
        + f", {seconds['kv_bytes']:.2f} s moving and zeroing KV, {seconds['harness']:.2f} s reading and checking"
    )


def print_incomplete(found: dict[str, Any], console: Console) -> None:
    """What of the recording is not there or was not replayed, and why it ended; nothing for a whole one."""
    from rich.markup import escape

    if found["missing"]:
        console.print(f"  [yellow]cut[/]: {escape(found['missing'])}")
    gap, dropped = found["gap"], found["events_not_recorded"]
    if gap:
        console.print(f"  [yellow]dropped[/]: {escape(gap['about'])}")
    if dropped > (gap["dropped"] if gap else 0):
        console.print(f"  [yellow]{dropped:,} events were dropped while recording, in the whole trace[/]")
    if found["recording_ended"]:
        console.print(f"  note: why the recording ended: {escape(found['recording_ended'])}")


def _print_failure(failure: dict[str, Any], console: Console) -> None:
    from rich.markup import escape

    console.print(f"  [bold red]{failure['check']}[/] {escape(failure['about'])}")
    console.print(
        f"    event {failure['event']}: {escape(failure['call'])}"
        + (f", pool {escape(failure['pool'])}" if failure["pool"] else "")
    )
    console.print(f"    {escape(failure['message'])}")
    if failure["pages"]:
        console.print(f"    virtual pages: {', '.join(str(page) for page in failure['pages'][:16])}")
    if failure["expected"] or failure["found"]:
        console.print(f"    expected: {escape(failure['expected'])}")
        console.print(f"    found:    {escape(failure['found'])}")
    if failure["narrowed_from_event"] is not None:
        console.print(f"    (met at event {failure['narrowed_from_event']}, then narrowed)")
    for touched in failure["last_events_on_these_pages"]:
        console.print(f"    touched by event {touched['event']}: {touched['kind']}")
    for moved in failure["last_moves_of_these_pages"]:
        console.print(
            f"    moved in event {moved['event']}: virtual page {moved['page']}, physical {moved['src']} -> {moved['dst']}"
        )
    console.print(f"    reproduce: {escape(failure['reproduce'])}", soft_wrap=True)


def _print_syncs(syncs: dict[str, Any] | None, console: Console) -> None:
    from rich.table import Table

    if syncs is None:
        console.print("  synchronisations: not counted (--no-ledger)")
        return
    table = Table(title="synchronisations per flush", title_justify="left", box=None, padding=(0, 2))
    for column in ("kind", "min", "median", "max", "total", "flushes by count"):
        table.add_column(column, justify="left" if column in ("kind", "flushes by count") else "right")
    for kind, values in syncs["per_flush"].items():
        shown = list(values["histogram"].items())
        text = ", ".join(f"{count}: {flushes:,}" for count, flushes in shown[:6]) + (
            " ..." if len(shown) > 6 else ""
        )
        table.add_row(
            kind.replace("_", "-"),
            str(values["min"]),
            f"{values['median']:g}",
            str(values["max"]),
            f"{values['total']:,}",
            text,
        )
    console.print(table)
    for entry in syncs["per_line"][:6]:
        console.print(f"    {entry['count']:>8,}  {entry['kind'].replace('_', '-')}  {entry['line']}")
    if syncs["ledger_disagreements"]:
        console.print(
            f"  [yellow]the ledger's two levels disagree on {syncs['ledger_disagreements']} audited calls[/]"
        )
