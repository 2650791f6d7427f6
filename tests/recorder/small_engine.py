"""A process with an allocator in it, as an engine's: allocates and frees in steps, recorded if the environment says so.

python -m tests.recorder.small_engine STEPS [--end exit|hang|kill|abort] [--pause SECONDS]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from recorder import process
from recorder.settings import read_settings, wanted
from tests.allocator.pools import two_ends
from tests.recorder.recordings import hooked


def steps(count: int, pause: float = 0.0) -> list[list[int]]:
    """What the allocator answered in each step: pages come and go, and some flushes move."""
    full, swa = two_ends(total_bytes=256 * 256)
    answers = []
    held = []
    for number in range(count):
        held.append(full.alloc(4 * (1 + number % 3)))
        tokens = swa.alloc(8)
        if number % 4 == 3:
            full.free(held.pop(0))
            full.free(held.pop(1))
            full.flush_for_allocation()
        swa.free(tokens)
        answers.append(held[-1].tolist())
        if len(held) > 6:
            full.free(held.pop(0))
        if pause:
            time.sleep(pause)
    return answers


def main() -> int:
    """Run the steps and print the answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--end", choices=("exit", "hang", "kill", "abort"), default="exit")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--status", type=int, default=0)
    arguments = parser.parse_args()
    if wanted():
        hooked(process.begin(read_settings()))
    print(steps(arguments.steps, arguments.pause), flush=True)
    if arguments.end == "hang":
        time.sleep(1.0)  # long enough for the last chunk to be written
        print("waiting", flush=True)
        time.sleep(60)
    if arguments.end == "kill":
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    return arguments.status


if __name__ == "__main__":
    sys.exit(main())
