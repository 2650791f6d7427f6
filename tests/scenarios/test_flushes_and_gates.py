"""Flushes while a forward runs, gates, and what a flush may cost."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.scenario import PoolShape, Scenario
from tests.scenarios.everywhere import holds_everywhere

pytestmark = pytest.mark.cpu

FLOATING = (
    PoolShape("full", "down"),
    PoolShape("mid", "float"),
    PoolShape("mamba", "up", kind="mamba", layer_num=2),
)


def test_all_pages_of_two_flushes_under_one_forward_come_back(tmp_path: Path) -> None:
    """sgl-project/sglang#39982: the second batch must not replace the first."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids = s.alloc("full", 12)
    assert ids
    full = s.pools["full"]
    s.free("full", ids[2:4])
    s.forward_begin("full", 1)
    assert s.flush("full") == 2
    s.free("full", ids[4:6])
    assert s.flush("full") == 2
    assert len(full._pending_reuse_pages_cpu) == 4 and len(full._pending_reuse) == 1
    s.forward_done(1)
    s.flush("full")
    assert not full._pending_reuse_pages_cpu
    assert full._allocated_pages() == 8
    holds_everywhere(s.close())


def test_a_float_stays_while_the_gate_is_shut(tmp_path: Path) -> None:
    """sgl-project/sglang#39982: an end pool asks for more than its gap; nothing moves, and the alloc fails."""
    s = Scenario(tmp_path / "s.msgpack.zst", FLOATING, total_bytes=64 * 96)
    s.alloc("mid", 8)
    span = s.pools["mid"]._band_pages()
    room = s.pools["full"].available_size()
    s.move_gate(is_open=False)
    assert s.alloc("full", room + 4) is None
    assert s.pools["mid"]._band_pages() == span
    s.move_gate(is_open=True)
    assert s.alloc("full", room + 4)
    assert s.pools["mid"]._band_pages() < span
    for outcome in holds_everywhere(s.close()).values():
        assert outcome.refused == 1
        assert outcome.moved_outside_flushes == 5  # as many as the float had to


def test_credit_goes_and_comes_with_the_gate(tmp_path: Path) -> None:
    """sgl-project/sglang#39982, #38836: what a flush of the neighbour would give counts only while that may move, whoever asked before."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    swa = s.alloc("swa", 8)
    assert swa
    s.free("swa", swa[2:5])
    read = s.pools["full"].schedulable_available_size
    before = read()
    s.move_gate(is_open=False)
    assert read() == s.pools["full"].available_size() == before - 3 * 2
    s.move_gate(is_open=True)
    assert read() == before
    assert s.alloc("full", before)
    holds_everywhere(s.close())


def test_a_flush_costs_the_same_whatever_it_moves(tmp_path: Path) -> None:
    """sgl-project/sglang#34066, #33060: 1 to 20, 256 and 2,048 moves, and no threshold at 16 below which they are read one by one."""
    counts = [*range(1, 21), 256, 2048]
    s = Scenario(tmp_path / "s.msgpack.zst", total_bytes=64 * 4300)
    for count in counts:
        ids = s.alloc("full", 2 * count)
        assert ids
        s.free("full", ids[count:])
        assert s.flush("full", urgent=True) == count
        s.free("full", ids[:count])
        s.flush("full", urgent=True)
    ids = s.alloc("full", 4096)
    assert ids
    s.free("full", ids[::2])
    assert s.flush("full", urgent=True) == 1024
    costs: dict[str, dict[int, set[int]]] = {}
    for name, outcome in holds_everywhere(s.close(), kv="stamp", ledger=True).items():
        costs[name] = defaultdict(set)
        for flush in outcome.flushes:
            if flush.moves:
                costs[name][flush.moves].add(flush.device_to_host + flush.host_to_device + flush.waits)
    assert set(costs["batched"]) == {*counts, 1024}
    assert {cost for found in costs["batched"].values() for cost in found} == {2}
    assert {cost for name in ("device", "late") for found in costs[name].values() for cost in found} == {0}
    # What it was before: each row is read, and their owners are copied back to the device.
    assert costs["per-row"][20] == {3 + 20} and costs["hybrid"][15] == {3 + 15} and costs["hybrid"][16] == {2}
