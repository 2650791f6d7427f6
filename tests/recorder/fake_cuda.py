"""Stands in for `torch.cuda` where a test is about the order of copies and events, not about a device: see `PinnedRing`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class FakeEvent:
    """Fires when the test says so; nothing may wait for it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.recorded_on: Any = None
        self.copied = False

    def record(self, stream: Any) -> None:
        self.recorded_on = stream
        self._cuda.events.append(self)

    def query(self) -> bool:
        return self._cuda.fires or self.copied

    def synchronize(self) -> None:
        raise AssertionError("the recorder waited for the device")


class FakeStream:
    def __init__(self) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.waited_for.append(stream)

    def synchronize(self) -> None:
        raise AssertionError("the recorder waited for the device")


class FakeCuda:
    """`fires`: whether copies are over at once. `on_pinned`: told of the pinned buffer when it is made."""

    def __init__(self, fires: bool = True, on_pinned: Callable[[torch.Tensor], None] | None = None) -> None:
        self.fires = fires
        self.events: list[FakeEvent] = []
        self.engine_stream = FakeStream()
        self._on_pinned = on_pinned

    def Stream(self, device: Any) -> FakeStream:
        return FakeStream()

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: Any) -> FakeStream:
        return self.engine_stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        yield

    def pinned_ids(self, capacity: int) -> torch.Tensor:
        buffer = torch.empty(capacity, dtype=torch.int64)
        if self._on_pinned is not None:
            self._on_pinned(buffer)
        return buffer
