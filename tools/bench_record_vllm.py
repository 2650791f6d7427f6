"""What recording costs vLLM's thread: `get_new_blocks` and `free_blocks` of its own `BlockPool`, bare and hooked, in one run.

    python tools/bench_record_vllm.py        # in vLLM's environment, with kvtape installed there

What is told is the median over calls of what a hook adds, for free blocks without a hash, as decoding leaves them, and with one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm.v1.core.block_pool as block_pool

from recorder import process
from recorder.engines import vllm as hooks
from recorder.settings import Settings

Calls = tuple[Callable[..., Any], Callable[..., Any]]


def times(calls: Calls, blocks: int, hashed: bool, repeat: int) -> tuple[float, float]:
    """Median microseconds of taking `blocks` blocks and of freeing them."""
    pool = block_pool.BlockPool(2000, hashed, 16)
    take, free = calls
    taking, freeing = [], []
    for number in range(repeat):
        start = time.perf_counter_ns()
        taken = take(pool, blocks)
        taking.append(time.perf_counter_ns() - start)
        if hashed:
            for place, block in enumerate(taken):
                name = b"%d %d" % (number, place)
                block._block_hash = name
                pool.cached_block_hash_to_block._cache[name] = block
        backwards = reversed(taken)
        start = time.perf_counter_ns()
        free(pool, backwards)
        freeing.append(time.perf_counter_ns() - start)
        if number % 50 == 0:
            time.sleep(0.002)  # the writer thread catches up
    return statistics.median(taking) / 1000, statistics.median(freeing) / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeat", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "bench.msgpack.zst")
        process.begin(Settings(target=target, run="bench", salt=b"", memory=512 << 20))
        recorder = process.current()
        assert recorder is not None
        bare = block_pool.BlockPool.get_new_blocks, block_pool.BlockPool.free_blocks
        hooks.attach(recorder)
        hooked = block_pool.BlockPool.get_new_blocks, block_pool.BlockPool.free_blocks
        print(f"{'blocks':>6}  {'hashed':<7}{'get_new_blocks +us':>20}{'free_blocks +us':>17}")
        for blocks in arguments.blocks:
            for hashed in (False, True):
                added = []
                for _ in range(arguments.rounds):
                    without = times(bare, blocks, hashed, arguments.repeat)
                    recorded = times(hooked, blocks, hashed, arguments.repeat)
                    added.append((recorded[0] - without[0], recorded[1] - without[1]))
                took, freed = (statistics.median(column) for column in zip(*added, strict=True))
                print(f"{blocks:>6}  {hashed!s:<7}{took:>20.2f}{freed:>17.2f}")
        dropped = sum(session.dropped for session in recorder.sessions)
        process.end()
    if recorder.failure or dropped:
        raise SystemExit(f"the recorder did not keep up: {recorder.failure or dropped}")


if __name__ == "__main__":
    main()
