"""Random programs: whatever an engine may call, in any order, our allocator stays what the oracle says, with every strategy.

A program is run on the allocator once while it is written down as a trace; the trace is then replayed on fresh allocators with every
check after every event, and must give the recorded answers again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule

from allocator import STRATEGIES
from replayer.checks import CheckOptions
from replayer.replay import ReplayOptions, replay
from replayer.targets import TargetOptions
from tests.scenario import PoolShape, Scenario, pages_of

pytestmark = pytest.mark.cpu

CHAINS = {
    "two ends": lambda page, lazy: (PoolShape("full", "down", page_size=page, lazy=lazy),
                                    PoolShape("swa", "up", page_size=page, layer_num=3, lazy=lazy)),
    "shared ids": lambda page, lazy: (PoolShape("full", "down", page_size=page, lazy=lazy),
                                      PoolShape("swa", "up", page_size=page, layer_num=3, owner="full", lazy=lazy)),
    "states": lambda page, lazy: (PoolShape("full", "down", page_size=page, lazy=lazy),
                                  PoolShape("mamba", "up", kind="mamba", layer_num=2, lazy=lazy)),
    "float": lambda page, lazy: (PoolShape("full", "down", page_size=page, lazy=lazy),
                                 PoolShape("swa", "float", page_size=page, layer_num=2),
                                 PoolShape("mamba", "up", kind="mamba", layer_num=2, lazy=lazy)),
}  # fmt: skip


class Programs(RuleBasedStateMachine):
    grants = Bundle("grants")

    @initialize(
        chain=st.sampled_from(sorted(CHAINS)),
        page=st.sampled_from([1, 2, 4, 16]),
        lazy=st.booleans(),
        cap=st.sampled_from([2, 5, 4096]),
    )
    def start(self, chain: str, page: int, lazy: bool, cap: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.shapes = CHAINS[chain](page, lazy)
        self.s = Scenario(Path(self.folder.name) / "p.msgpack.zst", self.shapes, 24 * 64 * page + 4096, cap)
        self.page = {shape.name: shape.page_size for shape in self.shapes}
        self.owners = [shape.name for shape in self.shapes if shape.owner is None]
        self.lazy = [shape.name for shape in self.shapes if shape.lazy and shape.grow_direction != "float"]
        self.shared = chain == "shared ids"
        self.live: dict[str, dict[int, int]] = {
            shape.name: {} for shape in self.shapes
        }  # page -> tokens in it
        self.group: str | None = None
        self.queued: set[int] = set()
        self.forwards = 0
        self.unfinished: list[int] = []

    def _grant(self, pool: str, tokens: list[int]) -> list[tuple[str, int]]:
        size = self.page[pool]
        for token in tokens:
            self.live[pool][token // size] = max(self.live[pool].get(token // size, 0), token % size + 1)
        if self.shared and pool == "full":
            fresh = [page for page in pages_of(tokens, size) if page not in self.live["swa"]]
            made = self.s.pools["swa"]
            if fresh and len(fresh) * size <= made.available_size():
                self.s.alloc_with_virtual("swa", fresh)
                self.live["swa"].update(dict.fromkeys(fresh, size))
        return [(pool, page) for page in pages_of(tokens, size)]

    @rule(target=grants, data=st.data(), pages=st.integers(1, 9))
    def alloc(self, data: st.DataObject, pages: int) -> object:
        pool = data.draw(st.sampled_from(self.owners))
        tokens = self.s.alloc(pool, pages * self.page[pool])
        return multiple(*self._grant(pool, tokens)) if tokens else multiple()

    @rule(target=grants, lens=st.lists(st.integers(1, 40), min_size=1, max_size=3))
    def extend(self, lens: list[int]) -> object:
        tokens = self.s.alloc_extend("full", [0] * len(lens), lens, [-1] * len(lens))
        return multiple(*self._grant("full", tokens)) if tokens else multiple()

    @rule(target=grants, grant=grants)
    def decode(self, grant: tuple[str, int]) -> object:
        pool, page = grant
        if pool != "full" or page not in self.live[pool] or page in self.queued:
            return multiple()
        size = self.page[pool]
        last = page * size + self.live[pool][page] - 1
        tokens = self.s.alloc_decode(pool, [self.live[pool][page] + 1], [last])
        return multiple(*self._grant(pool, tokens)) if tokens else multiple()

    @rule(chosen=st.lists(grants, min_size=1, max_size=6, unique=True), segment=st.booleans())
    def free(self, chosen: list[tuple[str, int]], segment: bool) -> None:
        pool = chosen[0][0]
        pages = [
            page
            for owner, page in chosen
            if owner == pool and page in self.live[pool] and page not in self.queued
        ]
        if not pages:
            return
        size = self.page[pool]
        gone = [page for page in pages if self.shared and page in self.live["swa"]]
        if gone and pool == "full" and self.group is None:
            self.s.free("swa", [page * size for page in gone])
            for page in gone:
                del self.live["swa"][page]
        if segment:
            self.s.free_segment(pool, [page * size + offset for page in pages for offset in range(size)], 0)
        else:
            self.s.free(pool, [page * size for page in pages])
        if self.group == pool:
            self.queued.update(pages)
        else:
            for page in pages:
                del self.live[pool][page]

    @rule(data=st.data(), urgent=st.booleans())
    def flush(self, data: st.DataObject, urgent: bool) -> None:
        self.s.flush(data.draw(st.sampled_from(sorted(self.s.pools))), urgent=urgent)

    @precondition(lambda self: "swa" in self.page and self.shapes[1].grow_direction == "float")
    @rule(side=st.sampled_from(["low", "high"]), nbytes=st.integers(1, 4096), pack=st.booleans())
    def room(self, side: str, nbytes: int, pack: bool) -> None:
        if pack:
            self.s.compact_holes("swa", side)
        else:
            self.s.make_room("swa", side, nbytes)

    @precondition(lambda self: bool(self.lazy))
    @rule(data=st.data(), grant=grants)
    def forward(self, data: st.DataObject, grant: tuple[str, int]) -> None:
        self.forwards += 1
        self.unfinished.append(self.forwards)
        for pool in self.lazy:
            live = [page for page in self.live[pool] if page not in self.queued]
            size = self.page[pool]
            tokens = [page * size + self.live[pool][page] - 1 for page in live]
            writes = data.draw(st.lists(st.sampled_from(tokens), max_size=3, unique=True)) if tokens else []
            self.s.forward_begin(pool, self.forwards, writes or None)

    @precondition(lambda self: bool(self.unfinished))
    @rule()
    def forward_done(self) -> None:
        self.s.forward_done(self.unfinished.pop(0))

    @precondition(lambda self: bool(self.lazy))
    @rule()
    def gate(self) -> None:
        self.s.move_gate(is_open=not self.s.gate_open)

    @precondition(lambda self: self.group is None)
    @rule(data=st.data())
    def group_begin(self, data: st.DataObject) -> None:
        self.group = data.draw(st.sampled_from(self.owners))
        self.s.free_group_begin(self.group)

    @precondition(lambda self: self.group is not None)
    @rule()
    def group_end(self) -> None:
        assert self.group is not None
        self.s.free_group_end(self.group)
        for page in self.queued:
            del self.live[self.group][page]
        self.group, self.queued = None, set()

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        with self.folder:
            if self.s.seq < 0:
                self.s.writer.abort()
                return
            path = self.s.close()
            for strategy in STRATEGIES:
                outcome = replay(
                    ReplayOptions(
                        path, TargetOptions(strategy=strategy), CheckOptions(every=1, logprob_every=2)
                    )
                )
                assert outcome.verdict == "held", (
                    strategy,
                    outcome.failure,
                    outcome.failure and vars(outcome.failure),
                )
                assert outcome.ledger_disagreements == 0


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
