"""One flush against another: the same holes, the same moves, in one process, in turns.

Every candidate's pool is brought to the same state before each flush: so many live pages, of which as many as are to move are freed far
from the watermark (or, for no move, next to it). Only the flush is timed, and no bytes are moved: what is measured is the plan and the
tables. A time is of this machine and of this minute, so what counts is ratios within a round.

Times are processor time of the one thread. Other programs on the machine would make long flushes longer than short ones by the clock on the
wall: a short one is seldom interrupted. What reading the thread's clock costs is taken off.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time_ns
from typing import Any, Final

import torch

from recorder.trace import Header, PoolHeader, Provenance
from replayer.bench import SGLANG, Candidate, Spread, kvtape_candidate
from replayer.bench_calls import NoBytes, ResultsDiffer

STRATEGIES: Final = ("per-row", "hybrid", "batched", "device")
#: How a flush finds the pool. "half vacant": every other page next to the watermark is a hole too, so that pages to move have to be found
#: among holes. "during a forward": not urgent, while a forward runs that writes 64 tokens; "no forward": not urgent, and none runs.
KINDS: Final = ("urgent", "urgent, half vacant", "during a forward", "no forward")
DURING: Final = "during a forward"
#: Tokens that the running forward writes.
WRITTEN: Final = 64


@dataclass(frozen=True)
class Point:
    """One state in which flushes are timed; ``panel`` says which question it answers: ``moves``, ``pages`` or ``pool``."""

    panel: str
    kind: str
    moves: int
    pages: int
    page_size: int = 1
    #: Live pages before the holes are made; 0 for as many as the moves need.
    live: int = 0


@dataclass(frozen=True)
class Plan:
    """What is measured. Points of one group take turns flush by flush, so that they can be compared closely; groups follow each other."""

    groups: Sequence[Sequence[Point]]
    #: Rounds that count, after one to warm up.
    rounds: int
    #: Flushes of each point and candidate in a round, by the number of moves.
    repeats: Callable[[int], int]


@dataclass
class Findings:
    """``nanoseconds[point][candidate]``: one median a round; ``moved`` likewise: pages that each flush moved."""

    nanoseconds: dict[Point, dict[str, list[float]]] = field(default_factory=dict)
    moved: dict[Point, dict[str, int]] = field(default_factory=dict)

    def time(self, point: Point, candidate: str) -> Spread:
        """Nanoseconds of a flush."""
        return spread(self.nanoseconds[point][candidate])

    def ratio(self, point: Point, candidate: str, reference: str) -> Spread:
        """``candidate``'s time over ``reference``'s, within each round."""
        times = self.nanoseconds[point]
        return _over(times[candidate], times[reference])

    def growth(self, point: Point, base: Point, candidate: str) -> Spread:
        """The candidate's time at ``point`` over that at ``base``, within each round."""
        return _over(self.nanoseconds[point][candidate], self.nanoseconds[base][candidate])


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _over(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    return spread([our / their for our, their in zip(ours, theirs, strict=True)])


# -- what to measure


def full_plan(
    *,
    moves: Sequence[int],
    kinds: Sequence[str] = KINDS,
    rounds: int = 5,
    pages: int = 65_536,
    pool_base: int = 16_384,
    pool_factors: Sequence[int] = (1, 4, 16, 64),
    pool_moves: int = 177,
    paged_moves: Sequence[int] = (3, 177, 2737),
    repeats: Callable[[int], int] | None = None,
) -> Plan:
    """Numbers of moves at page size 1, some of them at page size 64, and pools of several sizes, half full, at the same moves."""
    groups: list[list[Point]] = [[Point("moves", kind, count, pages)] for kind in kinds for count in moves]
    groups += [[Point("pages", kind, count, pages, 64)] for kind in kinds for count in paged_moves]
    for kind in [kind for kind in kinds if kind in ("urgent", DURING)]:
        sizes = [pool_base * factor for factor in pool_factors]
        groups.append([Point("pool", kind, pool_moves, size, live=size // 2) for size in sizes])
    return Plan(groups, rounds, repeats or (lambda count: 8 if count > 3000 else 20 if count > 500 else 40))


def quick_plan(*, moves: Sequence[int], kinds: Sequence[str] = KINDS, rounds: int = 2) -> Plan:
    """The same questions, each asked a few times only: whether everything runs, not what it costs."""
    return full_plan(
        moves=moves, kinds=kinds, rounds=rounds, pages=2_048, pool_base=2_048, pool_factors=(1, 2), pool_moves=13,
        paged_moves=(3,), repeats=lambda count: 3,
    )  # fmt: skip


def candidates(strategies: Sequence[str], version: str | None) -> list[Candidate]:
    """Ours, and SGLang's class in the version that is installed, if one is."""
    found = [kvtape_candidate("kvtape", strategy) for strategy in strategies]
    return found if version is None else [*found, sglang_flush_candidate(version)]


def sglang_flush_candidate(version: str) -> Candidate:
    """SGLang's class as it is; of versions before 0.5.20 too, which no whole trace runs on."""

    def build(header: Header) -> Mapping[str, Any]:
        from replayer.targets_sglang import build_sglang_pools

        return build_sglang_pools(header, kvcache_for=lambda name: NoTokens(), older=True)

    return Candidate(f"{SGLANG} {version}", build)


class NoTokens(NoBytes):
    """`NoBytes` under the name that SGLang has for it before 0.5.20."""

    def move_kv_cache(self, dst_tokens: torch.Tensor, src_tokens: torch.Tensor) -> None: ...


#: One layer of one head of 8 numbers: small, since no bytes are moved here.
SMALL_LAYOUT: Final = {"head_num": 1, "head_dim": 8, "dtype": "float32"}


def header_for(
    point: Point, live: int, *, layout: Mapping[str, Any] = SMALL_LAYOUT, layers: int = 1, spare: float = 2.0
) -> Header:
    """An END pool that grows down, the one that is flushed, and one that grows up and stays empty.

    Args:
        layout: of a token's keys, and of its values, in one layer.
        spare: pages of the pool by live ones, at least.
    """
    itemsize = getattr(torch, layout["dtype"]).itemsize
    entry = 2 * layout["head_num"] * layout["head_dim"] * itemsize * layers
    pages = max(point.pages, int(spare * live) + 64)
    pools = [
        PoolHeader(
            name=name, kind="mha", grow_direction=direction, page_size=point.page_size, entry_bytes=entry, layer_num=layers,
            num_pages=pages, min_page_index=1, num_virtual_ids=pages, is_id_owner=True, lazy_compaction=True, layout=dict(layout),
        )
        for name, direction in (("full", "down"), ("swa", "up"))
    ]  # fmt: skip
    return Header(
        engine="kvtape",
        engine_version="bench flush",
        pools=pools,
        provenance=Provenance(kind="synthetic", how="kvtape bench flush", hardware="a CPU"),
        settings={"move_cap": 1 << 20},
        total_bytes=pages * point.page_size * entry,
        device="cpu",
    )


# -- one pool


class Forward:
    """A forward that runs until it is told otherwise: the part of a done event that allocators ask."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def wait(self, stream: Any = None) -> None: ...


class Rig:
    """One candidate's pool, and how it is brought to ``moves`` moves from a packed band of ``live`` pages: `make_holes`, `flush`,
    `fill_up`, again and again."""

    def __init__(self, pools: Mapping[str, Any], point: Point, live: int) -> None:
        self.pool = pools["full"]
        self.point = point
        pool, moves = self.pool, point.moves
        pool.alloc(live * pool.page_size)
        order = torch.randperm(moves or 4, generator=torch.Generator().manual_seed(moves))
        mark = int(pool.watermark_physical)
        if moves:
            # The farthest places of a pool that grows down are its last ones; the pages next to the watermark stay live.
            holes = pool.num_pages - 1 - order
        else:
            holes = mark + 1 + order
        if point.kind == "urgent, half vacant" and moves:
            # The window then holds as many live pages as are to move, and as many holes.
            holes = torch.cat([holes, mark + 1 + 2 * torch.arange(moves)])
        self._holes = holes.to(pool.device)
        # The forward writes pages that are farthest of all live ones: fresh tokens of long requests, which do not stop the walk.
        self._written = (pool.num_pages - 1 - moves - torch.arange(WRITTEN)).to(pool.device)

    def make_holes(self) -> torch.Tensor:
        """Free what is to be free; virtual token ids (int64 ``[WRITTEN]``) that a running forward may write."""
        pool = self.pool
        owners = pool.physical_to_virtual[self._holes]
        pool.free(owners * pool.page_size)
        written: torch.Tensor = pool.physical_to_virtual[self._written] * pool.page_size
        return written

    def launch(self, forward: Any, written: torch.Tensor) -> None:
        """A forward runs from here on, until its event says that it is done."""
        self.pool.set_latest_forward_done_event(forward)
        self.pool.set_inflight_forward(forward, written)

    def flush(self) -> Any:
        """What is measured: one flush; pages moved, a number that may come later."""
        return self.pool._flush(urgent=self.point.kind.startswith("urgent"))

    def fill_up(self, moved: Any) -> None:
        """After a flush that moved ``moved`` pages: as before, but packed again. Forwards have to be done.

        Raises:
            ResultsDiffer: another number of pages than was arranged.
        """
        pool, point = self.pool, self.point
        if int(moved) != point.moves:
            raise ResultsDiffer(
                f"{type(pool).__module__}.{type(pool).__name__} moved {int(moved)} pages where {point.moves} were to move ({point.kind})"
            )
        pool.set_inflight_forward(None, None)
        pool.set_latest_forward_done_event(None)
        pool._flush(urgent=True)
        pool.alloc(self._holes.shape[0] * pool.page_size)

    def once(self) -> int:
        """All of it on a CPU; nanoseconds of processor time of the flush. Raises as `fill_up`."""
        written = self.make_holes()
        forward = Forward()
        if self.point.kind == DURING:
            self.launch(forward, written)
        begin = thread_time_ns()
        moved = self.flush()
        took = thread_time_ns() - begin
        forward.done = True
        self.fill_up(moved)
        return took


# -- measuring


def clock_cost() -> int:
    """Nanoseconds that two readings of the thread's clock with nothing in between are apart."""
    readings = [-thread_time_ns() + thread_time_ns() for _ in range(501)]
    return sorted(readings)[250]


def measure(
    named: Sequence[Candidate], plan: Plan, after_group: Callable[[], None] = lambda: None
) -> Findings:
    """Flush times of every point and candidate: fresh pools each round, flushes in turns, the first round not counted.

    Raises:
        ResultsDiffer: candidates that moved other pages.
    """
    findings = Findings()
    cost = clock_cost()
    for number in range(plan.rounds + 1):
        for group in plan.groups:
            times = _one_round(named, group, plan.repeats, number, findings)
            for point, by_name in times.items():
                kept = findings.nanoseconds.setdefault(point, {candidate.name: [] for candidate in named})
                for name, values in by_name.items():
                    if number:
                        kept[name].append(max(1.0, statistics.median(values) - cost))
            after_group()
    return findings


def _one_round(
    named: Sequence[Candidate],
    group: Sequence[Point],
    repeats: Callable[[int], int],
    number: int,
    findings: Findings,
) -> dict[Point, dict[str, list[int]]]:
    rigs: list[tuple[Point, str, Rig]] = []
    for point in group:
        live = point.live or 4 * max(point.moves, WRITTEN) + 2 * WRITTEN
        described = header_for(point, live)
        rigs += [(point, each.name, Rig(each.build(described), point, live)) for each in named]
    times: dict[Point, dict[str, list[int]]] = {point: {each.name: [] for each in named} for point in group}
    count = repeats(max(point.moves for point in group))
    gc.collect()
    gc.disable()
    try:
        for repeat in range(count + 1):
            first = (number + repeat) % len(rigs)
            for point, name, rig in [*rigs[first:], *rigs[:first]]:
                took = rig.once()
                if repeat:
                    times[point][name].append(took)
    finally:
        gc.enable()
    for point in group:
        _require_same_tables({name: rig.pool for at, name, rig in rigs if at is point})
        findings.moved[point] = {each.name: point.moves for each in named}
    return times


def _require_same_tables(pools: Mapping[str, Any]) -> None:
    (first, reference), *others = pools.items()
    for name, pool in others:
        same = torch.equal(pool.virtual_to_physical, reference.virtual_to_physical)
        if not same or int(pool.watermark_physical) != int(reference.watermark_physical):
            raise ResultsDiffer(f"{name} and {first} ended with different tables: they moved other pages")
