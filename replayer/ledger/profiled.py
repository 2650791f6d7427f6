"""What torch's profiler saw of the CUDA runtime, by ranges of the program: the synchronising calls, and the kernels that were launched.

It is read from the trace that the profiler exports (the format of chrome://tracing), which names a runtime call as CUDA does and links it
with what it started on the device by a correlation number.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

_PREFIX: Final = "kvtape:"
_PAUSED: Final = "kvtape:paused"
#: The host waits in these until the device has come so far. A copy without Async in its name waits too.
_WAITS: Final = re.compile(
    r"(cuda(Stream|Event|Device)|cu(Stream|Event|Ctx))Synchronize|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)?"
)
_STREAM_WAITS: Final = ("cudaStreamSynchronize", "cuStreamSynchronize")
_ASYNC_COPY: Final = re.compile(r"cudaMemcpy\w*Async")
#: Endings that CUDA adds to names: API version, per-thread default stream.
_ENDING: Final = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
_RUNTIME: Final = ("cuda_runtime", "cuda_driver")
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class OnDevice:
    """One kernel, copy or fill: its name and microseconds."""

    name: str
    microseconds: float


@dataclass
class RangeFindings:
    """One range. ``syncs``: how often the host waited, by the name of the runtime's call; a copy that does not wait but reads or writes
    pageable memory is among them, since CUDA stages it, and such a copy with a wait behind it counts once."""

    syncs: dict[str, int] = field(default_factory=dict)
    on_device: list[OnDevice] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All synchronisations."""
        return sum(self.syncs.values())


class Profile:
    """A ``with`` block under the profiler. Give ranges of it numbers with `range`; afterwards `findings` has each.

    On a machine without CUDA ranges are found and hold nothing; ``saw_runtime`` stays false, which is not the same as zero.

    Attributes:
        findings: by number of range, what happened in it and in ranges inside it.
        saw_runtime: whether the profiler reported any call of the CUDA runtime at all.
    """

    def __init__(self) -> None:
        self.findings: dict[int, RangeFindings] = {}
        self.saw_runtime = False
        self._profile: Any = None

    def __enter__(self) -> Profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was launched inside is to be in the trace
        self._profile.__exit__(*exception)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        self._profile = None
        found, saw_runtime = read_events(events)
        self.findings.update(found)
        self.saw_runtime = self.saw_runtime or saw_runtime

    @staticmethod
    def range(number: int) -> torch.profiler.record_function:
        """A range that `findings` has under ``number``."""
        return torch.profiler.record_function(f"{_PREFIX}{number}")

    @staticmethod
    def paused() -> torch.profiler.record_function:
        """A range whose contents belong to no range around it."""
        return torch.profiler.record_function(_PAUSED)


@dataclass
class _Range:
    start: float
    end: float
    number: int | None  # None: paused


@dataclass
class _Call:
    at: float
    name: str
    correlation: int | None
    is_pageable: bool = False


def read_events(events: Iterable[dict[str, Any]]) -> tuple[dict[int, RangeFindings], bool]:
    """Findings by number of range from events of an exported trace, and whether it has any runtime call."""
    ranges: list[_Range] = []
    calls: list[_Call] = []
    started: dict[int, list[OnDevice]] = {}
    pageable: set[int] = set()
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        name = str(event.get("name", ""))
        correlation = event.get("args", {}).get("correlation")
        if category == "user_annotation" and name.startswith(_PREFIX):
            start = float(event["ts"])
            number = None if name == _PAUSED else int(name.removeprefix(_PREFIX))
            ranges.append(_Range(start, start + float(event["dur"]), number))
        elif category in _RUNTIME:
            # Both clocks are converted to one, give or take some of a microsecond: the middle of a call is surely inside its range.
            middle = float(event["ts"]) + float(event.get("dur", 0)) / 2
            calls.append(_Call(middle, _ENDING.sub("", name), correlation))
        elif category in _ON_DEVICE and correlation is not None:
            started.setdefault(correlation, []).append(OnDevice(name, float(event.get("dur", 0))))
            if category == "gpu_memcpy" and "Pageable" in name:
                pageable.add(correlation)
    calls.sort(key=lambda call: call.at)
    for call in calls:
        call.is_pageable = call.correlation in pageable
    findings = {each.number: RangeFindings() for each in ranges if each.number is not None}
    for within, call, following in _placed(ranges, calls):
        what = _synchronises(call, following)
        launched = [] if call.correlation is None else started.get(call.correlation, [])
        for number in within:
            if what:
                findings[number].syncs[what] = findings[number].syncs.get(what, 0) + 1
            findings[number].on_device.extend(launched)
    return findings, bool(calls)


def _synchronises(call: _Call, following: _Call | None) -> str | None:
    """What the call is counted as; None for one that does not hold the host."""
    if _WAITS.fullmatch(call.name):
        return call.name
    if _ASYNC_COPY.fullmatch(call.name) and call.is_pageable:
        waits_next = following is not None and following.name in _STREAM_WAITS
        return None if waits_next else f"{call.name} (pageable)"
    return None


def _placed(ranges: list[_Range], calls: list[_Call]) -> Iterator[tuple[list[int], _Call, _Call | None]]:
    """Every call inside a range and not inside a pause: numbers of the ranges around it, it, and the next call of the same range."""
    ordered = sorted(ranges, key=lambda each: (each.start, -each.end))
    opened: list[_Range] = []
    position = 0
    around: list[tuple[list[_Range], _Call]] = []
    for call in calls:
        while position < len(ordered) and ordered[position].start <= call.at:
            opened.append(ordered[position])
            position += 1
        opened = [each for each in opened if each.end >= call.at]
        around.append((list(opened), call))
    for index, (within, call) in enumerate(around):
        if not within or any(each.number is None for each in within):
            continue
        following = around[index + 1] if index + 1 < len(around) else None
        same = following is not None and any(each is within[-1] for each in following[0])
        yield (
            [each.number for each in within if each.number is not None],
            call,
            following[1] if same and following is not None else None,
        )


def profiled(work: Callable[[], object]) -> RangeFindings:
    """What the CUDA runtime and the device did for ``work``."""
    profile = Profile()
    with profile, profile.range(0):
        work()
    return profile.findings.get(0, RangeFindings())
