"""What a replay of each committed trace costs in synchronisations: computed here, kept in `traces/baseline.json`, compared by a test.

python -m tests.corpus            shows what would change in the baseline
python -m tests.corpus --update   writes it, and shows what changed
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

from recorder.trace import TraceReader
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions

TRACES = Path(__file__).parents[1] / "traces"
BASELINE = TRACES / "baseline.json"
SUFFIX = ".msgpack.zst"
STRATEGIES = ("per-row", "hybrid", "batched", "device")
FLUSH_EVERY = 20
"""Engines that place blocks freely never flush: they replay with a flush of every pool after so many events."""
LARGE_EVENTS = 100_000
FIRST_EVENTS = 40_000
"""Of a trace with more than LARGE_EVENTS only the default strategy and `device` replay all; the others its first events."""


def trace_files() -> list[Path]:
    """Every committed trace."""
    return sorted(TRACES.glob(f"*{SUFFIX}"))


def name_of(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


def flush_every(path: Path) -> int:
    """Events between flushes of every pool; 0 where the engine flushes itself."""
    with TraceReader(path) as reader:
        compacts = reader.header.settings.get("placement") != "free"
    return 0 if compacts else FLUSH_EVERY


def replay_trace(path: Path, strategy: str) -> Outcome:
    """With every check and the ledger."""
    with TraceReader(path) as reader:
        footer = reader.find_footer()
    large = footer is not None and footer.events > LARGE_EVENTS and strategy not in ("batched", "device")
    return replay(
        ReplayOptions(
            path,
            target=TargetOptions(strategy=strategy),
            until=FIRST_EVENTS if large else None,
            flush_every=flush_every(path),
        )
    )


def figures(outcome: Outcome) -> dict[str, Any]:
    """What the baseline keeps of a replay."""
    flushes = outcome.flushes
    return {
        "events": outcome.events,
        "flushes": len(flushes),
        "flushes_that_moved": sum(flush.moves > 0 for flush in flushes),
        "pages_moved": sum(flush.moves for flush in flushes),
        **{
            kind: {
                "total": sum(getattr(flush, kind) for flush in flushes),
                "most_in_a_flush": max((getattr(flush, kind) for flush in flushes), default=0),
            }
            for kind in ("device_to_host", "host_to_device", "waits")
        },
    }


def load_baseline() -> dict[str, Any]:
    """The committed figures; empty where there are none yet."""
    if not BASELINE.exists():
        return {}
    found: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return found


def as_text(baseline: dict[str, Any]) -> str:
    return json.dumps(baseline, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Compute, show the difference, write if asked to. 1 where a replay fails or the baseline differs and is not written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help=f"write {BASELINE.name}")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for path in trace_files():
        for strategy in STRATEGIES:
            outcome = replay_trace(path, strategy)
            print(f"{name_of(path)} {strategy}: {outcome.verdict}", file=sys.stderr)
            if outcome.failure is not None:
                print(outcome.failure, file=sys.stderr)
                return 1
            found.setdefault(name_of(path), {})[strategy] = figures(outcome)
    before, after = as_text(load_baseline()), as_text(found)
    sys.stdout.writelines(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), "committed", "measured", n=2)
    )
    if arguments.update:
        BASELINE.write_text(after, encoding="utf-8")
    return 0 if arguments.update or before == after else 1


if __name__ == "__main__":
    sys.exit(main())
