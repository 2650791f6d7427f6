"""What a replay of calls on a composite must see: joint capacity, pairs, groups, gates over all members; and calls that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import (
    UnifiedMambaTokenToKVPoolAllocator,
    UnifiedSWATokenToKVPoolAllocator,
)
from recorder.trace import EventKind, ImpossibleEvent, TraceReader
from replayer.checks import CheckOptions
from replayer.errors import UsageError
from replayer.history import last_events
from replayer.main import main
from replayer.replay import Outcome, ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.composite_scenario import MAMBA, MAMBA_SWA, SWA, CompositeScenario

pytestmark = pytest.mark.cpu

STRATEGIES = ("per-row", "hybrid", "batched", "device")


def run(path: Path, allocator: str = "kvtape", strategy: str = "batched", **checks: Any) -> Outcome:
    target = TargetOptions(allocator=allocator, kv="stamp", strategy=strategy)
    return replay(ReplayOptions(path, target, CheckOptions(**checks)))


def failed_at(outcome: Outcome) -> tuple[str, int] | None:
    return None if outcome.failure is None else (outcome.failure.check, outcome.failure.seq)


def holds(path: Path) -> None:
    for strategy in STRATEGIES:
        outcome = run(path, strategy=strategy, every=1)
        assert outcome.failure is None, (strategy, vars(outcome.failure))


def here(mutant: type[Any]) -> str:
    return f"{__name__}:{mutant.__name__}"


# -- joint capacity


class EachSideAlone(UnifiedSWATokenToKVPoolAllocator):
    """The smaller of what each side has alone (sgl-project/sglang#39294)."""

    def _compute_available_size(self) -> int:
        return min(self.full_attn_allocator.available_size(), self.swa_attn_allocator.available_size())


class KeepsWhatItTook(UnifiedSWATokenToKVPoolAllocator):
    """A refused alloc keeps what it has taken of the full side."""

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        if super().ensure_capacity(full_tokens, swa_tokens):
            return True
        self.full_attn_allocator.alloc(self.page_size)
        return False


class NeverPacksTogether(UnifiedSWATokenToKVPoolAllocator):
    """Refuses where packing both pools would have made room."""

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        pages = full_tokens // self.page_size, swa_tokens // self.page_size
        return self._fits_page_demand(*pages, compacted=False)


class SaysYes(UnifiedSWATokenToKVPoolAllocator):
    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        return super().ensure_capacity(full_tokens, swa_tokens) or full_tokens > 100


def joint(path: Path) -> Path:
    """Each side alone has room for more than both together; then one side has holes, and only packing makes room."""
    s = CompositeScenario(path, total_bytes=64 * 64)
    ids = s.take(8)
    assert ids
    full, swa = s.pools["full"], s.pools["swa"]
    assert min(full.available_size(), swa.available_size()) > s.composite.available_size()
    assert s.take(16) is None
    more = s.take(s.composite.available_size())
    assert more
    s.give(ids)
    s.free_swa(more[:4])
    assert s.ensure_capacity(4, 4)
    assert not s.ensure_capacity(400, 0)
    assert s.take(8)
    return s.close()


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [(None, None), (EachSideAlone, ("C10", 0)), (KeepsWhatItTook, ("C4", 1)), (SaysYes, ("C10", 6))],
)
def test_joint_capacity(tmp_path: Path, mutant: type[Any] | None, expected: tuple[str, int] | None) -> None:
    path = joint(tmp_path / "s.msgpack.zst")
    if mutant is None:
        holds(path)
    else:
        assert failed_at(run(path, here(mutant))) == expected


def packing(path: Path) -> Path:
    s = CompositeScenario(path, total_bytes=512 + 8 * 768)
    ids = s.take(32)
    assert ids
    s.free_swa(ids[:28])  # holes of the window side only, and no gap that the full side could take
    assert s.composite.available_size() == 0
    assert s.take(16)
    return s.close()


def test_a_request_that_fits_after_packing_is_served(tmp_path: Path) -> None:
    path = packing(tmp_path / "s.msgpack.zst")
    holds(path)
    assert failed_at(run(path, here(NeverPacksTogether))) == ("C10", 2)


# -- pairs and groups


class SettlesPairsWhenTheGroupCloses(UnifiedSWATokenToKVPoolAllocator):
    """Looks up window pages when the group closes, and pairs anew without giving up the old one (#36135, #36381, #36646)."""

    def free(self, free_index: torch.Tensor | None) -> None:
        if self._group is not None and free_index is not None:
            self._group.full_only.append(free_index.clone())
            return
        super().free(free_index)

    def free_group_end(self) -> None:
        group, self._group = self._group, None
        for tokens in [] if group is None else group.full_only:
            super().free(tokens)

    def set_full_to_swa_mapping(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        pages, places = (
            full_indices[:: self.page_size] // self.page_size,
            swa_indices[:: self.page_size] // self.page_size,
        )
        self.swa_attn_allocator._tables.bind(pages, places)


class ReleasesThePairMadeLater(UnifiedSWATokenToKVPoolAllocator):
    """Gives up the old pair in time, and the new one with it when the group closes."""

    _tokens: tuple[torch.Tensor, ...] = ()

    def free(self, free_index: torch.Tensor | None) -> None:
        if self._group is not None and free_index is not None:
            self._tokens += (free_index.clone(),)
        super().free(free_index)

    def free_group_end(self) -> None:
        super().free_group_end()
        for tokens in self._tokens:
            paired = tokens[self._window_place(tokens) > 0]
            self.swa_attn_allocator.free(paired)


class ForgetsTheWindow(UnifiedSWATokenToKVPoolAllocator):
    """Frees the full side alone."""

    def _free_tokens(self, tokens: torch.Tensor, is_paired: torch.Tensor | None) -> None:
        super()._free_tokens(tokens, torch.zeros_like(tokens, dtype=torch.bool))


class FreesPageZero(UnifiedSWATokenToKVPoolAllocator):
    """Ids without a window page read as the padding page, and are freed as such (#38519)."""

    def free_swa(self, free_index: torch.Tensor | None) -> None:
        super().free_swa(free_index)
        holes = self.swa_attn_allocator.holes
        holes.add(torch.zeros(1, dtype=torch.int64))


class PairsAllOfATail(UnifiedSWATokenToKVPoolAllocator):
    """Gives window pages to what lies before the tail too."""

    def alloc_extend_swa_tail(self, *arguments: Any) -> torch.Tensor | None:
        return self.alloc_extend(*arguments[:6])


def paired_anew(path: Path) -> Path:
    s = CompositeScenario(path)
    ids = s.take(12)
    assert ids
    s.group_begin()
    s.give(ids[4:8])
    places = s.alloc_physical("swa", 4)
    assert places
    s.set_full_to_swa_mapping(ids[4:8], places)
    s.group_end()
    s.free_physical("swa", places)
    s.take(8)
    return s.close()


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [(None, None), (SettlesPairsWhenTheGroupCloses, ("C13", 4)), (ReleasesThePairMadeLater, ("C13", 5))],
)
def test_a_pair_is_that_of_the_moment_its_free_was_queued(
    tmp_path: Path, mutant: type[Any] | None, expected: tuple[str, int] | None
) -> None:
    path = paired_anew(tmp_path / "s.msgpack.zst")
    if mutant is None:
        holds(path)
    else:
        assert failed_at(run(path, here(mutant))) == expected


def window(path: Path) -> Path:
    s = CompositeScenario(path)
    ids = s.extend_swa_tail(0, 22, -1, 5)
    assert ids
    more = s.take(8)
    assert more
    s.free_swa([*ids[:4], *more[:4]])
    s.group_begin()
    s.give(ids)
    s.free_swa_segment(more[4:], 4)
    s.group_end()
    s.free_full_segment(more, 0)
    s.flush("swa", urgent=True)
    s.take(16)
    return s.close()


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        (None, ("", 0)),
        (PairsAllOfATail, ("C13", 0)),
        (FreesPageZero, ("C3 C4", 2)),
        (ForgetsTheWindow, ("C1", 6)),
    ],
)
def test_what_left_the_window(tmp_path: Path, mutant: type[Any] | None, expected: tuple[str, int]) -> None:
    path = window(tmp_path / "s.msgpack.zst")
    if mutant is None:
        holds(path)
    else:
        check, seq = failed_at(run(path, here(mutant))) or ("", -1)
        assert check in expected[0].split() and seq == expected[1]


class FreesQueuedTwice(UnifiedMambaTokenToKVPoolAllocator):
    """What a group held is freed again by the next end (#36739)."""

    _last: tuple[torch.Tensor, ...] = ()

    def free_group_end(self) -> None:
        self._last = tuple(self.free_group or ())
        super().free_group_end()

    def flush_deferred_full_frees(self) -> None:
        super().flush_deferred_full_frees()
        for tokens in self._last:
            self.full_attn_allocator.holes.add(tokens[:: self.page_size] // self.page_size)


class LacksACall(UnifiedMambaTokenToKVPoolAllocator):
    flush_deferred_full_frees = None  # type: ignore[assignment]


def test_a_group_releases_once(tmp_path: Path) -> None:
    s = CompositeScenario(tmp_path / "s.msgpack.zst", MAMBA)
    ids = s.take(16)
    assert ids
    s.group_begin()
    s.give(ids[:4])
    s.flush_deferred_full_frees()
    s.give_segment(ids[4:8], 4)
    s.group_end()
    s.group_begin()
    s.group_end()
    path = s.close()
    holds(path)
    assert failed_at(run(path, here(FreesQueuedTwice))) == ("C4", 3)
    with pytest.raises(UsageError, match="event 3 calls flush_deferred_full_frees, which LacksACall lacks"):
        run(path, here(LacksACall))


# -- gates, states, forwards


class GatesAttentionOnly(UnifiedMambaTokenToKVPoolAllocator):
    """A gate that the state pool does not know of (#37417)."""

    def set_disagg_move_gate(self, gate: Callable[[], bool]) -> None:
        self.full_attn_allocator.disagg_move_gate = gate


def test_no_member_moves_under_a_lease(tmp_path: Path) -> None:
    s = CompositeScenario(tmp_path / "s.msgpack.zst", MAMBA, leases_shut_gates=True)
    slots = s.slot_alloc(4)
    assert slots and s.take(8)
    s.export(1, "mamba", slots[3:])
    s.slot_free(slots[:1])
    assert s.flush_all() == 0
    s.lease_end(1, "mamba")
    assert s.flush_all() == 1
    path = s.close()
    holds(path)
    assert failed_at(run(path, here(GatesAttentionOnly))) == ("C9", 2)


@pytest.mark.parametrize("layout", [SWA, MAMBA, MAMBA_SWA], ids=["swa", "mamba", "mamba_swa"])
def test_sub_pool_classes_stand_in_a_composite(tmp_path: Path, layout: Any) -> None:
    s = CompositeScenario(tmp_path / "s.msgpack.zst", layout)
    ids = s.take(24)
    assert ids
    s.give(ids[16:])
    s.flush_all()
    path = s.close()
    assert failed_at(run(path, "tests.mutants.tables:StaleInverse")) == ("C1", 2)
    assert run(path, "allocator:MultiEndedAllocator,allocator:FloatMultiEndedAllocator").failure is None
    assert run(path, f"allocator:{s.header.allocator}").failure is None


def test_a_forward_reads_and_writes_on_all_sides(tmp_path: Path) -> None:
    """vllm-ascend#13501's kind: the window prunes by the optimistic count what a running step still reads."""
    s = CompositeScenario(tmp_path / "s.msgpack.zst")
    ids = s.take(16)
    assert ids
    s.launch(1, writes=ids[12:13], reads=ids[:16])
    s.free_swa(ids[:4])
    s.take(4)
    s.forward_done(1)
    assert failed_at(run(s.close())) == ("C8", 3)


def test_a_timing_run_follows_a_composite(tmp_path: Path) -> None:
    path = window(tmp_path / "s.msgpack.zst")
    outcome = replay(ReplayOptions(path, TargetOptions(kv="stamp"), checks=None, ledger=False))
    assert outcome.verdict == "held" and outcome.events == 10


# -- calls that cannot be


def _nested(s: CompositeScenario, ids: list[int]) -> None:
    s.group_begin()
    s.write(EventKind.FREE_GROUP_BEGIN, None)


def _queued_twice(s: CompositeScenario, ids: list[int]) -> None:
    s.group_begin()
    s.give(ids[:4])
    s.write(EventKind.FREE, None, list0=ids[2:6])


def _one_page_twice(s: CompositeScenario, ids: list[int]) -> None:
    s.give(ids[:1])
    s.write(EventKind.FREE, None, list0=ids[1:2])


def _member_of_a_group(s: CompositeScenario, ids: list[int]) -> None:
    s.group_begin()
    s.give(ids[:4])
    s.write(EventKind.FREE, "swa", list0=ids[:4])


def write(
    kind: EventKind, pool: str | None = None, **arguments: Any
) -> Callable[[CompositeScenario, list[int]], None]:
    def tell(s: CompositeScenario, ids: list[int]) -> None:
        given = {name: ids[value] if isinstance(value, slice) else value for name, value in arguments.items()}
        s.write(kind, pool, **given)

    return tell


@pytest.mark.parametrize(
    ("reason", "tell"),
    [
        pytest.param("do not nest", _nested, id="nested group"),
        pytest.param("no free group", write(EventKind.FREE_GROUP_END), id="no group"),
        pytest.param("holds already", _queued_twice, id="queued twice"),
        pytest.param("not live", _one_page_twice, id="two tokens of a page, one after the other"),
        pytest.param("holds already", _member_of_a_group, id="a member's page of the group"),
        pytest.param("without an owner", write(EventKind.FREE_FULL, list0=slice(0, 4)), id="full side of a pair"),
        pytest.param("without an owner", write(EventKind.FREE, "full", list0=slice(0, 4)), id="member full of a pair"),
        pytest.param("outside", write(EventKind.FREE_SWA, list0=[-1]), id="free_swa of -1"),
        pytest.param("not live", write(EventKind.FREE_SWA_SEGMENT, value=0, list0=[120, 121]), id="no pair"),
        pytest.param("no border", write(EventKind.FREE_SEGMENT, value=1, list0=slice(0, 4)), id="no page border"),
        pytest.param("window page already", write(EventKind.SET_FULL_TO_SWA_MAPPING, list0=slice(0, 4), list1=[4, 5, 6, 7]), id="paired"),
        pytest.param("page border", write(EventKind.SET_FULL_TO_SWA_MAPPING, list0=slice(1, 4), list1=[4, 5, 6]), id="half pages"),
        pytest.param("a tail of 9", write(EventKind.ALLOC_EXTEND_SWA_TAIL, value=4, value2=9, list0=[0], list1=[4], list2=[-1]), id="tail"),
        pytest.param("no urgent flush", write(EventKind.FLUSH, value=1), id="urgent flush"),
        pytest.param("no states", write(EventKind.PREPARE_MAMBA_ALLOCATION, value=1), id="no states"),
        pytest.param("no slots", write(EventKind.SLOT_ALLOC, "swa", value=1), id="no slots"),
        pytest.param("cleared together", write(EventKind.CLEAR, "full"), id="one member cleared"),
        pytest.param("not resized", write(EventKind.RESIZE, "full", value=40), id="one member resized"),
        pytest.param("grouped by the composite", write(EventKind.FREE_GROUP_BEGIN, "full"), id="a member's group"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be(
    tmp_path: Path, reason: str, tell: Callable[[CompositeScenario, list[int]], None]
) -> None:
    s = CompositeScenario(tmp_path / "s.msgpack.zst")
    ids = s.take(16)
    assert ids
    tell(s, ids)
    with pytest.raises(ImpossibleEvent, match=reason):
        run(s.close())


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("make no composite", {"pool": 1, "is_id_owner": True}),
        ("make no composite", {"pool": 1, "num_virtual_ids": 9}),
        ("joins full with", {"pool": 1, "name": "window"}),
        ("without its counterpart", {"settings": {"full_max_total_num_tokens": 5}}),
        ("not a number of tokens", {"settings": {"full_max_total_num_tokens": "5"}}),
    ],
)
def test_headers_that_make_no_composite(tmp_path: Path, reason: str, change: dict[str, Any]) -> None:
    from recorder.trace import TraceWriter
    from tests.composite_scenario import sized
    from tests.scenario import header_for

    header = header_for(sized(SWA, 4), 64 * 64)
    header.level = "composite"
    header.settings |= change.pop("settings", {})
    pool = header.pools[change.pop("pool", 0)]
    for name, value in change.items():
        setattr(pool, name, value)
    path = tmp_path / "s.msgpack.zst"
    with TraceWriter(path, header) as writer:
        writer.append(EventKind.ALLOC, time_us=0, value=4)
    with pytest.raises(ImpossibleEvent, match=reason):
        run(path)


def test_classes_that_are_no_composite(tmp_path: Path) -> None:
    path = joint(tmp_path / "s.msgpack.zst")
    with pytest.raises(UsageError, match="OrderedDict lacks alloc"):
        run(path, "collections:OrderedDict")
    with pytest.raises(UsageError, match=r"does not fit as a composite|lacks"):
        run(path, "allocator:UnifiedMambaTokenToKVPoolAllocator")


def test_a_failure_names_the_events_of_its_pages(tmp_path: Path) -> None:
    path = paired_anew(tmp_path / "s.msgpack.zst")
    found = run(path, here(SettlesPairsWhenTheGroupCloses)).failure
    assert found is not None and found.pool == "swa"
    assert last_events(path, found.pool, found.pages, found.seq) == [
        (0, "alloc"), (2, "free"), (4, "set_full_to_swa_mapping"),
    ]  # fmt: skip
    assert last_events(path, "window", found.pages, found.seq) == []


def test_info_shows_the_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = joint(tmp_path / "s.msgpack.zst")
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "level composite" in shown
    assert "allocs refused" in shown and "8 ids freed" in shown
    assert main(["info", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["traces"][0]
    assert figures["level"] == "composite" and figures["composite"]["allocs_refused"] == 1
    assert figures["composite"]["ids_freed"] == 8 and figures["pools"][0]["ids_freed"] == 0
    with TraceReader(path) as reader:
        assert reader.header.level == "composite" and reader.header.format == (1, 2)
