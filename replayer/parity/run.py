"""All runs of a parity check: each variant on small pools, and for every schedule that comes of it one reference on large ones.

Variants whose schedules are equal share a reference. Strategies place pages alike, so they do as a rule; the eager variant follows the
schedule of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from allocator import STRATEGIES, UnifiedMHATokenToKVPool
from replayer.parity.compare import Comparison, compare
from replayer.parity.engine import Engine
from replayer.parity.errors import ReferenceMoved, ScheduleMismatch
from replayer.parity.flushes import FlushLog
from replayer.parity.language_model import LanguageModel
from replayer.parity.pools import Allocation, KVPools, Layout
from replayer.parity.recording import Recording
from replayer.parity.requests import Generation, Request
from replayer.parity.schedule import Operation, counts
from replayer.parity.scheduler import Limits, follow, serve

EAGER = "eager"
VARIANTS = (*STRATEGIES, EAGER)
REFERENCE = "large"

PAGE_SIZE = 2
WINDOW = 96
MAX_RUNNING = 16
MAX_PREFILL_TOKENS = 256
#: Half of what a prompt with its answer needs.
TOKENS_EACH = 50
#: One prompt with its answer fits.
LEAST_TOKENS = 250
#: Tokens of the large pools, in those of the small ones.
LARGE = 6

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Setup:
    """Sizes of a check. ``small_tokens`` and ``large_tokens``: tokens whose bytes, all layers, a buffer has."""

    layout: Layout
    limits: Limits
    small_tokens: int
    large_tokens: int

    @classmethod
    def for_prompts(cls, count: int, window: int | None) -> Setup:
        """Sizes for ``count`` of the committed prompts: small pools in which they crowd each other out, large ones in which they do
        not."""
        small = max(LEAST_TOKENS, TOKENS_EACH * min(count, MAX_RUNNING))
        return cls(Layout(PAGE_SIZE, window), Limits(MAX_RUNNING, MAX_PREFILL_TOKENS), small, LARGE * small)


@dataclass(frozen=True)
class Run:
    """One run: what came out, what was done, what flushes did (`FlushLog.summary`), and seconds it took."""

    name: str
    generations: Mapping[str, Generation]
    schedule: list[Operation]
    flushes: dict[str, Any]
    seconds: float

    def operations(self) -> dict[str, int]:
        return counts(self.schedule)


@dataclass(frozen=True)
class Result:
    """A variant's run and the reference that it was compared with."""

    run: Run
    reference: Run
    comparison: Comparison


def check(
    model: LanguageModel,
    requests: Sequence[Request],
    setup: Setup,
    variants: Sequence[str],
    *,
    store_class: type[UnifiedMHATokenToKVPool] = UnifiedMHATokenToKVPool,
    recordings: Mapping[str, Recording] | None = None,
    progress: Progress = lambda finished: None,
) -> Iterator[Result]:
    """One result after the other.

    Args:
        variants: of `VARIANTS`.
        store_class: moves the small pools' bytes; another one than the default is a planted fault.
        recordings: around runs that can be recorded, by variant.
        progress: told how many requests have just finished, in any run.

    Raises:
        PoolTooSmall: a request that does not fit the small pools.
        ScheduleMismatch, ReferenceMoved: the large pools are not large enough.
    """
    small = Allocation(setup.small_tokens, store_class=store_class)
    references: list[Run] = []
    for name in variants:
        allocation = replace(small, lazy=False) if name == EAGER else replace(small, strategy=name)
        recording = (recordings or {}).get(name)
        run = None
        with recording or nullcontext():
            if name == EAGER and references:
                run = _like(references[0], name, model, requests, setup, allocation, progress)
            if run is None:
                run = _run(name, model, requests, setup, allocation, _serving(setup, progress))
        reference = next((each for each in references if each.schedule == run.schedule), None)
        if reference is None:
            reference = _reference(model, requests, setup, run.schedule, progress)
            references.append(reference)
        yield Result(run, reference, compare(reference.generations, run.generations))


def _serving(setup: Setup, progress: Progress) -> Callable[[Engine], None]:
    return lambda engine: serve(engine, setup.limits, progress)


def _like(
    reference: Run,
    name: str,
    model: LanguageModel,
    requests: Sequence[Request],
    setup: Setup,
    allocation: Allocation,
    progress: Progress,
) -> Run | None:
    """The reference's schedule again, on small pools, or None if they are short at some point. An eager pool never has holes, so what
    fits a lazy one fits it too; by itself it would find room a little earlier, and need a reference of its own."""
    try:
        return _run(name, model, requests, setup, allocation, _following(reference.schedule, progress))
    except ScheduleMismatch:
        return None


def _following(schedule: list[Operation], progress: Progress) -> Callable[[Engine], None]:
    return lambda engine: follow(engine, schedule, progress)


def _reference(
    model: LanguageModel,
    requests: Sequence[Request],
    setup: Setup,
    schedule: list[Operation],
    progress: Progress,
) -> Run:
    run = _run(
        REFERENCE,
        model,
        requests,
        setup,
        Allocation(setup.large_tokens),
        _following(schedule, progress),
        flushes_between=False,
    )
    if run.flushes["pages_moved"]:
        raise ReferenceMoved(
            f"{run.flushes['pages_moved']} pages moved in the reference run, on pools of {setup.large_tokens} tokens: "
            "they have to be so large that nothing needs to move"
        )
    return run


def _run(
    name: str,
    model: LanguageModel,
    requests: Sequence[Request],
    setup: Setup,
    allocation: Allocation,
    drive: Callable[[Engine], None],
    *,
    flushes_between: bool = True,
) -> Run:
    begin = perf_counter()
    with FlushLog(model.shape.device) as log:
        pools = KVPools(model.shape, setup.layout, allocation, log)
        engine = Engine(model, pools, requests, flushes_between=flushes_between)
        drive(engine)
        return Run(name, engine.generations, engine.schedule, log.summary(), perf_counter() - begin)
