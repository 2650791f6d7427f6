"""Three counts of the same calls. CUDA's two are imitated; on a real device they are `tools/gpu_check.py`'s business."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import replayer.ledger.three_counts as three_counts
from replayer.ledger.profiled import Profile, RangeFindings
from replayer.ledger.three_counts import Counted, ThreeCounts

pytestmark = pytest.mark.cpu


class FakeProfile:
    """Reports what the test put into ``runtime``, by number of range."""

    runtime: dict[int, dict[str, int]] | None = None

    def __init__(self) -> None:
        self.findings: dict[int, RangeFindings] = {}
        self.saw_runtime = self.runtime is not None

    def __enter__(self) -> FakeProfile:
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, syncs in (self.runtime or {}).items():
            self.findings[number] = RangeFindings(syncs)

    @staticmethod
    @contextmanager
    def range(number: int) -> Iterator[None]:
        yield

    paused = staticmethod(Profile.paused)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeProfile]:
    """A process-wide debug mode that nobody minds here, and a profiler that says what it is told to."""
    mode = {"value": 0}
    numbers = {"default": 0, "warn": 1, "error": 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode["value"])
    monkeypatch.setattr(
        torch.cuda,
        "set_sync_debug_mode",
        lambda value: mode.update(value=numbers[value] if isinstance(value, str) else value),
    )
    monkeypatch.setattr(three_counts, "Profile", FakeProfile)
    monkeypatch.setattr(FakeProfile, "runtime", {})
    return FakeProfile


def test_three_that_agree(cuda: type[FakeProfile]) -> None:
    cuda.runtime = {0: {"cudaStreamSynchronize": 2}, 1: {}}
    three = ThreeCounts("cpu")
    made = torch.arange(3)
    with three.session():
        with three.call("reads", 5) as record:
            for _ in range(2):
                made.tolist()
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        with three.call("does not"):
            pass
    three.close()
    assert record.device_to_host == 2
    reads, idle = three.calls
    assert (reads.kind, reads.seq, reads.ledger, reads.warned, reads.runtime) == ("reads", 5, 2, 2, 2)
    assert reads.agrees is True
    assert (idle.ledger, idle.warned, idle.runtime, idle.agrees) == (0, 0, 0, True)


def test_calls_inside_calls(cuda: type[FakeProfile]) -> None:
    cuda.runtime = {0: {"cudaStreamSynchronize": 2}, 1: {"cudaStreamSynchronize": 1}}
    made = torch.arange(3)
    three = ThreeCounts("cpu")

    def read() -> None:
        made.tolist()
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    with three.session(), three.call("outer"):
        with three.call("inner"):
            read()
        read()
    three.close()
    assert [(each.kind, each.ledger, each.warned, each.runtime) for each in three.calls] == [
        ("inner", 1, 1, 1),
        ("outer", 2, 2, 2),
    ]


def test_a_pause_is_counted_by_none(cuda: type[FakeProfile]) -> None:
    cuda.runtime = {0: {}}
    made = torch.arange(3)
    three = ThreeCounts("cpu")
    with three.session(), three.call("call"), three.paused():
        made.tolist()
        assert torch.cuda.get_sync_debug_mode() == 0
    three.close()
    assert [(each.ledger, each.warned, each.runtime) for each in three.calls] == [(0, 0, 0)]
    assert torch.cuda.get_sync_debug_mode() == 0


def test_a_wait_for_an_event_has_no_warning(cuda: type[FakeProfile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    cuda.runtime = {0: {"cudaEventSynchronize": 1}}
    three = ThreeCounts("cpu")
    with three.session(), three.call("waits"):
        torch.cuda.Event.synchronize(None)  # type: ignore[arg-type]
    three.close()
    (waits,) = three.calls
    assert (waits.ledger, waits.unwarned, waits.warned, waits.runtime, waits.agrees) == (1, 1, 0, 1, True)


@pytest.mark.parametrize(("ledger", "warned", "runtime"), [(1, 0, 1), (0, 1, 0), (0, 0, 1), (2, 2, 1)])
def test_a_difference_is_told(ledger: int, warned: int, runtime: int) -> None:
    assert Counted("call", 0, ledger=ledger, warned=warned, runtime=runtime).agrees is False


def test_what_the_profiler_lost_is_not_zero(cuda: type[FakeProfile]) -> None:
    cuda.runtime = {1: {}}
    three = ThreeCounts("cpu")
    with three.session():
        for kind in ("lost", "found"):
            with three.call(kind):
                pass
    three.close()
    assert [(each.runtime, each.agrees) for each in three.calls] == [(None, None), (0, True)]


def test_without_cuda_only_the_ledger_counts() -> None:
    made = torch.arange(3)
    three = ThreeCounts("cpu")
    with three.session(), three.call("reads"):
        made.tolist()
    with three.call("outside a session") as record:
        made.tolist()
    three.close()
    (reads,) = three.calls
    assert (reads.ledger, reads.warned, reads.runtime, reads.agrees) == (1, None, None, None)
    assert record.device_to_host == 1
