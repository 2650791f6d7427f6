"""Allocators whose late flush runs in kernels: placement as recorded, and the same state as ``batched`` after every call."""

from __future__ import annotations

from tests.kernels.interpreter import require_interpreter

require_interpreter()

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.stateful import run_state_machine_as_test  # noqa: E402

from allocator.flush_ops import TorchFlush  # noqa: E402
from allocator.kernels.flush import TritonFlush  # noqa: E402
from tests.allocator import test_device_lockstep as lockstep  # noqa: E402
from tests.allocator.delayed import NeverEnd, NeverFloat, SlowEnd, SlowFloat  # noqa: E402
from tests.golden import test_golden as golden  # noqa: E402

pytestmark = pytest.mark.cpu


class SmallBlocks(TritonFlush):
    """Windows of more than one block, as large pools have them."""

    block = 64


class OneBlockNever(NeverEnd):
    flush_ops_class: type[TorchFlush] | None = TritonFlush


class TinyBlocks(TritonFlush):
    """The same for the pools of the lockstep."""

    block = 4


class BlocksNever(NeverEnd):
    flush_ops_class: type[TorchFlush] | None = TinyBlocks


class OneBlockSlow(SlowEnd):
    flush_ops_class: type[TorchFlush] | None = TritonFlush


class BlocksSlow(SlowEnd):
    flush_ops_class: type[TorchFlush] | None = SmallBlocks


KINDS = {
    "never": ((OneBlockNever, NeverFloat), 13),
    "slow": ((BlocksSlow, SlowFloat), 5),
}
#: The large ones take the interpreter seconds each: they are played once, the two ways in turn.
CASES = [
    (path, kind)
    for number, path in enumerate(golden.TRANSCRIPTS)
    for turn, kind in enumerate(KINDS)
    if not path.name.startswith("large") or number % 2 == turn
]


@pytest.mark.parametrize(
    ("path", "kind"), CASES, ids=[f"{kind}-{path.name.split('.')[0]}" for path, kind in CASES]
)
def test_placement_is_the_recorded_one(path: Path, kind: str) -> None:
    golden.test_numbers_that_come_late_change_no_placement(path, *KINDS[kind])


def test_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that drives ``batched`` and ``device`` side by side, bytes and all."""
    monkeypatch.setitem(lockstep.KINDS, "slow", ("device", OneBlockSlow, SlowFloat))
    monkeypatch.setitem(lockstep.KINDS, "never", ("device", BlocksNever, NeverFloat))
    run_state_machine_as_test(
        lockstep.Lockstep,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
