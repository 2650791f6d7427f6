"""kvtape's composites in the place of SGLang's: they are both, answer alike, and stop the host nowhere else than where it is counted."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allocator
from allocator import sglang_plugin
from allocator.composites.members import Composite
from allocator.sglang_classes import SglangDeviceFloatMultiEndedAllocator, SglangDeviceMultiEndedAllocator
from allocator.sglang_composites import OURS, composites_in_place
from replayer.ledger import SyncLedger
from replayer.targets_sglang import sglang_version
from tests.allocator.cached_program import CachedProgram
from tests.allocator.composite_program import Program
from tests.allocator.delayed import NeverReadBack, SlowReadBack
from tests.engine.composites import LAYOUTS, Scheduler, composite, pools

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        sglang_version() != "0.5.23", reason="SGLang 0.5.23 is not installed (tools/build_sglang_env.sh)"
    ),
]

STEPS = 150
WINDOW, STATES = OURS
LATE = {"at once": None, "slow": SlowReadBack, "never": NeverReadBack}


@pytest.fixture(autouse=True)
def no_server(sglang_on_a_cpu: None, set_up_server: Callable[..., None]) -> None:
    set_up_server()


def come_late(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    if LATE[late] is not None:
        for cls in (SglangDeviceMultiEndedAllocator, SglangDeviceFloatMultiEndedAllocator):
            monkeypatch.setattr(cls, "read_back_class", LATE[late])


def in_place(layout: str, page_size: int, *, strategy: str = "device", lazy: bool = True) -> Any:
    sglang_plugin.put_in_place(strategy)
    return composite(layout, page_size, lazy=lazy)


def test_each_is_kvtapes_and_sglangs() -> None:
    theirs = {name: getattr(importlib.import_module(name), cls.__name__) for name, (cls, *_) in OURS.items()}
    made = in_place(LAYOUTS[0], 4)
    assert isinstance(made, allocator.UnifiedSWATokenToKVPoolAllocator) and isinstance(made, theirs[WINDOW])
    assert type(made) is importlib.import_module(WINDOW).UnifiedSWATokenToKVPoolAllocator
    assert type(made).__doc__ == allocator.UnifiedSWATokenToKVPoolAllocator.__doc__
    made = composite(LAYOUTS[1], 4, lazy=True)
    assert isinstance(made, allocator.UnifiedMambaTokenToKVPoolAllocator) and isinstance(made, theirs[STATES])
    assert made.strategy == "device" and made.get_kvcache() is made._kvcache
    base = importlib.import_module(WINDOW).UnifiedSWAAllocatorBase
    assert isinstance(composite(LAYOUTS[2], 4, lazy=True), base)


def own_names(cls: type) -> set[str]:
    return {name for each in cls.__mro__[:-1] for name in vars(each) if not name.startswith("__")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ours_answer_takes_what_sglangs_took(layout: str) -> None:
    pairs = list(composites_in_place())
    made = composite(layout, 4, lazy=True)
    ((theirs, joined),) = [pair for pair in pairs if type(made) is pair[0]]
    ours = next(cls for cls in joined.__mro__ if cls.__module__.startswith("allocator.composites"))
    shadowed = own_names(ours) & own_names(theirs)
    assert {"alloc_extend", "free", "flush_opportunistic", "evict_to_free_tokens"} <= shadowed
    for name in shadowed - {"_abc_impl"}:
        found, expected = getattr(joined, name), getattr(theirs, name)
        assert isinstance(found, property) == isinstance(expected, property), name
        if callable(expected):
            assert list(inspect.signature(found).parameters) == list(
                inspect.signature(expected).parameters
            ), name
    # What SGLang's own methods call of their innards means the same in ours.
    assert {name for name in shadowed if name.startswith("_")} <= SAME_INNARDS


SAME_INNARDS = {
    "_abc_impl", "_compaction_allowed", "_compute_available_size", "_conserve_full_available_size", "_conserve_swa_available_size",
    "_fits_page_demand", "_move_gate_targets", "_page_disjoint",
}  # fmt: skip


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_of_every_call_is_answered_as_sglang_answers_it(
    layout: str, page_size: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Program(composite(layout, page_size, lazy=True), 31 + page_size)
    expected = [(theirs.step(), theirs.sizes(), theirs.places()) for _ in range(STEPS)]
    come_late(monkeypatch, late)
    ours = Program(in_place(layout, page_size), 31 + page_size)
    assert isinstance(ours.made, Composite)
    for number, (answer, sizes, places) in enumerate(expected):
        assert ours.step() == answer, number
        if number % 10 == 9:
            assert ours.sizes() == sizes, number
            assert ours.places() == places, number
    assert ours.counts == theirs.counts


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("role", ["null", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_much_is_asked_of_a_cache(
    layout: str, role: str, late: str, monkeypatch: pytest.MonkeyPatch, set_up_server: Callable[..., None]
) -> None:
    set_up_server(role=role)
    theirs = CachedProgram(composite(layout, 4, lazy=True), 6)
    expected = [theirs.step() for _ in range(STEPS)]
    last = theirs.sizes(), theirs.places()
    come_late(monkeypatch, late)
    ours = CachedProgram(in_place(layout, 4), 6)
    assert [ours.step() for _ in range(STEPS)] == expected
    assert (ours.sizes(), ours.places()) == last
    assert ours.cache.asked == theirs.cache.asked and len(theirs.cache.asked) >= 5


@pytest.mark.parametrize(
    ("role", "host_tier", "storage", "spares_full"),
    [
        ("null", False, None, False),
        ("prefill", False, None, False),
        ("decode", False, None, True),
        ("null", True, "file", True),
        ("null", True, None, False),
        ("null", False, "file", False),
    ],
)
def test_the_side_that_is_spared_is_the_servers_choice(
    role: str, host_tier: bool, storage: str | None, spares_full: bool, set_up_server: Callable[..., None]
) -> None:
    made = in_place(LAYOUTS[0], 4)
    set_up_server(role=role, host_tier=host_tier, storage=storage)
    assert made.prefer_swa_reclaim == spares_full


#: Methods of a composite that a scheduler calls between forwards, but for questions.
CALLS = (
    "alloc", "alloc_extend", "alloc_decode", "free", "free_swa", "free_segment", "free_full_segment", "free_swa_segment",
    "free_group_end", "flush_opportunistic", "set_latest_forward_done_event", "set_inflight_forward",
)  # fmt: skip


#: Arguments that are in host memory.
HOST_COPIES = {"alloc_extend": (1, 3), "alloc_decode": (1,)}


class Watched:
    """A composite whose calls are made under a ledger. What a call waits for, and counts, is taken off."""

    def __init__(self, made: Any, ledger: SyncLedger) -> None:
        self._made, self._ledger = made, ledger
        self.stops: dict[str, int] = {}
        self.waits = 0
        for pool in pools(made).values():
            ledger.host(*pool.pinned_host_tensors, pinned=True)

    def _host(self, lengths: torch.Tensor) -> torch.Tensor:
        copied = lengths.clone()
        self._ledger.host(copied)
        return copied

    def _counted(self) -> int:
        return sum(pool.blocking_reads for pool in pools(self._made).values())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._made, name)
        if name not in CALLS:
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            before = self._counted()
            on_host = HOST_COPIES.get(name, ())
            arguments = tuple(
                self._host(each) if at in on_host else each for at, each in enumerate(arguments)
            )
            with self._ledger.call(name, audit=True) as record:
                answer = value(*arguments, **keywords)
            waited = self._counted() - before
            self.waits += waited
            if record.total > waited:
                self.stops[name] = self.stops.get(name, 0) + record.total - waited
            return answer

        return call


def watched(made: Any, seed: int) -> Watched:
    with SyncLedger("cpu") as ledger:
        found = Watched(made, ledger)
        program = Scheduler(made, seed)
        program.made = found
        for _ in range(300):
            program.step()
    assert ledger.disagreements == []
    assert program.refused or program.moved
    return found


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]])
def test_nothing_stops_the_host_but_what_is_counted(
    layout: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's composites over the same pools do, though their numbers are there at once: they select ids by a mask."""
    with monkeypatch.context() as patch:
        patch.setattr(sglang_plugin, "composites_in_place", list)
        sglang_plugin.put_in_place("device")
        theirs = watched(composite(layout, page_size, lazy=True), page_size)
        sglang_plugin.remove()
    assert not isinstance(theirs._made, Composite)
    assert {"free", "free_swa"} <= set(theirs.stops)
    come_late(monkeypatch, "slow")
    ours = watched(in_place(layout, page_size), page_size)
    assert ours.stops == {}
    assert ours.waits < sum(theirs.stops.values())


def test_what_ours_do_not_have_is_sglangs() -> None:
    """The scheduler's policy, over sizes of ours."""
    theirs = composite(LAYOUTS[0], 4, lazy=True)
    made = in_place(LAYOUTS[0], 4)
    arguments = {"token_capacity": 400, "sliding_window_size": 16, "chunk_size": 64}
    for prompt, new in ((8, 8), (40, 400), (4000, 1)):
        expected = theirs.max_new_tokens_for_memory(prompt, new, **arguments)
        assert made.max_new_tokens_for_memory(prompt, new, **arguments) == expected
    cache = SimpleNamespace(
        full_evictable_size=lambda: 0, swa_evictable_size=lambda: 0, sliding_window_size=16
    )
    budget = type(made.create_prefill_budget(cache)).__name__
    assert budget == type(theirs.create_prefill_budget(cache)).__name__ == "SharedSWAPrefillBudget"


def test_what_a_scheduler_hands_over_passes_through_sglangs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder watches it there, and does not know of ours."""
    theirs = type(composite(LAYOUTS[0], 4, lazy=True))
    seen: list[tuple[Any, ...]] = []
    for name in ("set_latest_forward_done_event", "set_inflight_forward"):
        monkeypatch.setattr(theirs, name, lambda *given, name=name: seen.append((name, *given)))
    made, event, tokens = in_place(LAYOUTS[0], 4), object(), torch.arange(4)
    made.set_latest_forward_done_event(event)
    made.set_inflight_forward(event, tokens)
    assert seen == [
        ("set_latest_forward_done_event", made, event),
        ("set_inflight_forward", made, event, tokens),
    ]


def test_size_and_groups_are_set_by_sglangs_constructor_alone() -> None:
    made = in_place(LAYOUTS[0], 4)
    size = made.size
    made.size = 1
    made.free_group = None
    assert made.size == size > 1 and made.free_group is None
    made.free_group_begin()
    assert made.free_group is not None
    made.free_group_end()


def test_resizing_tells_sglangs_pools_too() -> None:
    theirs = composite(LAYOUTS[0], 4, lazy=True)
    ours = in_place(LAYOUTS[0], 4)
    for made in (theirs, ours):
        made.unified_buffer.post_capture_active = True
        made.resize(SimpleNamespace(unified_memory_pool_bytes=made.unified_buffer.total_bytes))
        assert made._kvcache.full_kv_pool.size == made.full_attn_allocator.num_pages * 4 - 4
    assert ours.alloc(8).tolist() == theirs.alloc(8).tolist()
    assert ours.size == theirs.size and ours.available_size() == theirs.available_size()


def test_ranks_compare_what_they_ask_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGLang's checker on, as SGLang's classes do."""
    seen: list[tuple[str, list[str]]] = []

    def consensus(*, same_params: list[str], same_results: bool) -> Any:
        assert same_results
        return lambda function: seen.append((function.__qualname__, same_params)) or checked

    def checked() -> None: ...

    monkeypatch.setattr(importlib.import_module(WINDOW), "rank_consensus", consensus)
    joined = [ours for _, ours in composites_in_place()]
    assert [ours.evict_to_free_tokens is checked for ours in joined] == [True, True, False]
    assert [names for _, names in seen] == [["num_tokens", "swa_num_tokens"], ["num_tokens"]]
    assert all(name.endswith("evict_to_free_tokens") for name, _ in seen)
