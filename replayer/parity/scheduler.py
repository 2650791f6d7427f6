"""What the engine does next: by the room there is, or as a schedule has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replayer.parity.engine import Engine
from replayer.parity.errors import PoolTooSmall, ScheduleMismatch
from replayer.parity.requests import Request
from replayer.parity.schedule import Decode, Evict, Extend, Operation

#: Pages asked back from the prefix cache at once when a pool is short.
EVICTED_AT_ONCE = 8


@dataclass(frozen=True)
class Limits:
    """How many requests run at once, and how many tokens are prefilled in one forward (one request may have more)."""

    max_running: int
    max_prefill_tokens: int


def serve(engine: Engine, limits: Limits, progress: Callable[[int], object] = lambda finished: None) -> None:
    """Run until every request is finished. Waiting requests join first come, first served; for want of room cached prefixes are evicted,
    then the request that joined last is preempted, and nobody joins until one has finished.

    Args:
        progress: told the number of requests that have just finished.

    Raises:
        PoolTooSmall: one request alone does not fit.
    """
    nobody_joins = False
    while engine.waiting or engine.running:
        unfinished = len(engine.waiting) + len(engine.running)
        joining = [] if nobody_joins else _joining(engine, limits)
        if not (joining and _extend(engine, joining)):
            nobody_joins |= _decode(engine)
        finished = unfinished - len(engine.waiting) - len(engine.running)
        if finished:
            nobody_joins = False
        progress(finished)


def follow(
    engine: Engine, schedule: list[Operation], progress: Callable[[int], object] = lambda finished: None
) -> None:
    """Carry out a schedule that another run recorded.

    Raises:
        ScheduleMismatch: it cannot be carried out, or does not mean the same here.
    """
    waiting = {request.name: request for request in engine.waiting}
    for number, operation in enumerate(schedule):
        unfinished = len(engine.waiting) + len(engine.running)
        short = None
        if isinstance(operation, Extend):
            short = engine.extend([waiting[name] for name, _ in operation.requests])
        elif isinstance(operation, Decode):
            short = engine.decode()
        elif isinstance(operation, Evict):
            engine.evict(operation.pool, operation.pages)
        else:
            engine.preempt(operation.request)
        if short is not None:
            raise ScheduleMismatch(
                f"operation {number} of the schedule, {operation}, finds pool {short!r} too small: the reference needs more room"
            )
        if len(engine.schedule) != number + 1 or engine.schedule[number] != operation:
            raise ScheduleMismatch(
                f"operation {number} of the schedule is {operation}, and came out as {engine.schedule[number:]}"
            )
        progress(unfinished - len(engine.waiting) - len(engine.running))
    if engine.waiting or engine.running:
        raise ScheduleMismatch(
            f"the schedule ends with {len(engine.waiting)} requests waiting and {len(engine.running)} running"
        )


def _joining(engine: Engine, limits: Limits) -> list[Request]:
    chosen: list[Request] = []
    tokens = 0
    for request in engine.waiting[: max(0, limits.max_running - len(engine.running))]:
        tokens += len(engine.tokens_of(request)) - engine.cached_tokens(request)
        if chosen and tokens > limits.max_prefill_tokens:
            break
        chosen.append(request)
    return chosen


def _extend(engine: Engine, joining: list[Request]) -> bool:
    """Whether at least the first of them could join."""
    while True:
        short = engine.extend(joining)
        if short is None:
            return True
        if engine.evict(short, EVICTED_AT_ONCE):
            continue
        if len(joining) > 1:
            joining = joining[:-1]
        elif engine.running:
            return False
        else:
            raise _too_small(engine, short, joining[0])


def _decode(engine: Engine) -> bool:
    """One token for all that remain. Whether a request was preempted for it."""
    preempted = False
    while True:
        short = engine.decode()
        if short is None:
            return preempted
        if engine.evict(short, EVICTED_AT_ONCE):
            continue
        last = engine.running[-1].request
        if len(engine.running) == 1:
            raise _too_small(engine, short, last)
        engine.preempt(last.name)
        preempted = True


def _too_small(engine: Engine, pool: str, request: Request) -> PoolTooSmall:
    return PoolTooSmall(
        f"pool {pool!r} has no room for request {request.name!r} alone ({len(engine.tokens_of(request))} tokens, "
        f"{request.max_new_tokens} to be generated) in a buffer of {engine.pools.total_bytes:,} bytes: give the pools more tokens"
    )
