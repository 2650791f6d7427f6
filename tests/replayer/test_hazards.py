"""Running forwards, leases and gates: what a late write or an early reuse does must show, and what is allowed must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import MultiEndedAllocator
from replayer.checks import CheckOptions
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))


class MovesBeforeWaiting(MultiEndedAllocator):
    """An urgent flush copies first and orders the stream behind the forward afterwards."""

    def _move(self, src_list: list[int], dst_list: list[int]) -> torch.Tensor:
        settle, self._forward.settle = self._settle, lambda: None  # type: ignore[method-assign]
        moved = super()._move(src_list, dst_list)
        settle()
        return moved

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._settle = self._forward.settle
        self._forward.settle = lambda: None  # type: ignore[method-assign]


def run(path: Path, allocator: str = "kvtape", kv: str = "stamp", **checks: Any) -> Outcome:
    return replay(ReplayOptions(path, TargetOptions(allocator=allocator, kv=kv), CheckOptions(**checks)))


@pytest.mark.parametrize("kv", ["stamp", "full"])
def test_an_urgent_flush_waits_for_the_writing_forward(tmp_path: Path, kv: str) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc_extend("full", [0], [30], [-1])
    assert ids
    s.free("full", ids[24:28])
    s.free("full", ids[20:24])
    s.forward_begin("full", 1, writes=[ids[0]])
    s.flush("full", urgent=True)
    s.forward_done(1)
    path = s.close()
    assert run(path, kv=kv).verdict == "held"
    outcome = run(path, "tests.replayer.test_hazards:MovesBeforeWaiting", kv=kv)
    assert outcome.failure is not None and (outcome.failure.check, outcome.failure.seq) == ("C7", 4)
    # Without C7 the late write itself is what shows: the copy does not have it.
    outcome = run(path, "tests.replayer.test_hazards:MovesBeforeWaiting", kv=kv, enabled=frozenset({"C6"}))
    assert outcome.failure is not None and outcome.failure.check == "C6"


def test_a_read_set_keeps_its_bytes(tmp_path: Path) -> None:
    """vllm-ascend#13501's kind: a page still read is freed and handed out again."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.forward_begin("full", 1, reads=ids[0:4])
    s.free("full", ids[0:4])
    s.alloc("full", 4)
    s.forward_done(1)
    outcome = run(s.close())
    assert outcome.failure is not None and (outcome.failure.check, outcome.failure.seq) == ("C8", 3)


def test_a_lease_pins_its_places(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 24)
    assert ids
    s.free("full", ids[16:20])
    s.lease_begin(7, "full", [s.place_of("full", ids[0] // 4)])
    s.flush("full")
    s.lease_end(7, "full")
    outcome = run(s.close())
    assert outcome.failure is not None and (outcome.failure.check, outcome.failure.seq) == ("C9", 3)


def test_a_lease_with_a_shut_gate_holds(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 24)
    assert ids
    s.free("full", ids[16:20])
    s.move_gate(is_open=False)
    s.lease_begin(7, "full", [s.place_of("full", ids[0] // 4)])
    s.flush("full", urgent=True)
    s.lease_end(7, "full")
    s.move_gate(is_open=True)
    assert s.flush("full", urgent=True) == 1
    assert run(s.close()).verdict == "held"


def test_pages_freed_while_a_forward_writes_them_are_no_false_alarm(tmp_path: Path) -> None:
    """SGLang frees the last page of a finished request while the next step, which still writes it, runs. Filling it is counted."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 24)
    assert ids
    s.forward_begin("full", 1, writes=[ids[19]])
    s.free("full", ids[16:20])
    s.flush("full")
    s.forward_done(1)
    outcome = run(s.close())
    assert outcome.verdict == "held", outcome.failure
    assert outcome.filled_under_a_write == 1


def test_gates_turn_credit_on_and_off(tmp_path: Path) -> None:
    """sglang#39982, #38836: with the gate shut, holes of the neighbour are no room; nothing else was called in between."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("swa", 24)
    assert ids
    s.free("swa", ids[0:8])
    full = s.pools["full"]
    opened = full.schedulable_available_size()
    s.move_gate(is_open=False)
    shut = full.schedulable_available_size()
    s.move_gate(is_open=True)
    assert opened - shut == 2 * 2 * 4 and full.schedulable_available_size() == opened
    s.flush("full")
    assert run(s.close(), every=1).verdict == "held"
