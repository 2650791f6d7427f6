"""What a parity check found, as figures (for machines) and as text (for people); both say the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from replayer.parity.run import Result, Setup

if TYPE_CHECKING:
    from rich.console import Console

    from replayer.parity.compare import Difference


@dataclass(frozen=True)
class About:
    """What ran, and where."""

    model: str
    dtype: str
    device: str
    hardware: str
    prompts: int
    setup: Setup
    plant: str | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Took:
    """What the whole command took, loading the model included: seconds, and seconds of all processors that it had."""

    seconds: float
    processor_seconds: float


def held(results: Sequence[Result]) -> bool:
    """Whether every request of every variant came out exactly as in the reference."""
    return all(result.comparison.exact == result.comparison.requests for result in results)


def figures(about: About, results: Sequence[Result], took: Took, *, interrupted: bool) -> dict[str, Any]:
    """Everything that is reported, ready for JSON. Times are seconds."""
    setup = about.setup
    return {
        "verdict": "interrupted" if interrupted else "held" if held(results) else "failed",
        "model": about.model,
        "dtype": about.dtype,
        "device": about.device,
        "hardware": about.hardware,
        "prompts": about.prompts,
        "page_size": setup.layout.page_size,
        "window": setup.layout.window,
        "small_pool_tokens": setup.small_tokens,
        "large_pool_tokens": setup.large_tokens,
        "plant": about.plant,
        "versions": about.versions,
        "seconds": round(took.seconds, 2),
        "processor_seconds": round(took.processor_seconds, 2),
        "variants": {result.run.name: _variant(result) for result in results},
    }


def _variant(result: Result) -> dict[str, Any]:
    comparison = result.comparison
    return {
        "requests": comparison.requests,
        "exact": comparison.exact,
        "tokens_compared": comparison.tokens,
        # JSON has no infinity.
        "largest_difference": comparison.largest if math.isfinite(comparison.largest) else None,
        "first_difference": None if comparison.first is None else asdict(comparison.first),
        "operations": result.run.operations(),
        "flushes": result.run.flushes,
        "seconds": round(result.run.seconds, 2),
        "reference_seconds": round(result.reference.seconds, 2),
    }


def draw(console: Console, about: About, results: Sequence[Result], took: Took, *, interrupted: bool) -> None:
    """The same for people."""
    from rich import box
    from rich.table import Table

    setup = about.setup
    window = "everything" if setup.layout.window is None else f"the last {setup.layout.window} tokens"
    verdict = "INTERRUPTED" if interrupted else "HELD" if held(results) else "FAILED"
    console.print(
        f"{verdict}  {about.model}, {about.dtype}, on {about.hardware}: {about.prompts} prompts, greedy and seeded sampling",
        highlight=False,
    )
    for line in (
        f"layers: one in three sees everything (pool full), the others {window} (pool window); pages of {setup.layout.page_size} tokens",
        f"small pools of {setup.small_tokens:,} tokens against large ones of {setup.large_tokens:,}, in which nothing moves; "
        "same batches on both sides",
        ", ".join(f"{name} {version}" for name, version in about.versions.items()),
    ):
        console.print(f"  {line}", highlight=False)
    if about.plant:
        console.print(f"  planted fault: {about.plant}", highlight=False)
    if results:
        table = Table(box=box.SIMPLE_HEAD)
        for heading in ("variant", "exact", "largest difference", "tokens", "pages moved", "flushes (urgent)",
                        "device-to-host", "host-to-device", "evictions", "preemptions", "seconds"):  # fmt: skip
            table.add_column(heading, justify="left" if heading == "variant" else "right")
        for result in results:
            table.add_row(*_row(result))
        console.print(table)
        console.print(
            "  device-to-host and host-to-device: synchronisations per flush, least / median / most (total); waits: "
            f"{sum(result.run.flushes['syncs']['waits']['total'] for result in results)}. Of eager a flush is the compaction at a free.",
            highlight=False,
        )
        references = {id(result.reference): result.reference.seconds for result in results}
        console.print(
            f"  references: {len(references)}, {sum(references.values()):.1f} s; pages moved in them: 0. All of it: "
            f"{took.seconds:.0f} s, {took.processor_seconds:.0f} s of processor time",
            highlight=False,
        )
    still = [result.run.name for result in results if not result.run.flushes["pages_moved"]]
    if still:
        console.print(
            f"  note: no page moved in {', '.join(still)}, which proves nothing; more prompts crowd the pools",
            highlight=False,
        )
    for result in results:
        if result.comparison.first is not None:
            _draw_difference(console, result.run.name, result.comparison.first)


def _row(result: Result) -> list[str]:
    comparison, flushes, done = result.comparison, result.run.flushes, result.run.operations()
    return [
        result.run.name,
        f"{comparison.exact}/{comparison.requests}",
        repr(comparison.largest),
        f"{comparison.tokens:,}",
        f"{flushes['pages_moved']:,}",
        f"{flushes['count']:,} ({flushes['urgent']:,})",
        _spread(flushes["syncs"]["device_to_host"]),
        _spread(flushes["syncs"]["host_to_device"]),
        f"{done['evictions']:,}",
        f"{done['preemptions']:,}",
        f"{result.run.seconds:.1f}",
    ]


def _spread(counts: dict[str, float]) -> str:
    return f"{counts['min']:g} / {counts['median']:g} / {counts['max']:g} ({counts['total']:,})"


def _draw_difference(console: Console, variant: str, first: Difference) -> None:
    console.print(
        f"  {variant} first differs at request {first.request}, token {first.token}, forward {first.forward}: {first.what}\n"
        f"    expected: {first.expected}\n    found:    {first.found}",
        highlight=False,
    )
