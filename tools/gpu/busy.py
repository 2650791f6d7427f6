"""What a flush costs the host: on an idle stream, and on one that a forward keeps busy.

A synchronisation on an idle GPU costs next to nothing; on a busy one it holds the host until everything queued before it is done. The
forward is a kernel that spins (``torch.cuda._sleep``) for about `FORWARD_MS` milliseconds, queued right before the flush.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch

from allocator import kv_store_for
from gpu.verdicts import Results
from recorder.trace import Header
from replayer.bench_flush import DURING, WRITTEN, Forward, Point, Rig, header_for
from replayer.targets import TargetOptions, build_allocators, build_buffer

FORWARD_MS = 10.0
MOVES = (1, 4, 16, 64, 256, 1024, 4096)
KINDS = ("urgent", DURING)
ROUNDS = 7
#: Where the figure is wanted: moves, and the most of ``batched``'s time that ``device`` may hold the host.
WANTED_MOVES, WANTED_RATIO = 256, 0.2


def pools_with_bytes(header: Header, strategy: str, device: str) -> Mapping[str, Any]:
    """Fresh allocators over a buffer with real bytes, as a server has them."""
    buffer = build_buffer(header, device)
    stores: dict[str, Any] = {pool.name: kv_store_for(buffer, pool.name) for pool in header.pools}
    return build_allocators(header, TargetOptions(strategy=strategy, device=device), buffer, stores)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def cycles_for(milliseconds: float) -> int:
    """Argument of ``torch.cuda._sleep`` that spins so long on this GPU at the clock it has now."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    for _ in range(2):  # the first one also wakes the clocks
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return max(1, int(cycles * milliseconds / start.elapsed_time(end)))


def hold(rig: Rig, device: str, cycles: int) -> tuple[float, bool | None]:
    """One flush: milliseconds for which it held the host, and whether it returned before the forward was over (None: none ran)."""
    written = rig.make_holes()
    synchronize(device)
    busy: Any = None
    if cycles:
        busy = torch.cuda.Event()
        torch.cuda._sleep(cycles)
        busy.record()
    idle = Forward()
    if rig.point.kind == DURING:
        rig.launch(busy or idle, written)
    begin = perf_counter()
    moved = rig.flush()
    held = (perf_counter() - begin) * 1e3
    returned_first = None if busy is None else not busy.query()
    synchronize(device)
    idle.done = True
    rig.fill_up(moved)
    return held, returned_first


def check_busy(
    results: Results, device: str, strategies: list[str], moves: tuple[int, ...], rounds: int
) -> None:
    """Strategies in turns, round by round, at each number of moves."""
    on_cuda = torch.device(device).type == "cuda"
    cycles = cycles_for(FORWARD_MS) if on_cuda else 0
    for kind in KINDS:
        for count in moves:
            if results.has_time(f"held host time at {count} moves, {kind}", 2.0 if on_cuda else 0.0):
                _at(results, device, strategies, Point("moves", kind, count, 32_768), cycles, rounds)
    if not on_cuda:
        what = f"host held by device over batched, busy stream, {WANTED_MOVES} moves"
        results.add(what, None, "needs CUDA", f"at most {WANTED_RATIO}")


def _at(results: Results, device: str, strategies: list[str], point: Point, cycles: int, rounds: int) -> None:
    live = 4 * max(point.moves, WRITTEN) + 2 * WRITTEN
    header = header_for(point, live, layout={"head_num": 4, "head_dim": 128, "dtype": "bfloat16"})
    rigs = {name: Rig(pools_with_bytes(header, name, device), point, live) for name in strategies}
    idle: dict[str, list[float]] = {name: [] for name in rigs}
    busy: dict[str, list[float]] = {name: [] for name in rigs}
    before_forward: dict[str, int] = dict.fromkeys(rigs, 0)
    names = list(rigs)
    for number in range(rounds + 2):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            held, _ = hold(rigs[name], device, 0)
            held_busy, returned_first = hold(rigs[name], device, cycles) if cycles else (0.0, None)
            if number >= 2:  # two to warm up
                idle[name].append(held)
                busy[name].append(held_busy)
                before_forward[name] += bool(returned_first)
    for name in names:
        results.row(
            "host held, ms", kind=point.kind, moves=point.moves, strategy=name, idle=statistics.median(idle[name]),
            busy=_median(busy[name], cycles), busy_least=_of(min, busy[name], cycles), busy_most=_of(max, busy[name], cycles),
            returned_during_forward=f"{before_forward[name]} of {rounds}" if cycles else None,
        )  # fmt: skip
    if cycles and point.moves == WANTED_MOVES and {"device", "batched"} <= set(names):
        ratios = [ours / theirs for ours, theirs in zip(busy["device"], busy["batched"], strict=True)]
        ratio = statistics.median(ratios)
        results.add(
            f"host held by device over batched, busy stream, {point.moves} moves, {point.kind}",
            ratio <= WANTED_RATIO,
            f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            f"at most {WANTED_RATIO}",
        )


def _median(values: list[float], measured: int) -> float | None:
    return statistics.median(values) if measured else None


def _of(choose: Callable[[list[float]], float], values: list[float], measured: int) -> float | None:
    return choose(values) if measured else None
