"""Recordings made in the test's own process: kvtape's allocator stands where an engine's would, driven by a replay of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import allocator
from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine
from recorder.process import Recorder
from recorder.settings import Settings
from recorder.staging import Staging
from recorder.trace import EventKind, TraceReader
from replayer.replay import Outcome, ReplayOptions, replay

TRACES = Path(__file__).parents[2] / "traces"


def settings(folder: Path, **changes: Any) -> Settings:
    """Settings of a recording to `folder`; driven, since no server runs."""
    chosen = {"run": "0123456789abcdef", "salt": b"salt", "provenance": "driven", **changes}
    return Settings(target=str(folder / "run.msgpack.zst"), **chosen)


def hooked(recorder: Recorder) -> SglangHooks:
    """Hooks on kvtape's own allocators, which have SGLang's names."""
    hooks = SglangHooks(recorder, Engine("kvtape", "", same_placement=True))
    hooks.attach(
        SimpleNamespace(
            MultiEndedAllocator=allocator.MultiEndedAllocator,
            FloatMultiEndedAllocator=allocator.FloatMultiEndedAllocator,
        )
    )
    return hooks


@dataclass
class Recorded:
    """A replay that was recorded: what the replay found, the recorder, and the file."""

    outcome: Outcome
    recorder: Recorder

    @property
    def path(self) -> Path:
        return self.recorder.sessions[0].path


def record_replay(
    trace: Path,
    folder: Path,
    *,
    until: int | None = None,
    ledger: bool = False,
    staging: Staging | None = None,
    **changes: Any,
) -> Recorded:
    """Replay the first events of `trace` on kvtape's allocator with the hooks on it."""
    recorder = Recorder(settings(folder, **changes))
    if staging is not None:
        recorder.staging = staging
    hooked(recorder)
    try:
        outcome = replay(ReplayOptions(trace, until=until, ledger=ledger, drain=False))
    finally:
        recorder.stop()
    return Recorded(outcome, recorder)


def events_of(path: Path, until: int | None = None) -> list[tuple[Any, ...]]:
    """Events at depth 0 as tuples: kind, pool, value, value2, three lists, result, answers."""
    events: list[tuple[Any, ...]] = []
    with TraceReader(path) as reader:
        for chunk in reader.chunks():
            asked, answers = chunk.queries
            for index in range(len(chunk)):
                if chunk.depth[index] or (until is not None and chunk.first_seq + index >= until):
                    continue
                lists = [
                    None if (ids := chunk.lists(slot).get(index)) is None else ids.tolist()
                    for slot in range(4)
                ]
                low, high = int(asked.offsets[index]), int(asked.offsets[index + 1])
                pairs = list(zip(asked.values[low:high].tolist(), answers[low:high].tolist(), strict=True))
                events.append(
                    (
                        EventKind(int(chunk.kind[index])).name,
                        int(chunk.pool[index]),
                        int(chunk.value[index]),
                        int(chunk.value2[index]),
                        *lists,
                        int(chunk.result_kind[index]),
                        int(chunk.result_value[index]),
                        # An engine may ask an event several times in one call, kvtape's allocator asks once: the first answer counts.
                        sorted(dict(reversed(pairs)).items()),
                    )
                )
    return events
