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
from tests.recorder.recordings import hooked, settings

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


@pytest.mark.xfail(strict=True, reason="a flush that the device found needless is recorded as an urgent one")
def test_packing_that_is_left_to_the_device_replays_as_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alloc fits as everything lies, which only the device knows: nothing is packed, and nothing may be in a replay."""
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
            made.free_segment(pages[-5:].reshape(-1), start_pos=0)
            made.set_latest_forward_done_event(Event())
            made.flush_opportunistic()  # gives back borders; as far as the host knows it may have moved pages
            made.free_segment(pages[2:5].reshape(-1), start_pos=0)
            assert made.alloc(4 * PAGE) is not None
        assert left == [True]
        assert composite_state(recorded) == composite_state(plain)
        tape = hooks._tapes[id(recorded.unified_buffer)]
        assert tape.session is not None
        tape.put_state(tape.session)
    finally:
        _Held.let_go.set()
        recorder.stop()
    assert recorder.failure == ""
    outcome = replay(ReplayOptions(tape.session.path, ledger=False))
    assert outcome.failure is None
    assert outcome.held["C15"] > 0
