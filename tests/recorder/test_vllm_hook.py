"""vLLM's hook against small stand-ins of its classes, checked with the lifetimes that reference counts give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recorder.engines.vllm import TAPE, VllmHooks
from recorder.process import Recorder
from recorder.settings import Settings
from recorder.trace import EventKind, Header, MarkCode, TraceReader
from tests.recorder.fake_vllm import Block, cache_config, engine_config, make_classes, request

pytestmark = pytest.mark.cpu


def make_recorder(folder: Path, **changes: Any) -> Recorder:
    settings: dict[str, Any] = {"keep_request_ids": True, "state_every": 0, **changes}
    return Recorder(Settings(target=f"{folder}/", run="r", salt=b"s", **settings))


@pytest.fixture
def classes() -> SimpleNamespace:
    return make_classes()


@pytest.fixture
def recorder(tmp_path: Path, classes: SimpleNamespace) -> Iterator[Recorder]:
    made = make_recorder(tmp_path)
    VllmHooks(made).attach(classes.pool, classes.coordinator, classes.manager, classes.scheduler)
    yield made
    made.stop()


def read(session: Any) -> tuple[Header, list[tuple[str, tuple[int, ...]]], list[dict[str, Any]]]:
    """(header, lifetimes in the reference's form, every event) of a finished file."""
    lives: list[tuple[str, tuple[int, ...]]] = []
    events: list[dict[str, Any]] = []
    names: dict[int, str] = {-1: ""}
    with TraceReader(session.path) as reader:
        size = reader.header.pools[0].page_size
        for chunk in reader.chunks():
            names.update(chunk.request_ids)
            for index in range(len(chunk)):
                kind = EventKind(int(chunk.kind[index]))
                event = {
                    "kind": kind,
                    "value": int(chunk.value[index]),
                    "value2": int(chunk.value2[index]),
                    "request": names[int(chunk.request[index])],
                }
                if kind is EventKind.ALLOC:
                    tokens = chunk.result.get(index)
                    assert tokens is not None and len(tokens) == event["value"]
                    pages = tokens[::size] // size
                    assert tokens.tolist() == [
                        page * size + i for page in pages.tolist() for i in range(size)
                    ]
                    lives.append(("alloc", tuple(pages.tolist())))
                elif kind is EventKind.FREE:
                    tokens, listed = chunk.list0.get(index), chunk.list1.get(index)
                    assert tokens is not None and listed is not None
                    assert tokens.tolist() == [page * size for page in listed.tolist()]
                    lives.append(("free", tuple(listed.tolist())))
                events.append({**event, "pages": lives[-1][1] if kind is not EventKind.MARK else ()})
        return reader.header, lives, events


def in_order(lives: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """The order of blocks that die together says nothing."""
    return [(what, blocks if what == "alloc" else tuple(sorted(blocks))) for what, blocks in lives]


def test_lifetimes_are_those_of_the_reference_counts(classes: SimpleNamespace, recorder: Recorder) -> None:
    """A random run of everything that touches a block, with sharing, revival, copy on write, unpinning and lists holding the null block."""
    pool = classes.pool(40, True, 16)
    random_number = random.Random(5)
    held: list[list[Block]] = []
    hashes = 0
    revived_then_freed = 0
    for _ in range(3000):
        choice = random_number.random()
        if choice < 0.3 and len(pool.free_queue) >= 4:
            held.append(pool.get_new_blocks(random_number.randint(1, 4)))
        elif choice < 0.45 and held:
            for block in random_number.choice(held):
                if block._block_hash is None:
                    hashes += 1
                    block._block_hash = b"%d" % hashes
        elif choice < 0.6:
            cached = [
                block
                for block in pool.blocks[1:]
                if block._block_hash is not None or block.block_id in pool.pinned
            ]
            if cached:
                blocks = random_number.sample(cached, min(2, len(cached)))
                revived_then_freed += any(block.ref_cnt == 0 for block in blocks)
                pool.touch(blocks)
                held.append(blocks)
        elif choice < 0.63 and held:
            source = random_number.choice(held)[0]
            if source._block_hash is not None and pool.free_queue:
                held.append(pool.get_new_blocks(1))
                pool.move_block_hashes(source, held[-1][0])
        elif choice < 0.66:
            pool.evict_blocks({random_number.randrange(1, 40) for _ in range(4)})
        elif choice < 0.68 and held:
            pool.unpin_blocks(held.pop(random_number.randrange(len(held))))
        elif choice < 0.69:
            for blocks in held:
                pool.free_blocks(blocks)
            held.clear()
            assert pool.reset_prefix_cache()
        elif choice < 0.7:
            assert pool.reset_prefix_cache() is (not held)
        elif held:
            blocks = held.pop(random_number.randrange(len(held)))
            pool.free_blocks(iter([*reversed(blocks), pool.null_block]))
    recorder.stop()
    assert recorder.failure == ""
    header, lives, _ = read(recorder.sessions[0])
    assert in_order(lives) == in_order(pool.reference.lives)
    assert revived_then_freed > 50 and len(lives) > 500
    assert header.pools[0].num_pages == 40 and header.pools[0].min_page_index == 1


def test_without_prefix_caching_a_hash_keeps_nothing(classes: SimpleNamespace, recorder: Recorder) -> None:
    pool = classes.pool(8, False, 16)
    blocks = pool.get_new_blocks(2)
    blocks[0]._block_hash = b"h"
    pool.touch(blocks[1:])
    pool.free_blocks(blocks)
    recorder.stop()
    assert read(recorder.sessions[0])[1] == [("alloc", (1, 2)), ("free", (1,))]


def test_block_named_twice_in_one_list_dies_once(classes: SimpleNamespace, recorder: Recorder) -> None:
    pool = classes.pool(8, True, 16)
    block = pool.get_new_blocks(1)[0]
    pool.touch([block])
    pool.free_blocks([block, block])
    recorder.stop()
    assert read(recorder.sessions[0])[1] == [("alloc", (1,)), ("free", (1,))]


def test_null_block_is_no_block(classes: SimpleNamespace, recorder: Recorder) -> None:
    """Also when its count, which nobody keeps, happens to be 0 after a release."""
    pool = classes.pool(8, True, 16)
    blocks = pool.get_new_blocks(2)
    pool.touch([pool.null_block])
    pool.free_blocks([blocks[0], pool.null_block])
    assert pool.null_block.ref_cnt == 0
    recorder.stop()
    assert read(recorder.sessions[0])[1] == [("alloc", (1, 2)), ("free", (1,))]


def test_pools_have_files_of_their_own(classes: SimpleNamespace, recorder: Recorder) -> None:
    """One list frees blocks of two pools: each file has its own blocks, once."""
    device, host = classes.pool(10, True, 16), classes.pool(20, True, 16)
    mine, theirs = device.get_new_blocks(2), host.get_new_blocks(3)
    device.free_blocks(iter([*mine, *theirs]))
    recorder.stop()
    files = [read(session) for session in recorder.sessions]
    assert [header.pools[0].num_pages for header, _, _ in files] == [10, 20]
    assert [lives for _, lives, _ in files] == [
        [("alloc", (1, 2)), ("free", (1, 2))],
        [("alloc", (1, 2, 3)), ("free", (1, 2, 3))],
    ]


def test_list_that_grows_afterwards_is_recorded_as_it_was(
    classes: SimpleNamespace, recorder: Recorder
) -> None:
    pool = classes.pool(10, True, 16)
    blocks = pool.get_new_blocks(1)
    blocks.extend(pool.get_new_blocks(2))
    recorder.stop()
    assert read(recorder.sessions[0])[1] == [("alloc", (1,)), ("alloc", (2, 3))]


def test_requests_and_marks(classes: SimpleNamespace, recorder: Recorder) -> None:
    scheduler = classes.scheduler(engine_config(), cache_config())
    manager = scheduler.kv_cache_manager
    first, second = request("one"), request("two", 70)
    scheduler.schedule()
    scheduler.add_request(first)
    scheduler.add_request(first)  # another piece of its input: no arrival
    scheduler.add_request(second)
    manager.allocate_slots(first, 40)
    scheduler.schedule()
    assert manager.allocate_slots(second, num_new_tokens=5000) is None
    scheduler._preempt_request(first, 0.0)
    scheduler._free_request(second)
    recorder.stop()
    _, lives, events = read(recorder.sessions[0])
    assert lives == [("alloc", (1, 2, 3)), ("free", (3, 2, 1))]
    told = [
        (MarkCode(event["value"]).name, event["value2"], event["request"])
        if event["kind"] is EventKind.MARK
        else (event["kind"].name, event["pages"], event["request"])
        for event in events
    ]
    assert told == [
        ("REQUEST_ARRIVE", 40, "one"),
        ("REQUEST_ARRIVE", 70, "two"),
        ("ALLOC", (1, 2, 3), "one"),
        ("STEP", 2, ""),
        ("ALLOC_FAIL", 5000, "two"),
        ("PREEMPT", 41, "one"),
        ("FREE", (3, 2, 1), "one"),
        ("REQUEST_FINISH", 72, "two"),
    ]


def test_eviction_is_told_of_the_request_it_was_for(classes: SimpleNamespace, recorder: Recorder) -> None:
    pool = classes.scheduler(engine_config(), cache_config(num_blocks=3)).kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(2)
    for block in blocks:
        block._block_hash = b"h"
    pool.free_blocks(reversed(blocks))
    recorder.calls.here.request = "late"
    pool.get_new_blocks(1)
    recorder.calls.here.request = None
    recorder.stop()
    _, lives, events = read(recorder.sessions[0])
    assert lives == [("alloc", (1, 2)), ("free", (2,)), ("alloc", (2,))]
    assert [event["request"] for event in events] == ["", "late", "late"]


def test_header_says_what_the_pool_is(classes: SimpleNamespace, recorder: Recorder) -> None:
    parallel = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "data_parallel_index": 1,
    }
    scheduler = classes.scheduler(engine_config(**parallel), cache_config(num_blocks=40, block_bytes=2048))
    scheduler.kv_cache_manager.allocate_slots(request("one"), 16)
    recorder.stop()
    header = read(recorder.sessions[0])[0]
    pool = header.pools[0]
    assert (pool.name, pool.kind, pool.page_size, pool.entry_bytes, pool.layer_num) == (
        "blocks",
        "tokens",
        16,
        128,
        2,
    )
    assert header.total_bytes == 40 * 2048
    assert header.model == "Tiny-1B" and "/" not in str(header.settings)
    assert header.settings["placement"] == "free" and header.settings["prefix_caching"] is True
    assert header.settings["max_num_seqs"] == 8 and header.settings["max_model_len"] == 512
    assert header.rank == {"tp": 0, "pp": 0, "dp": 1, "tp_size": 4, "dp_size": 2}
    assert recorder.sessions[0].path.name.startswith("vllm.tp0-pp0-dp1.")
    assert pool.extra["groups"][0]["dtype"] == "bfloat16"
    assert "entry_bytes" not in header.extra


def test_offloading_pool_is_on_the_host(classes: SimpleNamespace, recorder: Recorder) -> None:
    """The configuration it is made from is not the scheduler's."""

    class Offloading(classes.scheduler):  # type: ignore[misc, name-defined]
        def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config, kv_cache_config)

    config = cache_config()
    original = classes.manager.__init__

    def with_host_tier(manager: Any, *args: Any, **kwargs: Any) -> None:
        manager.host = classes.coordinator(cache_config(num_blocks=99), True, 16)
        original(manager, *args, **kwargs)

    classes.manager.__init__ = with_host_tier
    scheduler = Offloading(vllm_config=engine_config(), kv_cache_config=config)
    scheduler.kv_cache_manager.host.block_pool.get_new_blocks(1)
    recorder.stop()
    header = read(recorder.sessions[0])[0]
    assert header.device == "cpu" and header.pools[0].num_pages == 99


@pytest.mark.parametrize(
    ("block_size", "block_bytes", "page_size", "entry"),
    [(16, 2048, 16, 128), (528, 528 * 96, 176, 288), (16, 2040, 8, 255), (7, 11, 1, 11)],
)
def test_block_becomes_a_page_that_a_replay_takes(
    classes: SimpleNamespace,
    recorder: Recorder,
    block_size: int,
    block_bytes: int,
    page_size: int,
    entry: int,
) -> None:
    config = cache_config(block_size=block_size, block_bytes=block_bytes)
    classes.scheduler(engine_config(), config).kv_cache_manager.block_pool.get_new_blocks(1)
    recorder.stop()
    header = read(recorder.sessions[0])[0]
    assert (header.pools[0].page_size, header.pools[0].entry_bytes) == (page_size, entry)
    assert ("page_note" in header.extra) is (page_size != block_size)
    assert header.total_bytes == 40 * block_bytes


def test_pool_without_configuration_has_nominal_bytes(classes: SimpleNamespace, recorder: Recorder) -> None:
    classes.pool(8, False, 16).get_new_blocks(1)
    recorder.stop()
    header = read(recorder.sessions[0])[0]
    assert "nominal" in header.extra["entry_bytes"] and header.settings["prefix_caching"] is False


def test_fault_of_ours_stays_ours(classes: SimpleNamespace, recorder: Recorder) -> None:
    """The engine's call returns what it would, recording ends, and nothing of it is left."""
    bare = make_classes().pool.get_new_blocks.__code__
    pool = classes.pool(8, True, 16)
    pool.get_new_blocks(1)
    pool.blocks[2] = None  # the hook reads attributes it does not have
    pool.__dict__[TAPE].live = None
    pool.__dict__[TAPE].session.clock_ns = None
    blocks = pool.get_new_blocks(1)
    assert [block.block_id for block in blocks] == [2]
    assert not recorder.active and "TypeError" in recorder.failure
    assert TAPE not in pool.__dict__ and len(recorder.hooks) == 0
    assert (
        classes.pool.get_new_blocks.__code__ is bare
        or classes.pool.get_new_blocks.__name__ == "get_new_blocks"
    )
    pool.free_blocks(blocks)
    assert pool.get_new_blocks(1)[0].block_id == 2


def test_errors_of_the_engine_pass_through(classes: SimpleNamespace, recorder: Recorder) -> None:
    pool = classes.pool(4, True, 16)
    with pytest.raises(ValueError, match="short"):
        pool.get_new_blocks(9)
    with pytest.raises(AssertionError):
        pool.evict_blocks({100})
    assert recorder.active and recorder.sessions == []
    manager = classes.manager(cache_config(), True, 16)
    manager.block_pool.get_new_blocks = None
    with pytest.raises(TypeError):
        manager.allocate_slots(request("one"), 16)
    assert recorder.calls.here.request is None


def test_dropped_events_leave_a_consistent_trace(tmp_path: Path, classes: SimpleNamespace) -> None:
    """A release that was dropped: the block dies before it is handed out again. An allocation that was dropped: its release is none."""
    recorder = make_recorder(tmp_path)
    VllmHooks(recorder).attach(classes.pool, classes.coordinator, classes.manager, classes.scheduler)
    pool = classes.pool(8, True, 16)
    blocks = pool.get_new_blocks(2)
    session = recorder.sessions[0]
    room, session.most_items = session.most_items, 0
    pool.free_blocks(blocks)
    unseen = pool.get_new_blocks(1)
    session.most_items = room
    pool.free_blocks(unseen)
    pool.get_new_blocks(3)
    recorder.stop()
    _, lives, _ = read(session)
    assert session.dropped == 2
    assert lives == [("alloc", (1, 2)), ("free", (1,)), ("free", (2,)), ("alloc", (1, 2, 3))]


def test_states_count_what_lives(tmp_path: Path, classes: SimpleNamespace) -> None:
    recorder = make_recorder(tmp_path, state_every=2)
    VllmHooks(recorder).attach(classes.pool, classes.coordinator, classes.manager, classes.scheduler)
    pool = classes.pool(8, True, 16)
    kept = pool.get_new_blocks(3)
    pool.free_blocks(pool.get_new_blocks(2))
    pool.free_blocks(kept)
    recorder.stop()
    with TraceReader(recorder.sessions[0].path) as reader:
        states = [(row.after_seq, row.pools["blocks"]) for row in reader.states()]
    assert states == [(1, {"allocated_count": 80}), (3, {"allocated_count": 0})]


def test_nothing_is_recorded_of_pools_made_before(tmp_path: Path, classes: SimpleNamespace) -> None:
    pool = classes.pool(8, True, 16)
    recorder = make_recorder(tmp_path)
    VllmHooks(recorder).attach(classes.pool, classes.coordinator, classes.manager, classes.scheduler)
    pool.free_blocks(pool.get_new_blocks(2))
    assert pool.reset_prefix_cache()
    recorder.stop()
    assert recorder.sessions == [] and recorder.failure == ""
