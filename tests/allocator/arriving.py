"""Allocators of the ``device`` strategy on a CPU whose numbers come when a GPU's would: not at once, and not never.

Two engines are stood in for.

- *One stream* (`ArrivingEnd`, `ArrivingFloat`): the allocator works on the stream that forwards are launched on, so whatever it sends
  is behind the forward that was launched last, and is there when that forward is over.
- *A stream of its own* (`OwnStreamEnd`, `OwnStreamFloat`): SGLang 0.5.23's overlapped loop, whose allocator works on
  ``schedule_stream`` and whose forwards run on ``forward_stream``. What is sent is behind a forward only once the stream was ordered
  after it, as an urgent flush does. (``Scheduler._apply_war_barrier`` orders it after a forward's first reads too, and after all of it
  where those are not known, as for some prefills; that is not stood in for.)

With nothing before it a number is there by the next call. A forward is over when its event has answered so, or one launched later has; when
its results were looked at, of which a trace says nothing and a real engine does (`tests.engines.late`); and when the second one after it is
launched: an engine is one step ahead of the GPU at most (``Scheduler.event_loop_overlap`` launches forward N + 1 and then waits for the
results of N).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from allocator.device_end import DeviceMultiEndedAllocator
from allocator.device_middle import DeviceFloatMultiEndedAllocator
from allocator.device_release import DeviceReleasingBand
from allocator.read_back import ReadBack

#: Forwards that are launched while another one may still run.
AHEAD = 1
#: Calls that queue work on the device. One made inside another is part of that one.
CALLS = (
    "alloc", "alloc_extend", "alloc_decode", "alloc_with_virtual", "alloc_physical", "free", "free_segment", "free_group_end",
    "free_named", "free_physical", "cancel_physical_reservation", "flush_for_allocation", "flush_opportunistic", "bind", "unbind",
    "make_room", "compact_holes",
)  # fmt: skip


class Stream:
    """What the host knows of the stream that the pools of a buffer work on.

    Args:
        has_forwards: whether forwards are launched on it too.
    """

    def __init__(self, has_forwards: bool) -> None:
        self._has_forwards = has_forwards
        self.calls = 0
        self.posted = self.waited_through = 0
        self._depth = 0
        self._launched: list[Watched] = []
        self._behind: int | None = None
        #: Forwards whose results the engine has looked at, which it does in the order of their launches.
        self.results = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        self.calls += self._depth == 0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def launch(self, event: Any) -> Watched:
        """The forward behind ``event`` was launched, unless it is known already."""
        for known in reversed(self._launched[-8:]):
            if known.event is event:
                return known
        self._launched.append(Watched(event, self, len(self._launched)))
        if self._has_forwards:
            self._behind = len(self._launched) - 1
        return self._launched[-1]

    def order_behind(self, forward: int) -> None:
        self._behind = forward if self._behind is None else max(forward, self._behind)

    def behind(self) -> int | None:
        """The unfinished forward that is before whatever is sent now."""
        return None if self._behind is None or self.is_over(self._behind) else self._behind

    def is_over(self, forward: int) -> bool:
        following = self._launched[forward:]
        return (
            forward < self.results
            or len(following) > 1 + AHEAD
            or any(getattr(each.event, "fired", False) for each in following)
        )


class Watched:
    """A forward's done event, of which is noted when the stream is ordered after it."""

    def __init__(self, event: Any, stream: Stream, number: int) -> None:
        self.event, self._stream, self._number = event, stream, number

    def query(self) -> bool:
        answer: bool = self.event.query()
        return answer

    def wait(self) -> None:
        self._stream.order_behind(self._number)
        self.event.wait()


class _Arrival:
    """The event behind a copy. Waiting for it reads the device, so that a ledger sees it."""

    def __init__(self, stream: Stream, numbers: tuple[torch.Tensor, ...]) -> None:
        self._stream, self._number = stream, numbers[0]
        self._forward, self._call = stream.behind(), stream.calls
        stream.posted += 1
        self._order = stream.posted

    def query(self) -> bool:
        stream = self._stream
        if self._order <= stream.waited_through:
            return True
        if self._forward is None:
            return stream.calls > self._call
        return stream.is_over(self._forward)

    def wait(self) -> None:
        """Orders a stream, of which there is one here."""

    def synchronize(self) -> None:
        self._number.tolist()
        self._stream.waited_through = max(self._stream.waited_through, self._order)


class ArrivingReadBack(ReadBack):
    """Numbers that are sent on ``stream``."""

    def __init__(self, device: str | torch.device, stream: Stream) -> None:
        super().__init__(device)
        self.immediate = False
        self._stream = stream

    def _mark(self, numbers: tuple[torch.Tensor, ...]) -> Any:
        return _Arrival(self._stream, numbers)


class Arriving(DeviceReleasingBand):
    one_stream = True
    streams: ClassVar[WeakKeyDictionary[Any, Stream]] = WeakKeyDictionary()

    @property
    def stream(self) -> Stream:
        if self.unified_buffer not in self.streams:
            self.streams[self.unified_buffer] = Stream(self.one_stream)
        return self.streams[self.unified_buffer]

    @functools.cached_property
    def _read_back(self) -> ReadBack:
        return ArrivingReadBack(self.device, self.stream)

    def set_latest_forward_done_event(self, event: Any) -> None:
        super().set_latest_forward_done_event(None if event is None else self.stream.launch(event))

    def set_inflight_forward(self, forward_done: Any, out_cache_loc_virtual: torch.Tensor | None) -> None:
        super().set_inflight_forward(self.stream.launch(forward_done), out_cache_loc_virtual)


def calls_counted(made: type[Any]) -> type[Any]:
    def counted(name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with self.stream.call():
                return getattr(super(made, self), name)(*arguments, **keywords)

        return call

    for name in CALLS:
        if hasattr(made, name):
            setattr(made, name, counted(name))
    return made


@calls_counted
class ArrivingEnd(Arriving, DeviceMultiEndedAllocator):
    pass


@calls_counted
class ArrivingFloat(Arriving, DeviceFloatMultiEndedAllocator):
    pass


class OwnStreamEnd(ArrivingEnd):
    one_stream = False


class OwnStreamFloat(ArrivingFloat):
    one_stream = False
