"""Ids from wherever they are to host memory that nobody else writes, without making the engine wait.

Host tensors are copied on the spot. A tensor on a CUDA device is copied into a ring of pinned memory by a stream of ours that waits (on
the device) for the engine's stream; the writer thread reads the copy once its event has fired. Nothing here waits for a device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from ctypes import c_char
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]
INT64: Final = torch.int64

SMALL_IDS: Final = 64
"""Up to so many ids a copy is not counted one by one against the queue's memory: ITEM_BYTES of a session has room for it."""


MEMORY: Final[Any] = (c_char * ((1 << 63) - 1)).from_address(0)
"""This process's memory by address: `MEMORY[start:end]` is a copy of it, made in a third of the time `ctypes.string_at` takes."""

Captured: TypeAlias = "list[int] | bytes | Int64Array | StagedIds | _Lost | None"
"""Ids as they wait in the queue: `bytes` are int64 in this machine's order."""


class _Lost:
    """Stands for ids that could not be copied, because copies that have not been written yet hold all the memory there is for them. The
    engine's thread goes on; the writer drops the event in its place, and counts it."""


LOST: Final = _Lost()


class Staging:
    """Captures tensors of ids of one process.

    Args:
        most_bytes: memory for large copies on the host, and as much pinned memory for ids of device tensors, taken when the first one
            comes.
        may_wait: asked when that memory is full, with the number of waits so far, whether to try again in half a millisecond; by default
            the ids are lost at once.
        cuda: stands in for `torch.cuda` in tests of the device path.
    """

    def __init__(
        self, most_bytes: int, may_wait: Callable[[int], bool] = lambda waits: False, cuda: Any = None
    ) -> None:
        self._may_wait = may_wait
        self._most_bytes = most_bytes
        self._ring_ids = most_bytes // 8
        self._rings: dict[Any, PinnedRing] = {}
        self._cuda = cuda
        #: Ids on the host are read by the engine's thread itself; false for the stand-in, to which every tensor is one on a device.
        self.only_host = cuda is None
        self._held = 0
        self._held_lock = threading.Lock()
        self.capture = self._make_capture()

    def _make_capture(self) -> Callable[[Any], Captured]:
        """`capture` as a closure: it runs several times in each call of an engine, and looking up attributes of `self` is a tenth of it."""
        only_host = self.only_host
        to_host = self._copy_large if only_host else self._copy_from_device

        def capture(ids: Any) -> Captured:
            """A copy of a tensor of integers (flattened), of a list, or None. Never raises for want of memory: LOST."""
            if ids is None:
                return None
            if type(ids) is list:
                return ids.copy()
            count = ids.numel()
            if count <= SMALL_IDS and ids.is_cpu and ids.dtype is INT64 and ids.is_contiguous() and only_host:
                start = ids.data_ptr()
                copied: bytes = MEMORY[start : start + count * 8]
                return copied
            return to_host(ids)

        return capture

    def _copy_large(self, ids: Any) -> Captured:
        """What is large, of another type or not in one piece, or on a device after all."""
        if not ids.is_cpu:
            return self._copy_from_device(ids)
        size = ids.numel() * 8
        waits = 0
        while self.held_bytes + size > self._most_bytes:
            if size > self._most_bytes or not self._wait(waits):
                return LOST
            waits += 1
        copied: Int64Array = ids.detach().reshape(-1).numpy().astype(np.int64)
        with self._held_lock:
            self._held += size
        return copied

    def _copy_from_device(self, ids: Any) -> Captured:
        ring = self._ring(ids.device)
        waits = 0
        while (piece := ring.copy(ids)) is None:
            if ids.numel() > ring.capacity // 2 or not self._wait(waits):
                return LOST
            waits += 1
        return piece

    def _wait(self, waits: int) -> bool:
        if not self._may_wait(waits):
            return False
        time.sleep(0.0005)
        return True

    def release(self, ids: Captured) -> Int64Array | None:
        """What was captured, as int64[n], in the writer's thread. None stays None."""
        if ids is None:
            return None
        if isinstance(ids, list):
            return np.array(ids, dtype=np.int64)
        if isinstance(ids, bytes):
            return np.frombuffer(ids, dtype=np.int64)
        if isinstance(ids, np.ndarray):
            with self._held_lock:
                self._held -= ids.nbytes
            return ids
        return None if isinstance(ids, _Lost) else ids.take()

    @property
    def held_bytes(self) -> int:
        """Memory of large copies that have not been released."""
        return self._held

    def _ring(self, device: Any) -> PinnedRing:
        ring = self._rings.get(device)
        if ring is None:
            ring = self._rings[device] = PinnedRing(self._ring_ids, device, self._cuda or torch.cuda)
        return ring


class PinnedRing:
    """int64 ids copied from one device, piece by piece around a ring. Pieces are read in any order; their places are free in the order
    in which they were taken."""

    def __init__(self, capacity: int, device: Any, cuda: Any) -> None:
        self._cuda, self._device = cuda, device
        self.capacity = capacity
        self.buffer = self._pinned(capacity)
        self._array: Int64Array = self.buffer.numpy()
        self._stream = cuda.Stream(device=device)
        self._head = 0
        self._free = capacity
        # Pieces in use, oldest first. The writer's thread marks them as read, the engine's threads take them off, under the lock.
        self._pieces: deque[StagedIds] = deque()
        self._lock = threading.Lock()

    def _pinned(self, capacity: int) -> Any:
        pinned = getattr(self._cuda, "pinned_ids", None)
        if pinned is not None:
            return pinned(capacity)
        return torch.empty(capacity, dtype=INT64, device="cpu", pin_memory=True)

    def copy(self, ids: Any) -> StagedIds | None:
        """Start the copy of a device tensor, and return at once; None where there is no room for it now."""
        count = ids.numel()
        with self._lock:
            place = self._place(count)
            if place is None:
                return None
            start, taken = place
            current = self._cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            with self._cuda.stream(self._stream):
                self.buffer[start : start + count].copy_(ids.reshape(-1), non_blocking=True)
                event = self._cuda.Event()
                event.record(self._stream)
            piece = StagedIds(self, start, count, taken, event)
            self._pieces.append(piece)
        # The engine may free the tensor at once: its memory must not be handed out before the copy has read it.
        ids.record_stream(self._stream)
        return piece

    def _place(self, count: int) -> tuple[int, int] | None:
        """(start, ids taken from the ring), None when it is too full. A piece never wraps around: what is skipped at the end counts as
        taken."""
        while self._pieces and self._pieces[0].was_read:
            self._free += self._pieces.popleft().taken
        wraps = self._head + count > self.capacity
        skipped = self.capacity - self._head if wraps else 0
        if count + skipped > self._free:
            return None
        start = 0 if wraps else self._head
        self._head = start + count
        self._free -= count + skipped
        return start, count + skipped

    def read(self, start: int, count: int) -> Int64Array:
        """The ids of a piece whose copy has finished."""
        ids: Int64Array = self._array[start : start + count].copy()
        return ids


class StagedIds:
    """One piece of the ring and the event that says when it holds the ids. `taken`: ids of the ring it takes, with what was skipped."""

    __slots__ = ("_count", "_event", "_ring", "_start", "taken", "was_read")

    def __init__(self, ring: PinnedRing, start: int, count: int, taken: int, event: Any) -> None:
        self._ring, self._start, self._count, self._event = ring, start, count, event
        self.taken = taken
        self.was_read = False

    def ready(self) -> bool:
        """Whether the copy has finished; never waits."""
        return bool(self._event.query())

    def take(self) -> Int64Array:
        """int64[count], once. Call it when `ready`."""
        ids = self._ring.read(self._start, self._count)
        self.was_read = True
        return ids


def arrived(item: tuple[Any, ...]) -> bool:
    """Whether every copy in a queued event, or in a tuple in it, can be read now."""
    for field in item:
        kind = type(field)
        if kind is StagedIds:
            if not field.ready():
                return False
        elif kind is tuple and not arrived(field):
            return False
    return True


def lost(item: tuple[Any, ...]) -> bool:
    """Whether ids of a queued event were lost."""
    return any(field is LOST or (type(field) is tuple and lost(field)) for field in item)
