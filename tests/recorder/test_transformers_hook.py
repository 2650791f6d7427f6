"""transformers' hook against small stand-ins of its cache, pool, allocators and schedulers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recorder.engines.transformers import TAPE, TransformersHooks
from recorder.process import Recorder
from recorder.settings import Settings
from recorder.trace import EventKind, Header, MarkCode, TraceReader

pytestmark = pytest.mark.cpu


def make_classes() -> SimpleNamespace:
    """Classes of their own for each test: the hook wraps what it is given."""

    class CachePool:
        def __init__(self, num_blocks: list[int]) -> None:
            self.num_blocks = num_blocks
            self.reset()

        def reset(self) -> None:
            self.free = [list(range(count - 1, 1, -1)) for count in self.num_blocks]

        def get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
            if num_blocks > len(self.free[index]):
                raise ValueError("short")
            return [self.free[index].pop() for _ in range(num_blocks)]

        def free_blocks(self, index: int, block_ids: list[int]) -> None:
            self.free[index].extend(block_ids)

    class CacheAllocator:
        tokens_per_page = 16
        head_dim, num_key_value_heads, cache_dtype = 8, 2, "torch.bfloat16"

        def __init__(self, layer_type: str, index: int, layers: int, pool: CachePool) -> None:
            self.layer_type, self.index, self.pool = layer_type, index, pool
            self.layer_indices = list(range(layers))
            self.bytes_per_block = 1024 * layers
            self.blocks_per_sector = 2 // layers
            self.block_table: dict[str, list[int]] = {}

        def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
            self.pool.free_blocks(self.index, self.block_table.pop(request_id, []))

        def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> None:
            self.block_table[dest_request_id] = self.pool.get_free_blocks(self.index, 1)

        def mark_complete_blocks(self, request_id: str) -> None:
            """The request's last block duplicates another one."""
            self.pool.free_blocks(self.index, [self.block_table[request_id].pop()])

    class FullAttentionCacheAllocator(CacheAllocator):
        def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
            table = self.block_table.setdefault(request_id, [])
            table.extend(self.pool.get_free_blocks(self.index, -(-query_length // 16)))

    class PagedAttentionCache:
        use_prefix_sharing, num_sectors, bytes_per_sector, max_batch_tokens = True, 8, 2048, 64

        def __init__(
            self, config: Any, continuous_batching_config: Any, device: Any, distributed_helper: Any
        ) -> None:
            self.config, self.device = config, device
            self.pool = CachePool([20, 10])
            self.cache_tensor = SimpleNamespace(numel=lambda: 10 * 2048)
            self.cache_allocators = {
                "full_attention": FullAttentionCacheAllocator("full_attention", 0, 1, self.pool),
                "sliding_attention": FullAttentionCacheAllocator("sliding_attention", 1, 2, self.pool),
            }

        def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
            fits = all(len(free) >= -(-request_len // 16) for free in self.pool.free)
            if fits and not dry_run:
                for allocator in self.cache_allocators.values():
                    allocator.allocate_cache_to_request(state.request_id, 0, request_len)
            return fits

        def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
            for allocator in self.cache_allocators.values():
                allocator.free_blocks(request_id, no_cache)

    class Scheduler:
        def __init__(self, cache: PagedAttentionCache) -> None:
            self.cache = cache
            self.active_requests: dict[str, Any] = {}
            self.waiting: list[Any] = []
            self.to_cancel: list[Any] = []

        def add_waiting_request(self, state: Any) -> None:
            self.waiting.append(state)

        def finish_request(self, request_id: str) -> None:
            self.cache.free_blocks(request_id)
            self.active_requests.pop(request_id, None)

        def clear_cancelled_requests(self) -> list[Any]:
            cancelled, self.to_cancel = self.to_cancel, []
            return cancelled

        def schedule_batch(self, token_budget: int) -> Any:
            raise NotImplementedError

    class FIFOScheduler(Scheduler):
        def schedule_batch(self, token_budget: int) -> Any:
            states = [
                state
                for state in self.waiting
                if self.cache.can_store_request_tokens(state, len(state.initial_tokens))
            ]
            self.waiting = [state for state in self.waiting if state not in states]
            self.active_requests.update({state.request_id: state for state in states})
            return (states or None), False, 0, 0

    class OffloadingManager:
        def __init__(self, scheduler: Scheduler) -> None:
            self.scheduler = scheduler

        def offload_requests(self) -> bool:
            for name, state in list(self.scheduler.active_requests.items()):
                self.scheduler.cache.free_blocks(name, no_cache=True)
                self.scheduler.finish_request(name)
                self.scheduler.add_waiting_request(state)
            return True

    return SimpleNamespace(
        cache=PagedAttentionCache,
        pool=CachePool,
        allocators=(CacheAllocator, FullAttentionCacheAllocator),
        schedulers=(Scheduler, FIFOScheduler),
        offloading=OffloadingManager,
    )


@pytest.fixture
def classes() -> SimpleNamespace:
    return make_classes()


@pytest.fixture
def recorder(tmp_path: Path, classes: SimpleNamespace) -> Iterator[Recorder]:
    made = Recorder(Settings(target=f"{tmp_path}/", run="r", salt=b"s", keep_request_ids=True, state_every=0))
    TransformersHooks(made).attach(**vars(classes))
    yield made
    made.stop()


def make_cache(classes: SimpleNamespace, **helper: Any) -> Any:
    config = SimpleNamespace(_name_or_path="/models/of/somebody/Tiny-1B")
    batching = SimpleNamespace(page_size=16, num_blocks=8, scheduler_type="fifo", logits=object())
    return classes.cache(config, batching, device="cpu", distributed_helper=SimpleNamespace(**helper))


def state(name: str, tokens: int = 20) -> Any:
    return SimpleNamespace(
        request_id=name, initial_tokens=[1] * tokens, generated_tokens=[2] * 3, position_offset=tokens + 2
    )


def read(session: Any) -> tuple[Header, list[tuple[Any, ...]]]:
    """(header, events as (kind or mark, pool or figure, blocks, request)) of a finished file."""
    told: list[tuple[Any, ...]] = []
    names: dict[int, str] = {-1: ""}
    with TraceReader(session.path) as reader:
        for chunk in reader.chunks():
            names.update(chunk.request_ids)
            for index in range(len(chunk)):
                kind, pool = EventKind(int(chunk.kind[index])), int(chunk.pool[index])
                request = names[int(chunk.request[index])]
                if kind is EventKind.MARK:
                    code = MarkCode(int(chunk.value[index]))
                    told.append((code.name, int(chunk.value2[index]), (), request))
                    continue
                size = reader.header.pools[pool].page_size
                if kind is EventKind.ALLOC:
                    tokens = chunk.result.get(index)
                    assert tokens is not None and len(tokens) == int(chunk.value[index])
                    blocks = (tokens[::size] // size).tolist()
                else:
                    pages = chunk.list1.get(index)
                    assert pages is not None
                    blocks = pages.tolist()
                told.append((kind.name, pool, tuple(blocks), request))
        return reader.header, told


def test_blocks_of_each_type_with_their_requests(classes: SimpleNamespace, recorder: Recorder) -> None:
    cache = make_cache(classes)
    scheduler = classes.schedulers[1](cache)
    scheduler.add_waiting_request(state("one"))
    scheduler.add_waiting_request(state("two", 2000))
    scheduler.schedule_batch(64)
    cache.cache_allocators["full_attention"].mark_complete_blocks("one")
    cache.cache_allocators["full_attention"].fork_blocks("one", "one__child#0", 16)
    scheduler.finish_request("one")
    scheduler.schedule_batch(64)
    recorder.stop()
    assert recorder.failure == ""
    assert read(recorder.sessions[0])[1] == [
        ("REQUEST_ARRIVE", 20, (), "one"),
        ("REQUEST_ARRIVE", 2000, (), "two"),
        ("ALLOC", 0, (2, 3), "one"),
        ("ALLOC", 1, (2, 3), "one"),
        ("ALLOC_FAIL", 2000, (), "two"),
        ("STEP", 1, (), ""),
        ("FREE", 0, (3,), "one"),
        ("ALLOC", 0, (3,), "one__child#0"),
        ("FREE", 0, (2,), "one"),
        ("FREE", 1, (2, 3), "one"),
        ("REQUEST_FINISH", 23, (), "one"),
        ("ALLOC_FAIL", 2000, (), "two"),
    ]


def test_request_that_is_moved_out_is_preempted(classes: SimpleNamespace, recorder: Recorder) -> None:
    """It finishes and is added again inside the engine; for a reader it neither ends nor arrives."""
    scheduler = classes.schedulers[1](make_cache(classes))
    scheduler.add_waiting_request(state("one", 10))
    scheduler.schedule_batch(64)
    classes.offloading(scheduler).offload_requests()
    scheduler.schedule_batch(64)
    scheduler.to_cancel = [scheduler.active_requests["one"]]
    scheduler.clear_cancelled_requests()
    recorder.stop()
    assert [event[:2] for event in read(recorder.sessions[0])[1]] == [
        ("REQUEST_ARRIVE", 10),
        ("ALLOC", 0),
        ("ALLOC", 1),
        ("STEP", 1),
        ("FREE", 0),
        ("FREE", 1),
        ("PREEMPT", 12),
        ("ALLOC", 0),
        ("ALLOC", 1),
        ("STEP", 1),
        ("REQUEST_FINISH", 13),
    ]


def test_reset_gives_everything_back(classes: SimpleNamespace, recorder: Recorder) -> None:
    """Blocks kept for their contents go with the ledger, without a call for them."""
    cache = make_cache(classes)
    cache.pool.get_free_blocks(0, 2)
    cache.pool.get_free_blocks(1, 1)
    cache.pool.reset()
    cache.pool.get_free_blocks(0, 1)
    recorder.stop()
    assert read(recorder.sessions[0])[1][2:] == [
        ("CACHE_RESET", 2, (), ""),
        ("FREE", 0, (2, 3), ""),
        ("CACHE_RESET", 1, (), ""),
        ("FREE", 1, (2,), ""),
        ("ALLOC", 0, (2,), ""),
    ]


def test_trial_asks_for_nothing(classes: SimpleNamespace, recorder: Recorder) -> None:
    cache = make_cache(classes)
    assert not cache.can_store_request_tokens(state("one"), 5000, True)
    assert not cache.can_store_request_tokens(state("one"), 5000, dry_run=True)
    cache.pool.get_free_blocks(0, 0)
    cache.pool.free_blocks(0, [])
    assert recorder.sessions == []
    assert not cache.can_store_request_tokens(state("one"), 5000)
    recorder.stop()
    assert read(recorder.sessions[0])[1] == [("ALLOC_FAIL", 5000, (), "one")]


def test_header_says_what_the_cache_is(classes: SimpleNamespace, recorder: Recorder) -> None:
    """Each type has the whole tensor, in blocks of its own size, as a replay's allocators divide it."""
    cache = make_cache(classes, tp_size=2, tp_local_rank=1)
    cache.pool.get_free_blocks(1, 1)
    recorder.stop()
    header = read(recorder.sessions[0])[0]
    full, sliding = header.pools
    assert [pool.name for pool in header.pools] == ["full_attention", "sliding_attention"]
    assert (full.grow_direction, sliding.grow_direction) == ("down", "up")
    assert (full.page_size, full.entry_bytes, full.layer_num) == (16, 64, 1)
    assert (sliding.page_size, sliding.entry_bytes, sliding.layer_num) == (16, 128, 2)
    assert header.total_bytes == 20480 and (full.num_pages, sliding.num_pages) == (20, 10)
    assert (full.min_page_index, sliding.min_page_index) == (2, 1)
    assert (full.extra["first_block"], sliding.extra["first_block"]) == (4, 2)
    assert header.model == "Tiny-1B" and "/" not in str(header.settings)
    assert header.settings["placement"] == "free" and header.settings["num_sectors"] == 8
    assert header.rank == {"tp": 1, "pp": 0, "dp": 0, "tp_size": 2}
    assert recorder.sessions[0].path.name.startswith("transformers.tp1-pp0-dp0.")


def test_pool_of_the_host_tier_is_not_recorded(classes: SimpleNamespace, recorder: Recorder) -> None:
    pool = classes.pool([10])
    pool.free_blocks(0, pool.get_free_blocks(0, 3))
    pool.reset()
    recorder.stop()
    assert recorder.sessions == [] and recorder.failure == ""


def test_caches_have_files_of_their_own(classes: SimpleNamespace, recorder: Recorder) -> None:
    for cache in (make_cache(classes), make_cache(classes)):
        cache.pool.get_free_blocks(0, 1)
    recorder.stop()
    assert [read(session)[1] for session in recorder.sessions] == [[("ALLOC", 0, (2,), "")]] * 2


def test_fault_of_ours_stays_ours(classes: SimpleNamespace, recorder: Recorder) -> None:
    cache = make_cache(classes)
    cache.pool.get_free_blocks(0, 1)
    cache.pool.__dict__[TAPE].pools = None
    assert cache.pool.get_free_blocks(0, 1) == [3]
    assert not recorder.active and "TypeError" in recorder.failure
    assert TAPE not in cache.pool.__dict__ and len(recorder.hooks) == 0
    cache.pool.free_blocks(0, [3])
    assert cache.pool.get_free_blocks(0, 1) == [3]


def test_errors_of_the_engine_pass_through(classes: SimpleNamespace, recorder: Recorder) -> None:
    cache = make_cache(classes)
    with pytest.raises(ValueError, match="short"):
        cache.cache_allocators["full_attention"].allocate_cache_to_request("one", 0, 5000)
    assert recorder.active and recorder.calls.here.request is None and recorder.sessions == []
