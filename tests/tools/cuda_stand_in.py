"""Runs what `tools/gpu_check.py` does on CUDA alone, with a stand-in for `torch.cuda`: that it runs and can fail, not what it finds.

A program. Spinning kernels end when somebody synchronises, so a flush that asks the device nothing returns before them. What the profiler
finds is made up: each kernel inside the store's moves takes as long as ``moves_take`` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tools")]

import torch  # noqa: E402
from gpu import bandwidth, busy, counting  # noqa: E402
from gpu.verdicts import Results  # noqa: E402

from replayer.ledger.profiled import OnDevice, RangeFindings  # noqa: E402


class Device:
    """``sleeping``: whether a spin is running."""

    def __init__(self) -> None:
        self.sleeping = False
        self.spins = 0

    def sleep(self, cycles: int) -> None:
        assert cycles > 0
        self.sleeping = True
        self.spins += 1

    def synchronize(self) -> None:
        self.sleeping = False


DEVICE = Device()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._during: bool | None = None

    def record(self, stream: Any = None) -> None:
        self._during = DEVICE.sleeping

    def query(self) -> bool:
        return not (self._during and DEVICE.sleeping)

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        DEVICE.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return 10.0


class Profile:
    """Findings by number of range: the copy is 0 and takes 100 us, the flush 1, its moves are those after it."""

    moves_take = 110.0

    def __init__(self) -> None:
        self.findings: dict[int, RangeFindings] = {}
        Profile.last = self

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    @staticmethod
    @contextmanager
    def range(number: int) -> Iterator[None]:
        took = {0: 100.0, 1: 0.0}.get(number, Profile.moves_take)
        last = getattr(Profile, "last", None)
        if last is not None:
            kernel = OnDevice("index_copy", took)
            last.findings[number] = RangeFindings({}, [kernel])
        yield


def install() -> None:
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    torch.cuda._sleep = DEVICE.sleep
    torch.cuda.synchronize = DEVICE.synchronize  # type: ignore[assignment]
    torch.cuda.empty_cache = lambda: None
    bandwidth.Profile = Profile  # type: ignore[attr-defined, misc, assignment]
    busy.synchronize = lambda device: DEVICE.synchronize()
    bandwidth.CACHE_BYTES = 2**16


def main() -> None:
    install()
    results = Results(1e6)
    results.begin_part(1.0)
    cycles = busy.cycles_for(5.0)
    assert cycles == 10_000_000
    for kind in busy.KINDS:
        point = busy.Point("moves", kind, busy.WANTED_MOVES, 2048)
        busy._at(results, "cpu", ["device", "batched"], point, cycles, 1)
    rows = results.rows["host held, ms"]
    assert all(row["returned_during_forward"] == "1 of 1" for row in rows), rows
    assert all(row["busy"] > 0 for row in rows)
    assert len(results.verdicts) == 2
    for took, held in ((110.0, True), (200.0, False), (0.0, False)):
        Profile.moves_take = took
        assert bandwidth._at(results, "cpu", "batched", 64, 1) == "torch"
        verdict = results.verdicts[-1]
        assert verdict.held is held, verdict
    assert "no kernels" in results.verdicts[-1].found
    assert bandwidth._at(results, "cpu", "device", 1, 1) == "torch"
    assert results.rows["bandwidth"][-1]["pages"] == 16
    # Where the warnings and the profiler say nothing, the counts differ from what is known, and that is a failure.
    counting._check_known(results, "cpu")
    assert results.verdicts[-1].held is False
    assert "item: (1, None, None) instead of (1, 1, 1)" in results.verdicts[-1].found, results.verdicts[-1]
    print("ran", len(results.verdicts), DEVICE.spins)


if __name__ == "__main__":
    main()
