"""transformers' continuous batching: calls on the pool its paged cache takes blocks from and gives them back to.

Three levels act there. Sectors are pieces of the one cache tensor that are lent to an attention type and cut into its blocks. Blocks are
taken from `CachePool` for a request and go back to it. Above, a `BlockLedger` counts references and keeps released blocks whose contents
it has hashed. The blocks are what an allocator trace is about: they are what a request's tokens are written to, and the ledger keeps a
cached block from the pool until it is evicted, so a call on the pool begins or ends a life and nothing else does. Sectors only say how
much of the tensor a type may cut up; each pool of a trace is therefore the whole tensor in blocks of one type, and the ids, which count
from the tensor's first byte in blocks of that type, are kept as they are.

Hooked: `CachePool.get_free_blocks`, `free_blocks` and `reset`, of the pools that a `PagedAttentionCache` made (not those of the tier in
host memory that requests are moved out to), and the functions around them that know the request.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.blocks import LiveBlocks, put_mark, write_hand_out, write_release, write_reset
from recorder.engines.transformers_header import header_of
from recorder.hooks import Hooks
from recorder.session import Session
from recorder.trace import MarkCode

if TYPE_CHECKING:
    from recorder.process import Recorder

NAME: Final = "transformers"
HOST: Final = "transformers"
VERSIONS: Final = ("5.19",)

PACKAGE: Final = "transformers.generation.continuous_batching"
TAPE: Final = "_kvtape_tape"


def installed_version() -> str | None:
    """Version of the transformers in this environment."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def refuse_when_used(say: Callable[[], None]) -> bool:
    """Call `say` when continuous batching begins: the package is imported by many who never use it, and they need not be told.

    Returns:
        False, with nothing arranged, where this version does not have the class that begins it.
    """
    try:
        manager = importlib.import_module(f"{PACKAGE}.continuous_api").ContinuousBatchingManager
    except (ImportError, AttributeError):
        return False
    hooks = Hooks()

    def make(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            hooks.restore()
            say()
            original(self, *args, **kwargs)

        return __init__

    return hooks.wrap(manager, "__init__", make)


def attach(recorder: Recorder) -> None:
    """Wrap the paged cache, its allocators and the schedulers of the transformers installed here."""
    allocators = importlib.import_module(f"{PACKAGE}.cache_allocators")
    scheduler = importlib.import_module(f"{PACKAGE}.scheduler")
    TransformersHooks(recorder).attach(
        cache=importlib.import_module(f"{PACKAGE}.cache").PagedAttentionCache,
        pool=allocators.CachePool,
        allocators=(
            allocators.CacheAllocator,
            allocators.FullAttentionCacheAllocator,
            allocators.SlidingAttentionCacheAllocator,
        ),
        schedulers=(scheduler.Scheduler, scheduler.FIFOScheduler, scheduler.PrefillFirstScheduler),
        offloading=importlib.import_module(f"{PACKAGE}.offloading_manager").OffloadingManager,
    )


class Tape:
    """One paged cache and the file its calls go to, opened at the first of them."""

    def __init__(
        self, recorder: Recorder, cache: Any, batching: Any, tensor_parallel: tuple[int, int]
    ) -> None:
        self._recorder = recorder
        self._cache = weakref.ref(cache)
        self._batching, self._tensor_parallel = batching, tensor_parallel
        self.session: Session | None = None
        self.pools: list[LiveBlocks] = []

    def begin(self) -> Session:
        """The session of the cache."""
        header = header_of(self._cache(), self._batching, self._tensor_parallel, installed_version() or "")
        every = self._recorder.settings.state_every
        self.pools = [
            LiveBlocks(index, pool.name, pool.page_size, every) for index, pool in enumerate(header.pools)
        ]
        self.session = self._recorder.open(NAME, f"tp{self._tensor_parallel[0]}-pp0-dp0", header)
        return self.session

    def take_mark_off(self) -> None:
        """The cache's pool forgets its tape."""
        cache = self._cache()
        if cache is not None:
            cache.pool.__dict__.pop(TAPE, None)


class _Offloading(threading.local):
    """Whether this thread is moving requests out: they finish and are added again, which is a preemption."""

    now = False


class TransformersHooks:
    """Makes the wrappers. One instance a recording; the wrappers hold it and, through it, the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls = recorder.calls
        self._tapes: list[Tape] = []
        self._offloading = _Offloading()

    def attach(
        self,
        cache: Any,
        pool: Any,
        allocators: tuple[Any, ...],
        schedulers: tuple[Any, ...],
        offloading: Any,
    ) -> None:
        """Wrap the functions of the classes given, where each defines them itself."""
        wrap = self._recorder.hooks.wrap
        self._recorder.on_stop(self._take_marks_off)
        wrap(cache, "__init__", self._cache_made)
        wrap(cache, "can_store_request_tokens", self._stores)
        wrap(pool, "get_free_blocks", self._taken)
        wrap(pool, "free_blocks", self._given_back)
        wrap(pool, "reset", self._reset)
        for owner in allocators:
            for name in ("allocate_cache_to_request", "free_blocks", "mark_complete_blocks"):
                wrap(owner, name, self._for_request)
            wrap(owner, "fork_blocks", self._for_child)
        for owner in schedulers:
            wrap(owner, "add_waiting_request", self._arrives)
            wrap(owner, "finish_request", self._finishes)
            wrap(owner, "clear_cancelled_requests", self._cancelled)
            wrap(owner, "schedule_batch", self._step)
        wrap(offloading, "offload_requests", self._offload)

    # -- the pool

    def _cache_made(self, original: Any) -> Any:
        recorder = self._recorder

        def __init__(cache: Any, *args: Any, **kwargs: Any) -> None:
            original(cache, *args, **kwargs)
            if recorder.active:
                try:
                    given = dict(zip(_CACHE_ARGUMENTS, args, strict=False), **kwargs)
                    helper = given.get("distributed_helper")
                    size = int(getattr(helper, "tp_size", 1) or 1)
                    rank = int(getattr(helper, "tp_local_rank", 0) or 0) if size > 1 else 0
                    tape = Tape(recorder, cache, given.get("continuous_batching_config"), (rank, size))
                    cache.pool.__dict__[TAPE] = tape
                    self._tapes.append(tape)
                except Exception as problem:
                    recorder.fail(problem)

        return __init__

    def _taken(self, original: Any) -> Any:
        recorder, calls = self._recorder, self._calls

        def get_free_blocks(pool: Any, index: int, num_blocks: int) -> Any:
            blocks = original(pool, index, num_blocks)
            # Most calls ask for nothing.
            if blocks and recorder.active:
                try:
                    tape = pool.__dict__.get(TAPE)
                    if tape is not None:
                        session = tape.session or tape.begin()
                        if session.has_room():
                            live = tape.pools[index]
                            session.queue.append(
                                (write_hand_out, session.clock_ns(), live, list(blocks), calls.here.request)
                            )
                except Exception as problem:
                    recorder.fail(problem)
            return blocks

        return get_free_blocks

    def _given_back(self, original: Any) -> Any:
        recorder, calls = self._recorder, self._calls

        def free_blocks(pool: Any, index: int, block_ids: Any) -> Any:
            answer = original(pool, index, block_ids)
            if block_ids and recorder.active:
                try:
                    tape = pool.__dict__.get(TAPE)
                    if tape is not None:
                        session = tape.session or tape.begin()
                        if session.has_room():
                            live = tape.pools[index]
                            session.queue.append(
                                (write_release, session.clock_ns(), live, list(block_ids), calls.here.request)
                            )
                except Exception as problem:
                    recorder.fail(problem)
            return answer

        return free_blocks

    def _reset(self, original: Any) -> Any:
        recorder = self._recorder

        def reset(pool: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(pool, *args, **kwargs)
            if recorder.active:
                try:
                    tape = pool.__dict__.get(TAPE)
                    if tape is not None and tape.session is not None and tape.session.has_room():
                        tape.session.queue.append((write_reset, tape.session.clock_ns(), tape.pools))
                except Exception as problem:
                    recorder.fail(problem)
            return answer

        return reset

    # -- whom it is for

    def _for_request(self, original: Any) -> Any:
        calls = self._calls

        def for_request(allocator: Any, request_id: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            before, here.request = here.request, request_id
            try:
                return original(allocator, request_id, *args, **kwargs)
            finally:
                here.request = before

        return for_request

    def _for_child(self, original: Any) -> Any:
        calls = self._calls

        def fork_blocks(
            allocator: Any, source_request_id: Any, dest_request_id: Any, *args: Any, **kwargs: Any
        ) -> Any:
            here = calls.here
            before, here.request = here.request, dest_request_id
            try:
                return original(allocator, source_request_id, dest_request_id, *args, **kwargs)
            finally:
                here.request = before

        return fork_blocks

    # -- marks

    def _stores(self, original: Any) -> Any:
        recorder = self._recorder

        def can_store_request_tokens(
            cache: Any, state: Any, request_len: Any, *args: Any, **kwargs: Any
        ) -> Any:
            fits = original(cache, state, request_len, *args, **kwargs)
            if not fits and recorder.active and not (args and args[0]) and not kwargs.get("dry_run"):
                self._mark(cache, MarkCode.ALLOC_FAIL, request_len, state.request_id)
            return fits

        return can_store_request_tokens

    def _arrives(self, original: Any) -> Any:
        recorder, offloading = self._recorder, self._offloading

        def add_waiting_request(scheduler: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(scheduler, state, *args, **kwargs)
            if recorder.active and not offloading.now:
                self._state_mark(scheduler, MarkCode.REQUEST_ARRIVE, state)
            return answer

        return add_waiting_request

    def _finishes(self, original: Any) -> Any:
        recorder, offloading = self._recorder, self._offloading

        def finish_request(scheduler: Any, request_id: Any, *args: Any, **kwargs: Any) -> Any:
            state = scheduler.active_requests.get(request_id) if recorder.active else None
            answer = original(scheduler, request_id, *args, **kwargs)
            if state is not None and recorder.active:
                code = MarkCode.PREEMPT if offloading.now else MarkCode.REQUEST_FINISH
                self._state_mark(scheduler, code, state)
            return answer

        return finish_request

    def _cancelled(self, original: Any) -> Any:
        recorder = self._recorder

        def clear_cancelled_requests(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            cancelled = original(scheduler, *args, **kwargs)
            if recorder.active:
                for state in cancelled or ():
                    self._state_mark(scheduler, MarkCode.REQUEST_FINISH, state)
            return cancelled

        return clear_cancelled_requests

    def _step(self, original: Any) -> Any:
        recorder = self._recorder

        def schedule_batch(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(scheduler, *args, **kwargs)
            if recorder.active:
                try:
                    if answer[0]:
                        self._mark(scheduler.cache, MarkCode.STEP, len(answer[0]), None)
                except Exception as problem:
                    recorder.fail(problem)
            return answer

        return schedule_batch

    def _offload(self, original: Any) -> Any:
        offloading = self._offloading

        def offload_requests(manager: Any, *args: Any, **kwargs: Any) -> Any:
            offloading.now = True
            try:
                return original(manager, *args, **kwargs)
            finally:
                offloading.now = False

        return offload_requests

    def _state_mark(self, scheduler: Any, code: MarkCode, state: Any) -> None:
        try:
            if code == MarkCode.PREEMPT:
                figure = state.position_offset
            elif code == MarkCode.REQUEST_ARRIVE:
                figure = len(state.initial_tokens)
            else:
                figure = len(state.initial_tokens) + len(state.generated_tokens)
            self._mark(scheduler.cache, code, figure, state.request_id)
        except Exception as problem:
            self._recorder.fail(problem)

    def _mark(self, cache: Any, code: MarkCode, figure: int, request: str | None) -> None:
        try:
            tape = cache.pool.__dict__.get(TAPE)
            if tape is not None:
                put_mark(tape.session or tape.begin(), code, int(figure), request)
        except Exception as problem:
            self._recorder.fail(problem)

    def _take_marks_off(self) -> None:
        while self._tapes:
            self._tapes.pop().take_mark_off()


_CACHE_ARGUMENTS: Final = (
    "config",
    "continuous_batching_config",
    "device",
    "distributed_helper",
    "dtype",
    "model_supports_logits_to_keep",
)
