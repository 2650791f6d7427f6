"""Recordings under a composite: what it does to its sub-pools is recorded there, call for call, and replays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator.device_end import DeviceMultiEndedAllocator
from allocator.late_room import LateRoom
from recorder.process import Recorder
from replayer.replay import ReplayOptions, replay
from tests.allocator.composite_state import composite_state
from tests.allocator.delayed import NeverReadBack, _LateEvent
from tests.allocator.small_composites import ENDS, make
from tests.engine.composites import Event
from tests.recorder.recordings import events_of, hooked, settings

pytestmark = pytest.mark.cpu

PAGE = 4


class _Held(_LateEvent):
    """Whoever waits in another thread, as a recorder's writer does for the number of moves, waits until the test lets go: a GPU's numbers
    do not come sooner because somebody waits for them."""

    let_go = threading.Event()

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.let_go.wait(30)
        super().synchronize()


class _HeldReadBack(NeverReadBack):
    def _mark(self, numbers: tuple[torch.Tensor, ...]) -> Any:
        return _Held(self, numbers)


@pytest.mark.parametrize(
    ("before", "after", "wanted", "flushes"),
    [(slice(-5, None), slice(2, 5), 4, 1), (slice(2, 5), slice(0, 0), 3, 2)],
    ids=["it fits as everything lies", "it does not"],
)
def test_packing_that_is_left_to_the_device_replays_as_what_it_was(
    before: slice, after: slice, wanted: int, flushes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an alloc fits as everything lies only the device knows. If it does nothing is packed, and nothing may be in a replay."""
    monkeypatch.setattr(DeviceMultiEndedAllocator, "read_back_class", _HeldReadBack)
    left: list[bool] = []
    pack = LateRoom.pack_both_if_lacking
    monkeypatch.setattr(
        LateRoom, "pack_both_if_lacking", lambda *arguments: left.append(pack(*arguments)) or left[-1]
    )
    _Held.let_go.clear()
    recorder = Recorder(settings(tmp_path, state_every=10**6))
    hooks = hooked(recorder)
    try:
        recorded, plain = make(ENDS, PAGE, strategy="device"), make(ENDS, PAGE)
        for made in (recorded, plain):
            tokens = torch.cat([made.alloc(PAGE) for _ in range(made.available_size() // PAGE)])
            pages = tokens.reshape(-1, PAGE)
            made.free_segment(pages[before].reshape(-1), start_pos=0)
            made.set_latest_forward_done_event(Event())
            made.flush_opportunistic()  # gives back borders; as far as the host knows it may have moved pages
            made.free_segment(pages[after].reshape(-1), start_pos=0)
            assert made.alloc(wanted * PAGE) is not None
        assert left == [True]
        assert composite_state(recorded) == composite_state(plain)
        tape = hooks._tapes[id(recorded.unified_buffer)]
        assert tape.session is not None
        tape.put_state(tape.session)
    finally:
        _Held.let_go.set()
        recorder.stop()
    assert recorder.failure == ""
    recorded_flushes = [event for event in events_of(tape.session.path) if event[0] == "FLUSH"]
    assert len(recorded_flushes) == 2 * flushes  # of either pool
    outcome = replay(ReplayOptions(tape.session.path, ledger=False))
    assert outcome.failure is None
    assert outcome.held["C15"] > 0
