"""How often the strategy `device` waits for the device on the committed traces, where numbers do not come at once.

python -m tests.waits            prints the table of docs/device-strategy.md
python -m tests.waits NAME...    of these traces only

Nothing is checked in these replays: a check looks at exact state, and so takes in the numbers that an alloc would have had to wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recorder.trace import Chunk, EventKind, TraceReader
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests import corpus

ARRIVING, DELAYED = "tests.allocator.arriving", "tests.allocator.delayed"
#: When numbers come, and the allocators to which they come so.
MODELS = {
    "own stream": f"{ARRIVING}:OwnStreamEnd,{ARRIVING}:OwnStreamFloat",
    "one stream": f"{ARRIVING}:ArrivingEnd,{ARRIVING}:ArrivingFloat",
    "never": f"{DELAYED}:NeverEnd,{DELAYED}:NeverFloat",
}


@dataclass(frozen=True)
class Waits:
    """Of one replay: flushes that the engine made, and how often the host waited, by call."""

    flushes: int
    calls: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    @property
    def per_hundred(self) -> float:
        return 100 * self.total / self.flushes


def recorded_flushes(path: Path, until: int | None) -> int:
    """Flushes among the first ``until`` events, those inside an alloc included."""
    flushes = 0
    with TraceReader(path) as reader:
        for item in reader.items():
            if isinstance(item, Chunk):
                kinds = item.kind if until is None else item.kind[: max(0, until - item.first_seq)]
                flushes += int((kinds == EventKind.FLUSH).sum())
    return flushes


def measure(path: Path, model: str, until: int | None = None) -> Waits:
    """Replay a trace, or its first ``until`` events, on the allocators of a model."""
    outcome = replay(
        ReplayOptions(
            path,
            TargetOptions(allocator=MODELS[model], strategy="device"),
            checks=None,
            until=until,
            flush_every=corpus.flush_every(path),
            drain=False,
        )
    )
    assert outcome.verdict == "held", outcome.failure
    calls = {
        name: counts["device_to_host"] + counts["host_to_device"] + counts["waits"]
        for name, counts in outcome.sync_calls.items()
    }
    # Engines that never flush are replayed with flushes of the replay's own.
    flushes = recorded_flushes(path, until) or len(outcome.flushes)
    return Waits(flushes, {name: count for name, count in calls.items() if count})


def table(names: Sequence[str] = ()) -> str:
    """In Markdown: waits, and waits in a hundred flushes."""
    lines = [
        f"| trace | flushes | {' | '.join(MODELS)} |",
        f"|---|---:|{'---:|' * len(MODELS)}",
    ]
    for path in corpus.trace_files():
        if names and corpus.name_of(path) not in names:
            continue
        found = [measure(path, model) for model in MODELS]
        cells = [f"{each.total:,} ({each.per_hundred:.2f})" for each in found]
        lines.append(f"| `{corpus.name_of(path)}` | {found[0].flushes:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def are_known(names: Sequence[str]) -> bool:
    """Whether there are traces of these names; says which are not."""
    known = [corpus.name_of(path) for path in corpus.trace_files()]
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no trace {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
    return not unknown


def main(names: Sequence[str]) -> int:
    if not are_known(names):
        return 2
    print(table(names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
