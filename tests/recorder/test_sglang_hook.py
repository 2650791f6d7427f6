"""The hooks on SGLang's sub-pool allocators, here on kvtape's own, which have the same names. With SGLang's: tests/engine."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allocator
from allocator.errors import AllocatorError
from recorder.engines.sglang import SglangHooks
from recorder.engines.sglang_header import Engine
from recorder.hooks import MissingFunction
from recorder.process import Recorder
from recorder.staging import Staging
from recorder.state_digest import mix64_on_device
from recorder.trace import EventKind, ImpossibleEvent, TraceReader
from recorder.trace.digests import mix64
from replayer.calling import FlushRecord
from replayer.replay import ReplayOptions, replay
from tests.allocator.pools import two_ends
from tests.recorder.fake_cuda import FakeCuda
from tests.recorder.recordings import TRACES, events_of, hooked, record_replay, settings

pytestmark = pytest.mark.cpu


def classes() -> list[type]:
    """Every class whose methods could be wrapped."""
    found: dict[type, None] = {}
    for owner in (allocator.MultiEndedAllocator, allocator.FloatMultiEndedAllocator):
        found.update(dict.fromkeys(owner.__mro__[:-1]))
    return list(found)


@pytest.mark.parametrize("trace", ["sglang_tiny_swa_p1", "sglang_tiny_swa_p16", "sglang_smollm2_swa_p16"])
def test_a_recording_of_a_replay_is_the_trace_again(trace: str, tmp_path: Path) -> None:
    source = TRACES / f"{trace}.msgpack.zst"
    recorded = record_replay(source, tmp_path, until=3000)
    assert recorded.recorder.failure == ""
    assert recorded.outcome.failure is None
    expected = [event for event in events_of(source, until=3000) if event[0] != "MARK"]
    assert events_of(recorded.path) == expected


def test_what_was_recorded_replays_with_the_states_it_has(tmp_path: Path) -> None:
    source = TRACES / "sglang_tiny_swa_p1.msgpack.zst"
    recorded = record_replay(source, tmp_path, until=2000, state_every=50)
    outcome = replay(ReplayOptions(recorded.path, ledger=False))
    assert outcome.failure is None
    with TraceReader(recorded.path) as reader:
        rows = list(reader.states())
    assert len(rows) >= 35
    figures = rows[-1].pools["full"]
    assert {"virtual_to_physical_mix64", "free_virtual_ids_mix64", "available_size", "watermark"} <= set(
        figures
    )
    assert outcome.held["C15"] > 30 * len(figures)


def test_a_state_that_the_engine_did_not_have_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(range(10**6))
    monkeypatch.setattr(
        "recorder.engines.sglang_tape.mix64_on_device", lambda ids: torch.tensor([next(digests)])
    )
    recorded = record_replay(TRACES / "sglang_tiny_swa_p1.msgpack.zst", tmp_path, until=300, state_every=100)
    outcome = replay(ReplayOptions(recorded.path, ledger=False))
    assert outcome.failure is not None
    assert outcome.failure.check == "C15"


def test_nothing_is_wrapped_before_and_after_twice(tmp_path: Path) -> None:
    before = [dict(vars(cls)) for cls in classes()]
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        recorder = Recorder(settings(tmp_path / run))
        hooked(recorder)
        assert len(recorder.hooks) > 15
        assert [dict(vars(cls)) for cls in classes()] != before
        full, swa = two_ends()
        tokens = full.alloc(8)
        full.free(tokens)
        recorder.stop()
        assert [dict(vars(cls)) for cls in classes()] == before
        assert not [name for name in (*vars(full), *vars(swa)) if "kvtape" in name]
        assert [event[0] for event in events_of(recorder.sessions[0].path)] == ["ALLOC", "FREE"]


def test_the_scenario_with_two_batches_for_one_event(tmp_path: Path) -> None:
    source = TRACES / "synthetic_two_batches_one_event.msgpack.zst"
    recorded = record_replay(source, tmp_path)
    assert recorded.outcome.failure is None
    assert [event[0] for event in events_of(recorded.path)].count("FLUSH") == 4
    assert replay(ReplayOptions(recorded.path, ledger=False)).failure is None


class Faulty(Staging):
    """Fails at the capture number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(1 << 20)
        left, whole = at, self.capture

        def capture(ids: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise MemoryError("a fault of the recorder")
            return whole(ids)

        self.capture = capture


@pytest.mark.parametrize("at", [1, 2, 3, 50, 51, 52, 53])
def test_a_hook_that_raises_does_not_reach_the_engine(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = TRACES / "sglang_tiny_swa_p1.msgpack.zst"
    recorded = record_replay(source, tmp_path, until=400, staging=Faulty(at))
    # Same answers to every call as the engine's: C13 and C15 compared them.
    assert recorded.outcome.failure is None
    assert recorded.outcome.events == 400
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "a fault of the recorder" in errors[0]
    assert len(recorded.recorder.hooks) == 0
    recorded.recorder.stop()
    if at > 3:
        with TraceReader(recorded.path) as reader:
            list(reader.items())
            assert reader.footer is not None
            assert "a fault of the recorder" in reader.footer.reason
        found = events_of(recorded.path)
        assert 0 < len(found) < 400
        assert found == events_of(source, until=len(found))


def syncs(flush: FlushRecord) -> tuple[int, int, int, int]:
    return flush.seq, flush.device_to_host, flush.host_to_device, flush.waits


def test_no_synchronisation_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's counts with and without recording, ids taken the way they are taken from a GPU."""
    from replayer import ledger as ledger_module

    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    source = TRACES / "sglang_tiny_swa_p1.msgpack.zst"
    plain = replay(ReplayOptions(source, until=3000, drain=False))
    ledgers: list[Any] = []
    make = ledger_module.SyncLedger.__init__

    def remembered(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        ledgers.append(self)

    monkeypatch.setattr(ledger_module.SyncLedger, "__init__", remembered)

    def declare_pinned(buffer: torch.Tensor) -> None:
        for each in ledgers:
            each.host(buffer, pinned=True)

    cuda = FakeCuda(on_pinned=declare_pinned)
    recorded = record_replay(
        source, tmp_path, until=3000, ledger=True, staging=Staging(1 << 24, cuda=cuda), state_every=100
    )
    assert recorded.recorder.failure == ""
    assert recorded.recorder.sessions[0].dropped == 0
    assert len(cuda.events) > 2000
    assert [syncs(flush) for flush in recorded.outcome.flushes] == [syncs(flush) for flush in plain.flushes]
    assert recorded.outcome.sync_calls == plain.sync_calls
    assert sum(syncs(flush)[1] for flush in plain.flushes) > 0
    assert recorded.outcome.sync_lines == plain.sync_lines


def test_a_call_that_raises_is_recorded_and_raises(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends()
        tokens = full.alloc(8)
        full.free(tokens)
        with pytest.raises(AllocatorError):
            full.free(tokens)
        full.alloc(4)
    finally:
        recorder.stop()
    assert [event[0] for event in events_of(recorder.sessions[0].path)] == ["ALLOC", "FREE", "FREE", "ALLOC"]
    # A replay names the call that raised.
    with pytest.raises(ImpossibleEvent, match=r"event 2 \(free\) cannot have happened: C13"):
        replay(ReplayOptions(recorder.sessions[0].path, ledger=False))


def test_a_flush_inside_an_alloc_is_nested_and_not_driven(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, swa = two_ends()
        tokens = swa.alloc(swa.available_size())
        swa.free(tokens[:4])
        full.alloc(full.available_size() + 4)
    finally:
        recorder.stop()
    with TraceReader(recorder.sessions[0].path) as reader:
        (chunk,) = list(reader.chunks())
    depths = [
        (EventKind(int(kind)).name, int(depth)) for kind, depth in zip(chunk.kind, chunk.depth, strict=True)
    ]
    assert ("FLUSH", 1) in depths
    assert depths[-1] == ("ALLOC", 0)
    assert replay(ReplayOptions(recorder.sessions[0].path, ledger=False)).failure is None


def test_a_gate_that_shuts_and_opens(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    is_open = True
    try:
        full, swa = two_ends()

        def gate() -> bool:
            return is_open

        swa.disagg_move_gate = full.disagg_move_gate = gate
        tokens = swa.alloc(16)
        swa.free(tokens[:4])
        is_open = False
        swa.flush_for_allocation()
        is_open = True
        swa.flush_for_allocation()
    finally:
        recorder.stop()
    assert swa.disagg_move_gate is gate
    kinds = [(event[0], event[2]) for event in events_of(recorder.sessions[0].path)]
    assert kinds == [
        ("ALLOC", 16),
        ("FREE", -1),
        ("MOVE_GATE", 0),
        ("FLUSH", 1),
        ("MOVE_GATE", 1),
        ("FLUSH", 1),
    ]
    assert replay(ReplayOptions(recorder.sessions[0].path, ledger=False)).failure is None


class Finished:
    """An event of a forward."""

    def query(self) -> bool:
        return True


def test_one_event_announced_to_pools_one_after_another_keeps_its_number(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, swa = two_ends()
        first, second = Finished(), Finished()
        full.set_latest_forward_done_event(first)
        full.set_latest_forward_done_event(second)
        swa.set_latest_forward_done_event(first)
        swa.set_latest_forward_done_event(second)
    finally:
        recorder.stop()
    assert [event[2] for event in events_of(recorder.sessions[0].path)] == [1, 2, 1, 2]


class WithItsOwnAlloc(allocator.MultiEndedAllocator):
    """Somebody's subclass."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return super().alloc(need_size)


def test_methods_that_a_subclass_defines_anew_are_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.allocator.pools.MultiEndedAllocator", WithItsOwnAlloc)
    before = dict(vars(WithItsOwnAlloc))
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends()
        full.free(full.alloc(8))
    finally:
        recorder.stop()
    assert [event[0] for event in events_of(recorder.sessions[0].path)] == ["ALLOC", "FREE"]
    assert dict(vars(WithItsOwnAlloc)) == before


def test_an_allocator_without_a_flush_is_not_recorded(tmp_path: Path) -> None:
    class MultiEndedAllocator:
        def __init__(self) -> None: ...

        def alloc(self, need_size: int) -> None: ...

    recorder = Recorder(settings(tmp_path))
    with pytest.raises(MissingFunction, match="has no alloc_extend"):
        SglangHooks(recorder, Engine("fork", "", same_placement=False)).attach(
            SimpleNamespace(MultiEndedAllocator=MultiEndedAllocator)
        )
    recorder.stop()


def test_a_buffer_that_is_given_up_ends_its_file_and_its_thread(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    threads = threading.active_count()
    try:
        for number in range(3):
            pools = two_ends()
            pools[0].alloc(8)
            session = recorder.sessions[number]
            assert session.is_writing
            del pools
            gc.collect()
            end = time.monotonic() + 20
            while not session.path.exists():
                assert time.monotonic() < end
                time.sleep(0.01)
        end = time.monotonic() + 20
        while threading.active_count() > threads:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        recorder.stop()
    assert len({each.path for each in recorder.sessions}) == 3
    for each in recorder.sessions:
        assert [event[0] for event in events_of(each.path)] == ["ALLOC"]


def test_blocking_does_not_wait_for_the_event_that_is_being_captured(tmp_path: Path) -> None:
    """Its lists fit one by one and not together: it is dropped, and counted, instead of waiting for itself."""
    recorder = Recorder(settings(tmp_path, memory=4 << 20, on_overflow="block"))
    hooked(recorder)
    try:
        full, _ = two_ends(total_bytes=1 << 20)
        event, ids = Finished(), torch.full((70_000,), 5)
        full.alloc(4)
        with pytest.raises(AllocatorError):
            full.free(ids, _pages=ids)
        full.set_latest_forward_done_event(event)
    finally:
        recorder.stop()
    session = recorder.sessions[0]
    assert session.dropped == 1
    assert [each[0] for each in events_of(session.path)] == ["ALLOC", "SET_LATEST_FORWARD_DONE_EVENT"]


def test_a_copy_of_an_allocator_is_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends()
        full.alloc(4)
        copied = copy.deepcopy(full)
        copied.alloc(4)
    finally:
        recorder.stop()
    assert len(events_of(recorder.sessions[0].path)) == 1


def test_an_event_that_is_recorded_anew_is_a_new_forward(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path))
    hooked(recorder)
    try:
        full, _ = two_ends()
        first, second = Finished(), Finished()
        for event in (first, first, second, first):
            full.set_latest_forward_done_event(event)
        full.set_latest_forward_done_event(None)
    finally:
        recorder.stop()
    assert [event[2] for event in events_of(recorder.sessions[0].path)] == [1, 1, 2, 3, -1]


@pytest.mark.parametrize("keep", [False, True])
def test_request_ids_are_hashed_unless_kept(keep: bool, tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, keep_request_ids=keep))
    hooked(recorder)
    try:
        full, _ = two_ends()
        recorder.calls.here.request = "chat-with-alice"
        full.alloc(4)
        recorder.calls.here.request = None
    finally:
        recorder.stop()
    with TraceReader(recorder.sessions[0].path) as reader:
        (chunk,) = list(reader.chunks())
    (name,) = chunk.request_ids.values()
    assert (name == "chat-with-alice") is keep
    assert keep or (len(name) == 16 and int(name, 16) >= 0)
    assert chunk.request.tolist() == [0]


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_the_devices_digest_is_the_readers(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, 1 << 40, (count,), generator=generator)
    assert int(mix64_on_device(ids)[0]) == mix64(ids.numpy())
