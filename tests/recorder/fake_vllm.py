"""Small stand-ins of vLLM's classes.

They keep what the hook relies on: a free queue that gives unhashed blocks first, hashes that survive a release and are lost when the block
is handed out, one-shot iterables, blocks of other pools, a null block that turns up in lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any


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
