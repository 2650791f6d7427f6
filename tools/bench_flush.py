"""One flush against another: the same holes, the same moves, in one process, in turns.

    python tools/bench_flush.py                    kvtape's strategies
    SGLANG_ENV/bin/python tools/bench_flush.py     and SGLang's own class, if it is installed (tools/build_sglang_env.sh)

Every candidate's pool is brought to the same state before each flush: so many live pages, of which as many as are to move are freed far
from the watermark (or, for no move, next to it). Only the flush is timed, and no bytes are moved: what is measured is the plan and the
tables. Times are of this machine and of this minute; what counts is the ratio within a round, printed as median (least to greatest).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from recorder.trace import Header, PoolHeader, Provenance
from replayer.bench import Candidate, kvtape_candidate, sglang_candidate
from replayer.targets_sglang import sglang_version

MOVES = (0, 1, 2, 3, 13, 64, 177, 1024, 2737, 16384)
KINDS = ("urgent", "urgent, half vacant", "during a forward", "no forward")
STRATEGIES = ("per-row", "hybrid", "batched", "device")


class Event:
    """A forward that runs, or not."""

    def __init__(self, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def wait(self, stream: Any = None) -> None: ...


def header(pages: int, page_size: int, move_cap: int) -> Header:
    """An END pool that grows down and a small one that grows up."""
    entry = 64
    pools = [
        PoolHeader(
            name=name, kind="mha", grow_direction=direction, page_size=page_size, entry_bytes=entry, layer_num=1, num_pages=pages,
            min_page_index=1, num_virtual_ids=pages, is_id_owner=True, lazy_compaction=True,
            layout={"head_num": 1, "head_dim": 8, "dtype": "float32"},
        )
        for name, direction in (("full", "down"), ("swa", "up"))
    ]  # fmt: skip
    return Header(
        engine="kvtape",
        engine_version="bench",
        pools=pools,
        provenance=Provenance(kind="synthetic", how="tools/bench_flush.py", hardware="a CPU"),
        settings={"move_cap": move_cap},
        total_bytes=pages * page_size * entry,
        device="cpu",
    )


class Rig:
    """One candidate's pool, and how it is brought to ``moves`` moves from a packed band of ``live`` pages."""

    def __init__(self, pools: Mapping[str, Any], live: int, moves: int, kind: str) -> None:
        self.pool = pools["full"]
        self.moves, self.kind = moves, kind
        self.pool.alloc(live * self.pool.page_size)
        generator = torch.Generator().manual_seed(moves)
        self._order = torch.randperm(moves or 4, generator=generator)

    def once(self) -> int:
        """Make holes, flush, and fill up again; nanoseconds of the flush."""
        pool, size = self.pool, self.pool.page_size
        mark = int(pool.watermark_physical)
        if self.moves:
            # The farthest places of a pool that grows down are its last ones; the pages next to the watermark stay live.
            places = pool.num_pages - 1 - self._order
        else:
            places = mark + 1 + self._order
        if self.kind == "urgent, half vacant" and self.moves:
            # Every other page next to the watermark is a hole too: the window holds as many live pages as are to move.
            places = torch.cat([places, mark + 1 + 2 * torch.arange(self.moves)])
        owners = pool.physical_to_virtual[places]
        pool.free(owners * size, _pages=owners)
        if self.kind == "during a forward":
            event = Event(done=False)
            pool.set_latest_forward_done_event(event)
            # It writes the pages that are farthest of all live ones, as fresh tokens of long requests would not stop the walk.
            far = pool.physical_to_virtual[pool.num_pages - 1 - self.moves - torch.arange(64)]
            pool.set_inflight_forward(event, far * size)
        begin = perf_counter_ns()
        moved = pool._flush(urgent=self.kind.startswith("urgent"))
        took = perf_counter_ns() - begin
        if int(moved) != self.moves:
            raise SystemExit(f"{type(pool).__name__} moved {moved} pages where {self.moves} were to move")
        if self.kind == "during a forward":
            event.done = True
            pool.set_inflight_forward(event, None)
            pool.set_latest_forward_done_event(None)
        pool._flush(urgent=True)
        pool.alloc(len(places) * size)
        return took


def measure(
    candidates: Sequence[Candidate], moves: int, kind: str, pages: int, page_size: int, rounds: int
) -> dict[str, list[float]]:
    """Nanoseconds of a flush, by candidate, one median a round."""
    live = 4 * max(moves, 64) + 128
    described = header(max(pages, 2 * live + 64), page_size, move_cap=1 << 20)
    rigs = {candidate.name: Rig(candidate.build(described), live, moves, kind) for candidate in candidates}
    repeats = 20 if moves > 3000 else 60 if moves > 500 else 200
    found: dict[str, list[float]] = {name: [] for name in rigs}
    names = list(rigs)
    for number in range(rounds + 1):
        first = number % len(names)
        times: dict[str, list[int]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in [*names[first:], *names[:first]]:
                times[name].append(rigs[name].once())
        if number:
            for name in names:
                found[name].append(statistics.median(times[name]))
    _same_tables({name: rig.pool for name, rig in rigs.items()})
    return found


def _same_tables(pools: Mapping[str, Any]) -> None:
    (first, reference), *others = pools.items()
    for name, pool in others:
        same = torch.equal(pool.virtual_to_physical, reference.virtual_to_physical)
        if not same or pool.watermark_physical != reference.watermark_physical:
            raise SystemExit(f"{name} and {first} ended with different tables: they did different work")


def ratios(found: Mapping[str, Sequence[float]], name: str, reference: str) -> tuple[float, float, float]:
    """Median, least and greatest of the rounds."""
    values = [ours / theirs for ours, theirs in zip(found[name], found[reference], strict=True)]
    return statistics.median(values), min(values), max(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="flush times of strategies, as ratios")
    parser.add_argument("--moves", type=int, nargs="+", default=MOVES)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--strategies", nargs="+", default=("batched", "device"), choices=STRATEGIES)
    parser.add_argument("--pages", type=int, default=65536, help="pages of the pool (default 65536)")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    candidates = [kvtape_candidate("kvtape", strategy) for strategy in args.strategies]
    if sglang_version() is not None:
        candidates.append(sglang_candidate())
    reference = candidates[-1].name
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        for moves in args.moves:
            found = measure(candidates, moves, kind, args.pages, args.page_size, args.rounds)
            row = {
                "kind": kind,
                "moves": moves,
                "microseconds": {n: statistics.median(t) / 1e3 for n, t in found.items()},
            }
            row["ratios"] = {c.name: ratios(found, c.name, reference) for c in candidates[:-1]}
            rows.append(row)
            if not args.json:
                shown = "  ".join(
                    f"{name} {median:.2f} ({low:.2f} to {high:.2f})"
                    for name, (median, low, high) in row["ratios"].items()
                )
                print(
                    f"{kind:18} {moves:6} moves   {shown}   [{reference} {row['microseconds'][reference]:.1f} us here]",
                    flush=True,
                )
    if args.json:
        json.dump(
            {"torch": torch.__version__, "sglang": sglang_version(), "reference": reference, "rows": rows},
            sys.stdout,
            indent=1,
        )


if __name__ == "__main__":
    main()
