"""vLLM's hook against small stand-ins of its classes, checked with the lifetimes that reference counts give.

The stand-ins keep what the hook relies on: a free queue that gives unhashed blocks first, hashes that survive a release and are lost when
the block is handed out, one-shot iterables, blocks of other pools, a null block that turns up in lists.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recorder.engines.vllm import TAPE, VllmHooks
from recorder.process import Recorder
from recorder.settings import Settings
from recorder.trace import EventKind, Header, MarkCode, TraceReader

pytestmark = pytest.mark.cpu


class Block:
    __slots__ = ("_block_hash", "block_id", "is_null", "pool", "ref_cnt")

    def __init__(self, block_id: int, pool: Any) -> None:
        self.block_id, self.pool = block_id, pool
        self.ref_cnt = 0
        self._block_hash: bytes | None = None
        self.is_null = False


class Reference:
    """What lives, told by the pool itself at every change, in the order it happens."""

    def __init__(self) -> None:
        self.lives: list[tuple[str, tuple[int, ...]]] = []

    def add(self, what: str, blocks: Iterable[int]) -> None:
        given = tuple(blocks)
        if given:
            self.lives.append((what, given))


def make_classes() -> SimpleNamespace:
    """Classes of their own for each test: the hook wraps what it is given."""

    class BlockPool:
        def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
            self.num_gpu_blocks, self.enable_caching = num_gpu_blocks, enable_caching
            self.hash_block_size = hash_block_size
            self.blocks = [Block(number, self) for number in range(num_gpu_blocks)]
            self.blocks[0].is_null = True
            self.null_block = self.blocks[0]
            self.free_queue = deque(self.blocks[1:])
            self.reference = Reference()
            self.pinned: set[int] = set()

        def get_new_blocks(self, num_blocks: int) -> list[Block]:
            if num_blocks > len(self.free_queue):
                raise ValueError("short")
            blocks = [self.free_queue.popleft() for _ in range(num_blocks)]
            kept = [
                block.block_id
                for block in blocks
                if block._block_hash is not None or block.block_id in self.pinned
            ]
            self.reference.add("free", kept)
            self.pinned.difference_update(kept)
            for block in blocks:
                block._block_hash = None
                block.ref_cnt += 1
            self.reference.add("alloc", [block.block_id for block in blocks])
            return blocks

        def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
            first, last = [], []
            others: dict[Any, list[Block]] = {}
            for block in ordered_blocks:
                if block.pool is not None and block.pool is not self:
                    others.setdefault(block.pool, []).append(block)
                    continue
                block.ref_cnt -= 1
                if block.ref_cnt == 0 and not block.is_null:
                    hashed = block._block_hash is not None and self.enable_caching
                    (last if hashed else first).append(block)
            self.free_queue.extendleft(reversed(first))
            self.free_queue.extend(last)
            self.reference.add("free", [block.block_id for block in first])
            self.pinned.difference_update(block.block_id for block in first)
            for pool, blocks in others.items():
                pool.free_blocks(blocks)

        def unpin_blocks(self, blocks: Iterable[Block]) -> None:
            for block in blocks:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    self.pinned.add(block.block_id)
                    self.free_queue.append(block)

        def touch(self, blocks: Iterable[Block]) -> None:
            for block in blocks:
                if block.ref_cnt == 0 and not block.is_null:
                    self.free_queue.remove(block)
                block.ref_cnt += 1

        def move_block_hashes(self, src_block: Block, dst_block: Block) -> None:
            src_block._block_hash, dst_block._block_hash = None, src_block._block_hash

        def evict_blocks(self, block_ids: set[int]) -> None:
            gone = []
            for number in block_ids:
                assert number < len(self.blocks)
                block = self.blocks[number]
                if block._block_hash is not None and block.ref_cnt == 0:
                    gone.append(number)
                    self.pinned.discard(number)
                block._block_hash = None
            self.reference.add("free", gone)

        def reset_prefix_cache(self) -> bool:
            if len(self.free_queue) != self.num_gpu_blocks - 1:
                return False
            kept = [
                block.block_id
                for block in self.blocks
                if block._block_hash is not None or block.block_id in self.pinned
            ]
            for block in self.blocks:
                block._block_hash = None
            self.pinned.clear()
            self.reference.add("free", sorted(kept))
            return True

    class KVCacheCoordinator:
        def __init__(self, kv_cache_config: Any, enable_caching: bool, hash_block_size: int) -> None:
            self.block_pool = BlockPool(kv_cache_config.num_blocks, enable_caching, hash_block_size)

    class KVCacheManager:
        def __init__(self, kv_cache_config: Any, enable_caching: bool, hash_block_size: int) -> None:
            self.coordinator = KVCacheCoordinator(
                kv_cache_config=kv_cache_config,
                enable_caching=enable_caching,
                hash_block_size=hash_block_size,
            )
            self.block_pool = self.coordinator.block_pool
            self.held: dict[str, list[Block]] = {}

        def allocate_slots(self, request: Any, num_new_tokens: int) -> list[Block] | None:
            count = -(-num_new_tokens // self.block_pool.hash_block_size)
            if count > len(self.block_pool.free_queue):
                return None
            blocks = self.block_pool.get_new_blocks(count)
            self.held.setdefault(request.request_id, []).extend(blocks)
            return blocks

        def free(self, request: Any) -> None:
            self.block_pool.free_blocks(reversed(self.held.pop(request.request_id, [])))

    class Scheduler:
        def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
            self.requests: dict[str, Any] = {}
            caching = vllm_config.cache_config.enable_prefix_caching
            self.kv_cache_manager = KVCacheManager(kv_cache_config, caching, 16)

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request

        def _free_request(self, request: Any) -> None:
            self.kv_cache_manager.free(request)
            del self.requests[request.request_id]

        def _preempt_request(self, request: Any, timestamp: float) -> None:
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0

        def schedule(self) -> Any:
            scheduled = dict.fromkeys(self.requests, 1)
            return SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=len(scheduled))

    return SimpleNamespace(
        pool=BlockPool, coordinator=KVCacheCoordinator, manager=KVCacheManager, scheduler=Scheduler
    )


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


def cache_config(num_blocks: int = 40, block_size: int = 16, block_bytes: int = 2048) -> Any:
    spec = SimpleNamespace(
        block_size=block_size,
        page_size_bytes=block_bytes,
        num_kv_heads=2,
        head_size=32,
        dtype="torch.bfloat16",
    )
    group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec)
    tensor = SimpleNamespace(size=num_blocks * block_bytes)
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group], kv_cache_tensors=[tensor])


def engine_config(**parallel: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="/models/of/somebody/Tiny-1B", max_model_len=512),
        cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=8, policy="fcfs", scheduler_cls=object),
        parallel_config=SimpleNamespace(**parallel),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
    )


def request(name: str, prompt: int = 40) -> Any:
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=prompt, num_tokens=prompt + 2, num_computed_tokens=prompt + 1
    )


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
