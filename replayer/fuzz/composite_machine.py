"""Which call on a composite comes next: joint allocs, frees of one side or both, groups, states, forwards and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from recorder.trace import EventKind
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.host_rules import HostTierRules
from replayer.fuzz.model import Model, consecutive
from replayer.fuzz.rules import PAGE_SIZES
from replayer.fuzz.shapes import COMPOSITES, Chain, Setting

if TYPE_CHECKING:
    from replayer.fuzz.session import Session


class CompositePrograms(HostTierRules):
    """`composite_machine_for` gives the class that belongs to a session."""

    program: CompositeProgram | None

    @initialize(
        chain=st.sampled_from(COMPOSITES),
        page_size=st.sampled_from(PAGE_SIZES),
        lazy=st.sampled_from([True, True, True, False]),
        move_cap=st.sampled_from([4096, 4096, 1, 2, 5]),
        pages=st.integers(8, 90),
        host=st.booleans(),
    )
    def start(self, chain: Chain, page_size: int, lazy: bool, move_cap: int, pages: int, host: bool) -> None:
        self.program = None
        setting = Setting(chain, page_size, lazy, move_cap, pages)
        self.model = Model(setting, decodes_single_tokens=False)
        self._start_host_tier(there=host and lazy)
        self.slots: list[int] = []
        self.window, self.states = "swa" in self.model.shapes, "mamba" in self.model.shapes
        self.size, self.lazy = page_size, lazy
        self.pools = sorted(self.model.shapes)
        self.program = self.session.begin_composite(setting)

    @property
    def run(self) -> CompositeProgram:
        assert self.program is not None
        return self.program

    @property
    def paired(self) -> set[int]:
        """Full pages that have a window page; those a group holds are in neither."""
        return self.model.bound["swa"] if self.window else set()

    # -- calls on the composite

    def _call_extend(self, pool: str, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        return self.run.extend(prefix, seq, last)

    def _call_decode(self, pool: str, seq: list[int], last: list[int]) -> list[int] | None:
        return self.run.decode(seq, last)

    def _call_group(self, pool: str, *, ends: bool) -> None:
        if ends:
            self.run.group_end()
        else:
            self.run.group_begin()

    def _grouping_pools(self) -> list[str]:
        return ["full"]

    # -- handing out

    def _handed_out(self, pool: str, before: set[int], last: int | None = None) -> None:
        """New pages have window pages, or only the last so many of them."""
        if not self.window:
            return
        fresh = [page for grant in self.model.grants for page in grant.pages() if page not in before]
        self.paired.update(fresh if last is None else fresh[len(fresh) - last :])

    def _live(self) -> set[int]:
        return set(self.model.live_pages("full"))

    @rule(pages=st.integers(0, 10), how=st.sampled_from(["some"] * 7 + ["all", "beyond"]))
    def alloc(self, pages: int, how: str) -> None:
        """Some pages, exactly what is said to be available, or more than that."""
        need = pages * self.size
        if how != "some":
            need = self.run.available(None) + (need if how == "beyond" else 0)
        before = self._live()
        self._granted("full", self.run.take(need))
        self._handed_out("full", before)

    @precondition(lambda self: self.window)
    @rule(data=st.data(), more=st.integers(1, 60), share=st.integers(0, 4), grows=st.booleans())
    def extend_swa_tail(self, data: st.DataObject, more: int, share: int, grows: bool) -> None:
        """Window pages for the last tokens only."""
        able = [grant for grant in self.model.grants if grant.grows]
        grant = data.draw(st.sampled_from(able)) if grows and able else None
        prefix, last = (0, -1) if grant is None else (grant.length, grant.tokens[-1])
        seq, tail = prefix + more, more * share // 4
        before = self._live()
        tokens = self.run.extend_swa_tail(prefix, seq, last, tail)
        if tokens is None:
            return
        if grant is None:
            self._granted("full", tokens, seq)
        else:
            grant.append(tokens)
        first = max(-(-prefix // self.size), (seq - tail) // self.size)
        self._handed_out("full", before, -(-seq // self.size) - first if tail else 0)

    @precondition(lambda self: self.window)
    @rule(full=st.integers(0, 20), swa=st.integers(0, 20))
    def ensure(self, full: int, swa: int) -> None:
        self.run.ensure_capacity(full * self.size, swa * self.size)

    # -- giving back

    @precondition(lambda self: bool(self.model.grants))
    @rule(data=st.data(), what=st.sampled_from(["all", "head", "tail", "any"]), segment=st.booleans())
    def free(self, data: st.DataObject, what: str, segment: bool) -> None:
        """Both sides; as a segment only where every page has both."""
        grant = data.draw(st.sampled_from(self.model.grants))
        pages = self._pages(data, grant, what)
        self._end_copies_of(pages, "full", "swa")
        tokens = grant.take_out(set(pages))
        paired = not self.window or self.paired.issuperset(pages)
        if segment and paired and consecutive(tokens, pages, self.size):
            self.run.give_segment(EventKind.FREE_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE, tokens)
        self.paired.difference_update(pages)
        self.model.forget_empty()

    @precondition(lambda self: bool(self.paired))
    @rule(data=st.data(), segment=st.booleans(), too=st.booleans())
    def leave_the_window(self, data: st.DataObject, segment: bool, too: bool) -> None:
        """Window pages of a request's head; pages that have none any more may be named too, but not as a segment."""
        with_pairs = [grant for grant in self.model.grants if self.paired.intersection(grant.pages())]
        grant = data.draw(st.sampled_from(with_pairs))
        pages = grant.pages()
        paired = [page for page in pages if page in self.paired]
        chosen = paired[: data.draw(st.integers(1, len(paired)))]
        named = pages[: pages.index(chosen[-1]) + 1] if too and not segment else chosen
        tokens = [token for token in grant.tokens if token // self.size in set(named)]
        self._end_copies_of(chosen, "swa")
        if segment and consecutive(tokens, chosen, self.size):
            self.run.give_segment(EventKind.FREE_SWA_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE_SWA, tokens)
        self.paired.difference_update(chosen)

    @precondition(lambda self: self.window and bool(self._live() - self.paired))
    @rule(data=st.data(), segment=st.booleans())
    def free_full(self, data: st.DataObject, segment: bool) -> None:
        """The full side of pages that left the window."""
        able = [grant for grant in self.model.grants if set(grant.pages()) - self.paired]
        grant = data.draw(st.sampled_from(able))
        pages = [page for page in grant.pages() if page not in self.paired]
        pages = pages[: data.draw(st.integers(1, len(pages)))]
        self._end_copies_of(pages, "full")
        tokens = grant.take_out(set(pages))
        if segment and consecutive(tokens, pages, self.size):
            self.run.give_segment(EventKind.FREE_FULL_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE_FULL, tokens)
        self.model.forget_empty()

    @precondition(lambda self: self.states and bool(self.model.groups))
    @rule()
    def flush_deferred_full_frees(self) -> None:
        """What the group holds goes, and the group stays open."""
        self.run.flush_deferred_full_frees()

    # -- states

    @precondition(lambda self: self.states)
    @rule(count=st.integers(1, 4), prepares=st.booleans())
    def slot_alloc(self, count: int, prepares: bool) -> None:
        if prepares and hasattr(self.run.reference.composite, "prepare_mamba_allocation"):
            self.run.prepare_mamba_allocation(count)
        self.slots += self.run.slot_alloc(count) or []

    @precondition(lambda self: bool(self.slots))
    @rule(data=st.data())
    def slot_free(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.slots), min_size=1, max_size=4, unique=True))
        self.run.slot_free(gone)
        self.slots = [slot for slot in self.slots if slot not in gone]

    # -- what surrounds the calls

    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(["", "", *self.pools]))
        if pool:
            self.run.flush(pool, urgent=data.draw(st.booleans()))
        else:
            self.run.flush_all()

    @precondition(lambda self: self.lazy and bool(self.model.grants))
    @rule(data=st.data(), done=st.booleans())
    def step(self, data: st.DataObject, done: bool) -> None:
        """A batch is launched, pages go while it runs, and what can be packed is packed."""
        if done and self.model.unfinished:
            self.run.forward_done(self.model.unfinished.pop(0))
        number = self._next_forward()
        copied = self._pages_in_copies()
        last = [
            grant.tokens[-1] for grant in self.model.grants if grant.tokens[-1] // self.size not in copied
        ]
        writes = data.draw(st.lists(st.sampled_from(last), max_size=4, unique=True)) if last else []
        self.run.launch(number, writes or None)
        grant = data.draw(st.sampled_from(self.model.grants))
        pages = self._pages(data, grant, "any")
        self._end_copies_of(pages, "full", "swa")
        self.run.give(EventKind.FREE, grant.take_out(set(pages)))
        self.paired.difference_update(pages)
        self.model.forget_empty()
        self.run.flush_all()

    def _cleared(self) -> None:
        self.slots = []


def composite_machine_for(session: Session) -> type[CompositePrograms]:
    return type("CompositePrograms", (CompositePrograms,), {"session": session})
