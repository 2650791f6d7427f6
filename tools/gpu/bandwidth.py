"""How fast a flush moves bytes, against a plain copy on the same device in the same run.

Both are times on the device as the profiler has them, so that launches and the plan do not count: of a flush, the kernels launched inside
the store's ``move_physical_pages``, or, where a fused kernel does without it, the Triton kernels that move. The second-level cache is
written over before each. The whole flush, plan included, is shown beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import pkgutil
import statistics
from typing import Any

import torch

from gpu.busy import cycles_for, pools_with_bytes
from gpu.verdicts import Results
from replayer.bench_flush import Point, Rig, header_for
from replayer.ledger.profiled import OnDevice, Profile

MIB = 2**20
#: 64 KiB a page: 16 tokens of 8 layers, one head of 128 bfloat16 numbers, keys and values.
PAGE_SIZE, LAYERS, LAYOUT = 16, 8, {"head_num": 1, "head_dim": 128, "dtype": "bfloat16"}
PAGE_BYTES = PAGE_SIZE * LAYERS * 2 * 128 * 2
MOVED_MIB = (1, 4, 16, 64, 256, 1024)
WANTED_FROM_MIB, WANTED_SHARE = 64, 0.8
ROUNDS = 5
#: More than any second-level cache.
CACHE_BYTES = 256 * MIB
#: The plan's kernels are queued behind a spin of so many milliseconds, so that the device does not wait for the host between them.
SPIN_MS = 3.0


def kernel_names() -> set[str]:
    """Names of the Triton kernels of `allocator.kernels`; empty where there is no such package, or no Triton."""
    if importlib.util.find_spec("allocator.kernels") is None or importlib.util.find_spec("triton") is None:
        return set()
    package = importlib.import_module("allocator.kernels")
    modules = [package]
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), "allocator.kernels."):
        modules.append(importlib.import_module(found.name))
    jitted = [
        value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "fn") and hasattr(value, "run")
    ]
    return {_python_name(value) for value in jitted}


def _python_name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):  # an autotuner or heuristics around a kernel
        kernel = kernel.fn
    return str(kernel.__name__)


def path_of(kernels: list[OnDevice]) -> str:
    """``triton`` if a kernel of ours ran among these, else ``torch``."""
    ours = kernel_names()
    return "triton" if any(name in each.name for each in kernels for name in ours) else "torch"


def fused_moves(kernels: list[OnDevice]) -> list[OnDevice]:
    """Of the kernels of a flush, those of ours that move; all of ours if no name says which."""
    names = kernel_names()
    ours = [each for each in kernels if any(name in each.name for name in names)]
    return [each for each in ours if "move" in each.name] or ours


def check_bandwidth(results: Results, device: str, strategy: str) -> str:
    """Moved bytes from 1 MiB to 1 GiB; which path ran."""
    if torch.device(device).type != "cuda":
        results.add("bandwidth of moves over that of a copy", None, "needs CUDA", f"at least {WANTED_SHARE}")
        return "torch"
    path = "torch"
    free, _ = torch.cuda.mem_get_info()
    cycles = cycles_for(SPIN_MS)
    for megabytes in MOVED_MIB:
        # Pool (moved pages twice, and as many free), copy's two buffers, what a move gathers into, and the cache's.
        if free < 6.5 * megabytes * MIB + 2 * CACHE_BYTES:
            results.skipped.append(f"bandwidth at {megabytes} MiB: the GPU has too little free memory")
            continue
        if results.has_time(f"bandwidth at {megabytes} MiB", 6.0):
            path = _at(results, device, strategy, megabytes, cycles)
        torch.cuda.empty_cache()
    return path


def _at(results: Results, device: str, strategy: str, megabytes: int, cycles: int) -> str:
    moves = megabytes * MIB // PAGE_BYTES
    live = 2 * moves + 256
    point = Point("moves", "urgent", moves, live + moves + 64, PAGE_SIZE)
    header = header_for(point, live, layout=LAYOUT, layers=LAYERS, spare=1.25)
    rig = Rig(pools_with_bytes(header, strategy, device), point, live)
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device)
    source = torch.empty(megabytes * MIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    store, inside = rig.pool._kvcache, itertools.count(1)
    original = store.move_physical_pages

    def in_range(*arguments: Any) -> None:
        with Profile.range(next(inside)):
            original(*arguments)

    def flush() -> Any:
        rig.make_holes()
        torch.cuda.synchronize()
        cache.fill_(1)
        torch.cuda._sleep(cycles)
        with Profile.range(next(inside)):
            moved = rig.flush()
        torch.cuda.synchronize()
        return moved

    for _ in range(2):  # compiles, and fills the caching allocator
        rig.fill_up(flush())
        target.copy_(source)
    moving, whole, copying, paths = [], [], [], set()
    store.move_physical_pages = in_range
    for _ in range(ROUNDS):
        inside = itertools.count(1)
        profile = Profile()
        with profile:
            moved = flush()
            cache.fill_(2)
            with profile.range(0):
                target.copy_(source)
            torch.cuda.synchronize()
        all_kernels = profile.findings[
            1
        ].on_device  # range 1 is the flush; ranges inside it are the store's moves
        moved_inside = [
            kernel for number, found in profile.findings.items() if number > 1 for kernel in found.on_device
        ]
        fused = fused_moves(all_kernels)
        paths.add(path_of(all_kernels))
        moving.append(sum(kernel.microseconds for kernel in moved_inside or fused))
        whole.append(sum(kernel.microseconds for kernel in all_kernels))
        copying.append(sum(kernel.microseconds for kernel in profile.findings[0].on_device))
        rig.fill_up(moved)
    store.__dict__.pop("move_physical_pages")
    copy_us, move_us, whole_us = (statistics.median(times) for times in (copying, moving, whole))
    path = "/".join(sorted(paths))
    share = None if not move_us or not copy_us else copy_us / move_us
    gigabytes = megabytes * MIB / 1e9
    results.row(
        "bandwidth", mib=megabytes, pages=moves, path=path, copy_us=copy_us, moves_us=move_us or None, flush_kernels_us=whole_us,
        copy_gb_s=gigabytes / copy_us * 1e6 if copy_us else None, moves_gb_s=gigabytes / move_us * 1e6 if move_us else None,
        moves_over_copy=share,
    )  # fmt: skip
    if megabytes >= WANTED_FROM_MIB:
        found = (
            "the profiler has no kernels of the moves, or none of the copy"
            if share is None
            else f"{share:.2f} ({path})"
        )
        results.add(
            f"bandwidth of moves over that of a copy, {megabytes} MiB",
            share is not None and share >= WANTED_SHARE,
            found,
            f"at least {WANTED_SHARE}",
        )
    return path
