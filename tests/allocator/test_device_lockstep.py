"""The ``device`` strategy beside ``batched``: whatever is called, both end in the same state, also where numbers come late."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from allocator import (
    AllocatorError,
    FloatMultiEndedAllocator,
    MHASubPoolSpec,
    MultiEndedAllocator,
    UnifiedKVPool,
    kv_store_for,
)
from allocator.device_release import DeviceReleasingBand
from tests.allocator.arriving import ArrivingEnd, ArrivingFloat
from tests.allocator.delayed import NeverEnd, NeverFloat, SlowEnd, SlowFloat
from tests.allocator.pools import whole_state

pytestmark = pytest.mark.cpu

CHAINS = {
    "two ends": (("full", "down", 1), ("swa", "up", 3)),
    "large pages above": (("full", "down", 3), ("swa", "up", 1)),
    "a float between": (("full", "down", 1), ("swa", "float", 2), ("other", "up", 3)),
}
#: What is driven: strategy, and the two classes.
KINDS: dict[str, tuple[str, type[MultiEndedAllocator], type[FloatMultiEndedAllocator]]] = {
    "batched": ("batched", MultiEndedAllocator, FloatMultiEndedAllocator),
    "at once": ("device", MultiEndedAllocator, FloatMultiEndedAllocator),
    "slow": ("device", SlowEnd, SlowFloat),
    "never": ("device", NeverEnd, NeverFloat),
    "behind forwards": ("device", ArrivingEnd, ArrivingFloat),
}
LATE = ("slow", "never", "behind forwards")


class Event:
    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired

    def wait(self) -> None: ...


class Side:
    """One chain of allocators with real bytes: each live token's row holds what the driver wrote."""

    def __init__(self, kind: str, chain: str, page_size: int, lazy: bool, cap: int) -> None:
        strategy, end_class, float_class = KINDS[kind]
        specs = [
            MHASubPoolSpec(
                name=name,
                layer_num=layers,
                grow_direction=direction,
                head_num=1,
                head_dim=8,
                store_dtype=torch.float32,
            )
            for name, direction, layers in CHAINS[chain]
        ]
        buffer = UnifiedKVPool(
            total_bytes=64 * page_size * 40, sub_pool_specs=specs, device="cpu", page_size=page_size
        )
        self.pools: dict[str, Any] = {}
        self.rows: dict[str, torch.Tensor] = {}
        self.gate_open = True
        for spec in specs:
            is_float = spec.grow_direction == "float"
            store = kv_store_for(buffer, spec.name)
            made = (float_class if is_float else end_class)(
                kvcache=store, unified_buffer=buffer, sub_pool_name=spec.name, device="cpu", is_id_owner=True,
                page_size=page_size, lazy_compaction=lazy and not is_float, strategy=strategy,
            )  # fmt: skip
            made._lazy_max_moves_per_call = cap
            self.pools[spec.name] = made
            self.rows[spec.name] = store.layer_views()["k"][0]
        chain_of = [self.pools[spec.name] for spec in buffer.sub_pool_specs]
        for low, high in itertools.pairwise(chain_of):
            low.bind_high_peer(high)
            high.bind_low_peer(low)

    def settle(self) -> None:
        for pool in self.pools.values():
            assert isinstance(pool, DeviceReleasingBand)
            pool._settle()  # waits for the device

    def stamp(self, pool: str, tokens: torch.Tensor) -> None:
        self.rows[pool][self.pools[pool].translate_kv_loc(tokens)] = tokens.to(torch.float32)[:, None, None]

    def misplaced(self, pool: str, tokens: torch.Tensor) -> int:
        found = self.rows[pool][self.pools[pool].translate_kv_loc(tokens)]
        return int((found != tokens.to(torch.float32)[:, None, None]).sum())


class Lockstep(RuleBasedStateMachine):
    @initialize(
        chain=st.sampled_from(sorted(CHAINS)),
        page=st.sampled_from([1, 2, 4]),
        lazy=st.sampled_from([True, True, True, False]),
        cap=st.sampled_from([1, 3, 4096]),
        look_every=st.sampled_from([1, 4, 1000]),
    )
    def start(self, chain: str, page: int, lazy: bool, cap: int, look_every: int) -> None:
        self.sides = {kind: Side(kind, chain, page, lazy, cap) for kind in KINDS}
        self.size, self.lazy, self.look_every, self.calls = page, lazy, look_every, 0
        self.names = [name for name, _, _ in CHAINS[chain]]
        self.ends = [name for name, direction, _ in CHAINS[chain] if direction != "float"]
        self.live: dict[str, list[int]] = {name: [] for name in self.names}
        self.grouped: dict[str, list[int]] = {}
        self.events: list[dict[str, Event]] = []
        self.latest: dict[str, Event] | None = None

    def call(self, pool: str, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Make the call on every side; answers and refusals must be equal."""
        answers: dict[str, Any] = {}
        for kind, side in self.sides.items():
            try:
                answer = getattr(side.pools[pool], method)(*arguments, **keywords)
            except AllocatorError as error:
                answer = (type(error), error.ids)
            answers[kind] = answer.tolist() if isinstance(answer, torch.Tensor) else answer
        expected = answers["batched"]
        assert answers["at once"] == expected
        # A number of moves that nobody asks for stays on the device; asking settles the pool.
        self.calls += 1
        looks = self.calls % self.look_every == 0
        if looks or method not in ("_flush", "flush_for_allocation", "flush_opportunistic"):
            for kind in LATE:
                assert answers[kind] == expected, kind
        self.compare(looks)
        return expected

    def compare(self, looks: bool) -> None:
        for kind, side in self.sides.items():
            if kind in LATE:
                if not looks:
                    continue
                side.settle()
            for name in self.names:
                expected = whole_state(self.sides["batched"].pools[name])
                assert whole_state(side.pools[name]) == expected, (kind, name)
                if self.live[name]:
                    assert not side.misplaced(name, torch.tensor(self.live[name])), (kind, name)

    def grant(self, pool: str, tokens: list[int] | None) -> None:
        if tokens:
            self.live[pool].extend(tokens)
            for side in self.sides.values():
                side.stamp(pool, torch.tensor(tokens))

    @rule(data=st.data(), pages=st.integers(1, 12))
    def alloc(self, data: st.DataObject, pages: int) -> None:
        pool = data.draw(st.sampled_from(self.names))
        self.grant(pool, self.call(pool, "alloc", pages * self.size))

    @rule(data=st.data(), lens=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def extend(self, data: st.DataObject, lens: list[int]) -> None:
        pool = data.draw(st.sampled_from(self.names))
        none, seq = torch.zeros(len(lens), dtype=torch.int64), torch.tensor(lens)
        self.grant(pool, self.call(pool, "alloc_extend", none, none, seq, seq, none - 1, sum(lens)))

    @rule(data=st.data(), how=st.sampled_from(["tokens", "segment", "pages"]))
    def free(self, data: st.DataObject, how: str) -> None:
        pool = data.draw(st.sampled_from(self.names))
        held = {token // self.size for token in self.grouped.get(pool, [])}
        pages = sorted({token // self.size for token in self.live[pool]} - held)
        if not pages:
            return
        chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, max_size=8, unique=True))
        tokens = [token for page in chosen for token in self.live[pool] if token // self.size == page]
        whole = torch.tensor([page * self.size + offset for page in chosen for offset in range(self.size)])
        if pool in self.grouped:
            self.grouped[pool].extend(tokens)
        else:
            self.live[pool] = [token for token in self.live[pool] if token not in tokens]
        if how == "segment":
            self.call(pool, "free_segment", whole, start_pos=0)
        elif how == "pages" and pool not in self.grouped:
            self.call(pool, "free", torch.tensor(tokens), _pages=torch.tensor(chosen))
        else:
            self.call(pool, "free", torch.tensor(tokens))

    @rule(data=st.data())
    def group(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.names))
        if pool not in self.grouped:
            self.grouped[pool] = []
            self.call(pool, "free_group_begin")
            return
        freed = self.grouped.pop(pool)
        self.live[pool] = [token for token in self.live[pool] if token not in freed]
        self.call(pool, "free_group_end")

    @rule(data=st.data(), method=st.sampled_from(["urgent", "opportunistic"]))
    def flush(self, data: st.DataObject, method: str) -> None:
        pool = data.draw(st.sampled_from(self.names))
        self.call(pool, "flush_for_allocation" if method == "urgent" else "flush_opportunistic")

    @rule()
    def promise(self) -> None:
        """Sizes that are told while numbers are on their way are never more than there is, and a band seems no shorter than it is."""
        for name in self.names:
            exact = self.sides["batched"].pools[name]
            for kind in LATE:
                late = self.sides[kind].pools[name]
                if exact._allocated_pages():
                    assert late._byte_low_frontier() <= exact._byte_low_frontier(), (kind, name)
                    assert late._byte_high_frontier() >= exact._byte_high_frontier(), (kind, name)
                assert late.available_size() <= exact.available_size(), (kind, name)
                # A float rounds its gap and what a flush would open one by one: less of the one and more of the other may be a page.
                rounding = 0 if name in self.ends else self.size
                schedulable = late.schedulable_available_size() - rounding
                assert schedulable <= exact.schedulable_available_size(), (kind, name)

    @precondition(lambda self: self.lazy)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        self.latest = {kind: Event() for kind in self.sides}
        self.events.append(self.latest)
        for pool in self.ends:
            tokens = self.live[pool]
            writes = data.draw(st.lists(st.sampled_from(tokens), max_size=3)) if tokens else []
            for kind, side in self.sides.items():
                side.pools[pool].set_latest_forward_done_event(self.latest[kind])
                side.pools[pool].set_inflight_forward(
                    self.latest[kind], torch.tensor(writes) if writes else None
                )

    @precondition(lambda self: bool(self.events))
    @rule()
    def forward_done(self) -> None:
        for event in self.events.pop(0).values():
            event.fired = True

    @rule()
    def gate(self) -> None:
        for side in self.sides.values():
            side.gate_open = not side.gate_open
            for name in self.ends:
                side.pools[name].disagg_move_gate = lambda side=side: side.gate_open

    @precondition(lambda self: self.calls > 20)
    @rule()
    def clear(self) -> None:
        """All pools, as an engine does that forgets its cache."""
        for pool in self.names:
            self.live[pool] = []
            self.call(pool, "clear")
        self.grouped = {}

    @precondition(lambda self: "swa" not in self.ends)
    @rule(side=st.sampled_from(["low", "high"]), nbytes=st.integers(1, 4000), pack=st.booleans())
    def room(self, side: str, nbytes: int, pack: bool) -> None:
        if pack:
            self.call("swa", "compact_holes", retreat_side=side)
        else:
            self.call("swa", "make_room", side=side, min_bytes=nbytes)

    def teardown(self) -> None:
        if hasattr(self, "sides"):
            self.compare(looks=True)


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
