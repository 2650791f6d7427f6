"""Memory that is queued, lent, in flight or evictable is no leak, and log-probabilities of another batch are no corruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import MultiEndedAllocator
from recorder.trace import EventKind
from replayer import logprob
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.composite_scenario import MAMBA_SWA, CompositeScenario
from tests.scenario import PoolShape, Scenario
from tests.scenarios.everywhere import holds_everywhere

pytestmark = pytest.mark.cpu

PAGED = (PoolShape("full", "down", page_size=4), PoolShape("swa", "up", page_size=4, layer_num=2))


def test_queued_pages_are_no_leak(tmp_path: Path) -> None:
    """Frees of an open group: neither lost nor free, while flushes and allocs go on, and when the trace ends."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 32)
    assert ids
    s.free("full", ids[24:28])
    s.free_group_begin("full")
    s.free("full", ids[4:8])
    s.free_segment("full", ids[8:16], start=8)
    s.flush("full", urgent=True)
    assert s.pools["full"].allocated_count() == 28
    s.alloc("swa", 8)
    holds_everywhere(s.close())


def test_pages_queued_with_a_composite_are_no_leak(tmp_path: Path) -> None:
    """The same where a group holds pages of two pools, and a state waits too."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst", MAMBA_SWA)
    ids, slots = s.take(24), s.slot_alloc(2)
    assert ids and slots
    s.group_begin()
    s.give(ids[:8])
    s.free_swa(ids[8:12])
    s.slot_free(slots[:1])
    s.flush_all()
    s.take(8)
    holds_everywhere(s.close())


def test_lent_pages_are_no_leak(tmp_path: Path) -> None:
    """A lease that is still open when the trace ends, also on places that have no id."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED, leases_shut_gates=True)
    ids = s.alloc("full", 16)
    assert ids
    s.export(1, "full", ids[4:8])
    s.free("full", ids[8:12])
    places = s.alloc_physical("swa", 8)
    assert places
    s.lease_begin(2, "swa", [places[0] // 4, places[4] // 4], [-1, -1])
    assert s.flush("full", urgent=True) == 0
    assert s.pools["swa"].allocated_count() == 8
    holds_everywhere(s.close())


def test_pages_in_flight_are_no_leak(tmp_path: Path) -> None:
    """Pages that wait for a forward that is still running when the trace ends."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids = s.alloc("full", 12)
    assert ids
    s.free("full", ids[6:10])
    s.forward_begin("full", 1, writes=ids[4:5], reads=ids[10:])
    assert s.flush("full") > 0
    assert s.pools["full"]._pending_reuse_pages_cpu
    s.alloc("full", 2)
    s.flush("full")
    holds_everywhere(s.close())


def test_evictable_pages_are_no_leak(tmp_path: Path) -> None:
    """A cache keeps pages that no request uses: nothing reads, writes or frees them to the end."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    cached, other = s.alloc("full", 24), s.alloc("full", 16)
    assert cached and other
    for number in range(4):
        s.forward_begin("full", number, writes=other[:1], reads=other)
        s.forward_done(number)
        s.flush("full")
    s.free("full", other)
    s.flush("full", urgent=True)
    assert s.pools["full"].allocated_count() == 24
    holds_everywhere(s.close())


def test_reserved_and_backed_up_pages_are_no_leak(tmp_path: Path) -> None:
    """Pages whose load has not been queued when the trace ends, and contents that live in host memory only."""
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 16)
    assert ids
    s.backup(1, "full", ids[:8], [0, 1])
    s.copy_done(1)
    s.free("full", ids[:8])
    assert s.alloc_physical("full", 8)
    s.flush("full")
    holds_everywhere(s.close())


def test_another_batch_is_no_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#39146: a fuzzer took a change in sampled tokens for corruption; it was the numerics of another batch.

    Here an engine computes the same request inside a batch padded with other rows: its log-probabilities are others than alone. What a
    replay compares is the same computation on the same shapes, and whose bytes these are is told by stamps.
    """
    s = Scenario(tmp_path / "s.msgpack.zst", PAGED)
    ids = s.alloc("full", 32)
    assert ids
    s.free("full", ids[24:32])
    assert s.flush("full", urgent=True)
    path = s.close()
    alone = _log_probabilities(path, monkeypatch)

    def in_a_batch(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # Rows in two parts, as where a batch is split over blocks: the sums round otherwise.
        count, heads, dim = keys.shape
        scores = torch.einsum("hgd,thd->hgt", query.view(heads, logprob.GROUP, dim), keys) / dim**0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        parts = [slice(0, count // 3), slice(count // 3, count)]
        total = sum(torch.einsum("hgt,thd->hgd", weights[..., part], values[part]) for part in parts)
        assert isinstance(total, torch.Tensor)
        return (total / weights.sum(-1, keepdim=True)).reshape(-1)

    monkeypatch.setattr(logprob, "_grouped_query", in_a_batch)
    batched = _log_probabilities(path, monkeypatch)
    assert len(alone) == len(batched) > 0
    difference = max(float((a - b).abs().max()) for a, b in zip(alone, batched, strict=True))
    assert 0 < difference < 1e-3


def _log_probabilities(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """All that a replay computed, which must hold with difference 0.0."""
    found: list[torch.Tensor] = []
    original = logprob.Probe._log_probabilities

    def noting(*arguments: object) -> torch.Tensor:
        found.append(original(*arguments))  # type: ignore[arg-type]
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(logprob.Probe, "_log_probabilities", noting)
        options = CheckOptions(every=1, logprob_every=1)
        outcome = replay(ReplayOptions(path, TargetOptions(kv="full"), options, ledger=False))
    assert outcome.verdict == "held", outcome.failure
    assert outcome.logprob_compared > 0 and outcome.logprob_largest == 0.0
    return found


def test_a_forward_whose_event_has_not_fired_may_stop_a_flush_though_a_later_one_is_over(
    tmp_path: Path,
) -> None:
    """The end of a forward on the window pool says that the one before it is over, which wrote the other pool; that one's event is asked
    by that pool alone and has not fired: pages that it was to write stay where they are."""
    s = Scenario(tmp_path / "s.msgpack.zst")
    ids, window = s.alloc("full", 6), s.alloc("swa", 1)
    assert ids and window
    s.forward_begin("full", 1, ids[:1])
    s.forward_begin("swa", 2, window)
    s.forward_done(2)
    s.free("full", ids[4:])
    assert s.flush("full") == 0
    s.forward_done(1)
    holds_everywhere(s.close())


class ResizesAsSGLangs(MultiEndedAllocator):
    """Named as SGLang 0.5.23's: what takes a number of slots is ``_set_capacity``, and ``resize`` takes a configuration."""

    def resize(self, config: Any) -> None:  # type: ignore[override]
        self._set_capacity(config.max_total_num_tokens)

    def _set_capacity(self, max_slots: int, *, virtual_num_pages: int | None = None) -> None:
        MultiEndedAllocator.resize(self, max_slots, virtual_num_pages=virtual_num_pages)


def test_a_pool_is_resized_by_the_name_that_sglang_has_for_it(tmp_path: Path) -> None:
    s = Scenario(tmp_path / "s.msgpack.zst")
    s.pools["full"].resize(40)
    s.write(EventKind.RESIZE, "full", value=40, value2=-1)
    ids = s.alloc("full", 30)
    assert ids
    s.free("full", ids[:10])
    path = s.close()
    holds_everywhere(path)
    target = TargetOptions(f"{__name__}:{ResizesAsSGLangs.__name__}")
    assert replay(ReplayOptions(path, target, CheckOptions(every=1))).verdict == "held"
