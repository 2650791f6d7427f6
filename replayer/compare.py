"""Strategies side by side on one trace: what each flush cost, and that all of them hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from replayer.replay import Outcome, Progress, ReplayOptions, replay
from replayer.report import spread

if TYPE_CHECKING:
    from rich.console import Console


def compare(
    options: ReplayOptions, strategies: list[str], progress: Progress | None
) -> tuple[list[dict[str, Any]], list[Outcome]]:
    """One row a strategy, and the outcomes of the counting runs.

    Each strategy is replayed twice: once with checks and ledger for verdict and counts, once with neither for the time.
    """
    rows, outcomes = [], []
    for strategy in strategies:
        target = replace(options.target, strategy=strategy)
        counted = replay(replace(options, target=target), progress)
        outcomes.append(counted)
        if counted.verdict == "interrupted":
            break
        timed = replay(replace(options, target=target, checks=None, ledger=False), progress)
        if timed.verdict == "interrupted":
            outcomes.append(timed)
            break
        rows.append(
            {
                "strategy": strategy,
                "verdict": counted.verdict,
                "flushes": len(counted.flushes),
                "pages_moved": sum(record.moves for record in counted.flushes),
                "device_to_host": spread(record.device_to_host for record in counted.flushes),
                "host_to_device": spread(record.host_to_device for record in counted.flushes),
                "waits": spread(record.waits for record in counted.flushes),
                "flush_seconds": sum(record.nanoseconds for record in timed.flushes) / 1e9,
            }
        )
    return rows, outcomes


def print_comparison(trace: str, rows: list[dict[str, Any]], console: Console) -> None:
    """``compare``'s rows as one table."""
    from rich.table import Table

    table = Table(
        title=f"{trace}: synchronisations per flush, min/median/max (total)",
        title_justify="left",
        box=None,
        padding=(0, 2),
    )
    for column in (
        "strategy",
        "verdict",
        "flushes",
        "pages moved",
        "device-to-host",
        "host-to-device",
        "waits",
        "flush time",
    ):
        table.add_column(column, justify="left" if column in ("strategy", "verdict") else "right")
    for row in rows:
        table.add_row(
            row["strategy"],
            row["verdict"],
            f"{row['flushes']:,}",
            f"{row['pages_moved']:,}",
            *(_spread_text(row[kind]) for kind in ("device_to_host", "host_to_device", "waits")),
            f"{row['flush_seconds'] * 1e3:.0f} ms",
        )
    console.print(table)


def _spread_text(values: dict[str, Any]) -> str:
    return f"{values['min']}/{values['median']:g}/{values['max']} ({values['total']:,})"
