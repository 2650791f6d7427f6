"""kvtape's allocator in SGLang's engine on a CPU, with numbers that come when a GPU's would: who waits for them, and how often.

``LATE_NUMBERS=FILE`` in the engine's environment, beside ``KVTAPE_ALLOCATOR=device``: the stand-ins that let the engine run on a CPU
call `install`, before there are pools. The model is `tests.allocator.arriving`'s of one stream: what the allocator sends is there when the
forward launched before it is over, and that one is over when its results are looked at (``SchedulerBatchResultProcessor``; SGLang waits for
them there). A stream of its own, as SGLang has, is behind the running forward too if it was ordered so, which happens after every launch
of which it is not known when its reads of shared memory are done (``Scheduler._apply_war_barrier``). This is the worst of it.

FILE is written anew after every flush and every wait, because a scheduler is killed without a goodbye: JSON with ``flushes``, ``results``,
``left_to_the_device`` (whether two sides had to be packed) and ``waits``, by the allocator's method that SGLang had called.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import allocator
from allocator import sglang_classes
from allocator.late_room import LateRoom
from tests.allocator import arriving

ALLOCATOR = str(Path(allocator.__file__).parent)
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
FLUSHES = ("flush_for_allocation", "flush_opportunistic")


class Seen:
    """What was counted, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.counts: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def add(self, counts: Counter[str], name: str) -> None:
        counts[name] += 1
        text = json.dumps({**self.counts, "waits": self.waits})
        begun = self._path.with_suffix(f".{os.getpid()}")
        begun.write_text(text, encoding="utf-8")
        begun.replace(self._path)


def install(path: str) -> None:
    """Have numbers come late from now on, and count who waits for them."""
    seen = Seen(Path(path))
    made = sglang_classes._ON_DEVICE
    for asked_for, cls in made.items():
        made[asked_for] = _late(cls, seen)
    synchronize = arriving._Arrival.synchronize

    def waited_for(self: arriving._Arrival) -> None:
        seen.add(seen.waits, _asked(sys._getframe()))
        synchronize(self)

    arriving._Arrival.synchronize = waited_for  # type: ignore[method-assign]
    pack = LateRoom.pack_both_if_lacking

    def packs(self: LateRoom, *arguments: Any) -> bool:
        is_left = pack(self, *arguments)
        if is_left:
            seen.add(seen.counts, "left_to_the_device")
        return is_left

    LateRoom.pack_both_if_lacking = packs  # type: ignore[method-assign]
    _watch_results(seen)


def _late(cls: type[Any], seen: Seen) -> type[Any]:
    late = arriving.calls_counted(type(cls.__name__, (arriving.Arriving, cls), {"one_stream": True}))
    for name in FLUSHES:
        setattr(late, name, _counted(getattr(late, name), seen))
    return late


def _counted(flush: Callable[..., int], seen: Seen) -> Callable[..., int]:
    def call(*arguments: Any, **keywords: Any) -> int:
        seen.add(seen.counts, "flushes")
        return flush(*arguments, **keywords)

    return call


def _asked(frame: FrameType | None) -> str:
    """The allocator's method that somebody else has called, nearest to the engine."""
    name = "nobody"
    while frame is not None:
        if frame.f_code.co_filename.startswith(ALLOCATOR):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _watch_results(seen: Seen) -> None:
    processor = importlib.import_module(RESULTS).SchedulerBatchResultProcessor
    for name in list(vars(processor)):
        if name.startswith("process_batch_result_"):
            setattr(processor, name, _looks_at_results(getattr(processor, name), seen))


def _looks_at_results(process: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        for stream in list(arriving.Arriving.streams.values()):
            stream.results += 1
        seen.counts["results"] += 1
        return process(*arguments, **keywords)

    return call
