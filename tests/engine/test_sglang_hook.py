"""The hooks on SGLang's own allocators, of whichever version is installed: what is recorded replays on kvtape's allocator, call by call."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recorder.engines import sglang as engine
from recorder.engines import sglang_requests
from recorder.engines.registry import require_known_version
from recorder.process import Recorder
from recorder.settings import Settings
from recorder.trace import TraceReader
from replayer.replay import ReplayOptions, replay
from replayer.targets_sglang import sglang_version
from tests.recorder.recordings import settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() is None, reason="SGLang is not installed (tools/build_sglang_env.sh)"
    ),
]


class Stream:
    """A stream on which everything has happened already."""

    def wait_event(self, event: Any) -> None:
        event.fired = True

    def wait_stream(self, stream: Any) -> None: ...


class Event:
    """Fires when told to, or when something waits for it."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired


class Pages:
    """Moves nothing: which page goes where is what the test is about."""

    def move_physical_pages(self, dst: Any, src: Any, page_size: int) -> None: ...

    def move_kv_cache(self, dst: Any, src: Any) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what SGLang's modules do on the way in is their business
        found = engine._allocator_module()
        importlib.import_module("sglang.srt.mem_cache.unified_memory_pool")
        for name in (engine.SWA_MODULE, sglang_requests.CACHE_MODULE, sglang_requests.REQUEST_MODULE):
            sglang_requests.find(name, "")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    before = dict(vars(found.MultiEndedAllocator))
    yield found
    assert dict(vars(found.MultiEndedAllocator)) == before


def sub_pools(module: Any, page_size: int) -> tuple[Any, Any]:
    """`full`, which owns the ids and grows down, and `swa`, which uses them and grows up."""
    memory = importlib.import_module("sglang.srt.mem_cache.unified_memory_pool")
    specs = [
        memory.MHASubPoolSpec(
            name=name, layer_num=layers, grow_direction=direction, head_num=1, head_dim=16, store_dtype=torch.float16
        )
        for name, layers, direction in (("full", 2, "down"), ("swa", 1, "up"))
    ]  # fmt: skip
    buffer = memory.UnifiedKVPool(
        total_bytes=64 * 1024 * page_size, sub_pool_specs=specs, device="cpu", enable_memory_saver=False, page_size=page_size,
    )  # fmt: skip
    common: dict[str, Any] = {
        "kvcache": Pages(), "unified_buffer": buffer, "device": "cpu", "page_size": page_size, "lazy_compaction": True,
    }  # fmt: skip
    full = module.MultiEndedAllocator(sub_pool_name="full", is_id_owner=True, **common)
    ids = {} if sglang_version() == "0.5.18" else {"virtual_num_pages": full.num_virtual_ids}
    swa = module.MultiEndedAllocator(sub_pool_name="swa", is_id_owner=False, **ids, **common)
    full.bind_peer(swa)
    swa.bind_peer(full)
    return full, swa


def drive(full: Any, swa: Any, seed: int, calls: int) -> list[Any]:
    """Seeded calls as a scheduler makes them, with forwards that finish late. Returns what was answered."""
    chance = random.Random(seed)
    size = full.page_size
    live: list[torch.Tensor] = []
    answers: list[Any] = []
    events: list[Event] = []
    while len(answers) < calls:
        answers.append(None)
        step = chance.random()
        if step < 0.45:
            tokens = full.alloc(size * chance.randint(1, 6))
            if tokens is None or not fits(swa, tokens, size):
                if tokens is not None:
                    full.free(tokens)
                for allocator in (full, swa):
                    allocator._flush(urgent=True)
                continue
            swa.alloc_with_virtual(tokens[::size] // size)
            answers[-1] = tokens.tolist()
            live.append(tokens)
        elif step < 0.85 and live:
            tokens = live.pop(chance.randrange(len(live)))
            swa.free(tokens)
            full.free(tokens)
        elif step < 0.93 and live:
            event = Event()
            events.append(event)
            written = live[chance.randrange(len(live))]
            for allocator in (full, swa):
                allocator.set_latest_forward_done_event(event)
                allocator.set_inflight_forward(event, written)
            if len(events) > 1:
                events[-2].fired = True
        else:
            answers[-1] = [full.flush_opportunistic(), swa.flush_opportunistic()]
    return answers


def fits(swa: Any, tokens: torch.Tensor, size: int) -> bool:
    return bool(swa.available_size() >= tokens.numel())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_replays(module: Any, tmp_path: Path, page_size: int, seed: int) -> None:
    recorder = Recorder(settings(tmp_path, state_every=32, on_overflow="block"))
    require_known_version(engine)
    engine.attach(recorder)
    try:
        full, swa = sub_pools(module, page_size)
        drive(full, swa, seed, 800)
    finally:
        recorder.stop()
    assert recorder.failure == ""
    path = recorder.sessions[0].path
    with TraceReader(path) as reader:
        assert reader.header.engine_version == sglang_version()
        assert len(list(reader.states())) > 20
    outcome = replay(ReplayOptions(path, ledger=False))
    assert outcome.failure is None
    assert sum(flush.moves for flush in outcome.flushes) > 50
    same_placement = sglang_version() == "0.5.23"
    assert (outcome.ids == "recorded") is same_placement
    assert outcome.held["C15"] > (200 if same_placement else 20)


@pytest.mark.parametrize("at", [1, 2, 5, 300])
def test_answers_are_those_without_a_recorder_whatever_happens_to_it(
    module: Any, tmp_path: Path, at: int
) -> None:
    plain = drive(*sub_pools(module, 4), 7, 400)

    left = at

    def failing(ids: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("a fault of the recorder")
        return capture(ids)

    chosen: Settings = settings(tmp_path)
    recorder = Recorder(chosen)
    capture = recorder.staging.capture
    recorder.staging.capture = failing
    engine.attach(recorder)
    try:
        assert drive(*sub_pools(module, 4), 7, 400) == plain
        assert "a fault of the recorder" in recorder.failure
        assert len(recorder.hooks) == 0
    finally:
        recorder.stop()
