"""Which call on a composite comes next: joint allocs, frees of one side or both, groups, states, forwards and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from recorder.trace import EventKind
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.machine import PAGE_SIZES
from replayer.fuzz.model import Grant, consecutive
from replayer.fuzz.shapes import COMPOSITES, Chain, Setting

if TYPE_CHECKING:
    from replayer.fuzz.session import Session


class CompositePrograms(RuleBasedStateMachine):
    """`composite_machine_for` gives the class that belongs to a session."""

    session: Session

    @initialize(
        chain=st.sampled_from(COMPOSITES),
        page_size=st.sampled_from(PAGE_SIZES),
        lazy=st.sampled_from([True, True, True, False]),
        move_cap=st.sampled_from([4096, 4096, 1, 2, 5]),
        pages=st.integers(8, 90),
    )
    def start(self, chain: Chain, page_size: int, lazy: bool, move_cap: int, pages: int) -> None:
        self.program: CompositeProgram | None = None
        self.grants: list[Grant] = []
        #: Full pages that have a window page; those a group holds are in neither.
        self.paired: set[int] = set()
        self.grouped = False
        self.slots: list[int] = []
        self.reserved: list[list[int]] = []
        self.unfinished: list[int] = []
        self.forwards = 0
        names = {shape.name for shape in chain.shapes}
        self.window, self.states = "swa" in names, "mamba" in names
        self.size, self.lazy = page_size, lazy
        self.pools = sorted(names)
        self.program = self.session.begin_composite(Setting(chain, page_size, lazy, move_cap, pages))

    @property
    def run(self) -> CompositeProgram:
        assert self.program is not None
        return self.program

    # -- handing out

    def _granted(self, tokens: list[int], length: int) -> None:
        self.grants.append(Grant("full", self.size, tokens, length))

    def _pair_new(self, before: set[int], last: int | None = None) -> None:
        """New pages since ``before`` have window pages, or only the last so many of them."""
        if not self.window:
            return
        fresh = [page for grant in self.grants for page in grant.pages() if page not in before]
        self.paired.update(fresh if last is None else fresh[len(fresh) - last :])

    def _live(self) -> set[int]:
        return {page for grant in self.grants for page in grant.pages()}

    @rule(pages=st.integers(0, 10), how=st.sampled_from(["some"] * 7 + ["all", "beyond"]))
    def alloc(self, pages: int, how: str) -> None:
        need = pages * self.size
        if how != "some":
            need = self.run.available(None) + (need if how == "beyond" else 0)
        before = self._live()
        tokens = self.run.take(need)
        if tokens:
            self._granted(tokens, len(tokens))
            self._pair_new(before)

    @rule(data=st.data(), new=st.lists(st.integers(1, 40), max_size=3), more=st.integers(1, 40))
    def extend(self, data: st.DataObject, new: list[int], more: int) -> None:
        grown = self._some_that_grow(data)
        if not grown and not new:
            return
        before = self._live()
        prefix = [grant.length for grant in grown] + [0] * len(new)
        seq = [grant.length + more for grant in grown] + new
        last = [grant.tokens[-1] for grant in grown] + [-1] * len(new)
        tokens = self.run.extend(prefix, seq, last)
        if tokens is None:
            return
        for grant in grown:
            grant.tokens += tokens[:more]
            grant.length += more
            tokens = tokens[more:]
        for length in new:
            self._granted(tokens[:length], length)
            tokens = tokens[length:]
        self._pair_new(before)

    @precondition(lambda self: self.window)
    @rule(data=st.data(), more=st.integers(1, 60), share=st.integers(0, 4), grows=st.booleans())
    def extend_swa_tail(self, data: st.DataObject, more: int, share: int, grows: bool) -> None:
        """Window pages for the last tokens only."""
        able = [grant for grant in self.grants if grant.grows]
        grant = data.draw(st.sampled_from(able)) if grows and able else None
        prefix, last = (0, -1) if grant is None else (grant.length, grant.tokens[-1])
        seq, tail = prefix + more, more * share // 4
        before = self._live()
        tokens = self.run.extend_swa_tail(prefix, seq, last, tail)
        if tokens is None:
            return
        if grant is None:
            self._granted(tokens, seq)
        else:
            grant.tokens += tokens
            grant.length = seq
        first = max(-(-prefix // self.size), (seq - tail) // self.size)
        self._pair_new(before, -(-seq // self.size) - first if tail else 0)

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        grown = self._some_that_grow(data) if self.size > 1 else []
        if not grown:
            return
        before = self._live()
        tokens = self.run.decode([grant.length + 1 for grant in grown], [grant.tokens[-1] for grant in grown])
        if tokens is not None:
            for grant, token in zip(grown, tokens, strict=True):
                grant.tokens.append(token)
                grant.length += 1
            self._pair_new(before)

    def _some_that_grow(self, data: st.DataObject) -> list[Grant]:
        able = [grant for grant in self.grants if grant.grows]
        if not able:
            return []
        chosen = data.draw(st.lists(st.integers(0, len(able) - 1), max_size=3, unique=True))
        return [able[at] for at in chosen]

    @precondition(lambda self: self.window)
    @rule(full=st.integers(0, 20), swa=st.integers(0, 20))
    def ensure(self, full: int, swa: int) -> None:
        self.run.ensure_capacity(full * self.size, swa * self.size)

    # -- giving back

    @precondition(lambda self: bool(self.grants))
    @rule(data=st.data(), what=st.sampled_from(["all", "head", "tail", "any"]), segment=st.booleans())
    def free(self, data: st.DataObject, what: str, segment: bool) -> None:
        """Both sides; as a segment only where every page has both."""
        grant = data.draw(st.sampled_from(self.grants))
        pages = self._pages(data, grant, what)
        tokens = grant.take_out(set(pages))
        paired = not self.window or self.paired.issuperset(pages)
        if segment and paired and consecutive(tokens, pages, self.size):
            self.run.give_segment(EventKind.FREE_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE, tokens)
        self.paired -= set(pages)
        self._forget_empty()

    @precondition(lambda self: bool(self.paired))
    @rule(data=st.data(), segment=st.booleans(), too=st.booleans())
    def leave_the_window(self, data: st.DataObject, segment: bool, too: bool) -> None:
        """Window pages of a request's head; pages that have none any more may be named too, but not as a segment."""
        with_pairs = [grant for grant in self.grants if self.paired.intersection(grant.pages())]
        grant = data.draw(st.sampled_from(with_pairs))
        pages = grant.pages()
        paired = [page for page in pages if page in self.paired]
        chosen = paired[: data.draw(st.integers(1, len(paired)))]
        named = pages[: pages.index(chosen[-1]) + 1] if too and not segment else chosen
        tokens = [token for token in grant.tokens if token // self.size in set(named)]
        if segment and consecutive(tokens, chosen, self.size):
            self.run.give_segment(EventKind.FREE_SWA_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE_SWA, tokens)
        self.paired -= set(chosen)

    @precondition(lambda self: self.window and bool(self._live() - self.paired))
    @rule(data=st.data(), segment=st.booleans())
    def free_full(self, data: st.DataObject, segment: bool) -> None:
        """The full side of pages that left the window."""
        able = [grant for grant in self.grants if set(grant.pages()) - self.paired]
        grant = data.draw(st.sampled_from(able))
        pages = [page for page in grant.pages() if page not in self.paired]
        pages = pages[: data.draw(st.integers(1, len(pages)))]
        tokens = grant.take_out(set(pages))
        if segment and consecutive(tokens, pages, self.size):
            self.run.give_segment(EventKind.FREE_FULL_SEGMENT, tokens)
        else:
            self.run.give(EventKind.FREE_FULL, tokens)
        self._forget_empty()

    @staticmethod
    def _pages(data: st.DataObject, grant: Grant, what: str) -> list[int]:
        pages = grant.pages()
        if what == "all":
            return pages
        if what == "any":
            return data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
        count = data.draw(st.integers(1, len(pages)))
        return pages[:count] if what == "head" else pages[-count:]

    def _forget_empty(self) -> None:
        self.grants = [grant for grant in self.grants if grant.tokens]

    @rule(end=st.booleans())
    def group(self, end: bool) -> None:
        if self.grouped and end:
            self.run.group_end()
            self.grouped = False
        elif not self.grouped and not end:
            self.run.group_begin()
            self.grouped = True

    # -- places from a host, and states

    @precondition(lambda self: self.window and self.lazy)
    @rule(pages=st.integers(1, 4))
    def reserve(self, pages: int) -> None:
        tokens = self.run.alloc_physical("swa", pages * self.size)
        if tokens:
            self.reserved.append(tokens)

    @precondition(lambda self: bool(self.reserved))
    @rule(maps=st.booleans())
    def end_reservation(self, maps: bool) -> None:
        """Window pages come back to requests that had lost them, or the load is given up."""
        places = self.reserved.pop()
        bare = sorted(self._live() - self.paired)[: len(places) // self.size]
        if not maps or len(bare) * self.size < len(places):
            self.run.free_physical("swa", places, cancel=True)
            return
        self.run.set_full_to_swa_mapping(
            [page * self.size + offset for page in bare for offset in range(self.size)], places
        )
        self.paired.update(bare)

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

    @precondition(lambda self: self.lazy and bool(self.grants))
    @rule(data=st.data(), done=st.booleans())
    def step(self, data: st.DataObject, done: bool) -> None:
        """A batch is launched, pages go while it runs, and what can be packed is packed."""
        if done and self.unfinished:
            self.run.forward_done(self.unfinished.pop(0))
        self.forwards += 1
        self.unfinished.append(self.forwards)
        last = [grant.tokens[-1] for grant in self.grants]
        writes = data.draw(st.lists(st.sampled_from(last), max_size=4, unique=True))
        self.run.launch(self.forwards, writes or None)
        grant = data.draw(st.sampled_from(self.grants))
        pages = self._pages(data, grant, "any")
        self.run.give(EventKind.FREE, grant.take_out(set(pages)))
        self.paired -= set(pages)
        self._forget_empty()
        self.run.flush_all()

    @precondition(lambda self: bool(self.unfinished))
    @rule()
    def forward_done(self) -> None:
        self.run.forward_done(self.unfinished.pop(0))

    @precondition(lambda self: self.lazy)
    @rule(shut=st.sampled_from([False, False, True]))
    def gate(self, shut: bool) -> None:
        if shut == self.run.reference.gate_open:
            self.run.move_gate(is_open=not shut)

    @precondition(lambda self: self.forwards > 2 and not self.grouped)
    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.run.clear()
            self.grants, self.paired, self.slots, self.reserved = [], set(), [], []

    def teardown(self) -> None:
        program = getattr(self, "program", None)
        if program is not None:
            self.session.finish(program)


def composite_machine_for(session: Session) -> type[CompositePrograms]:
    return type("CompositePrograms", (CompositePrograms,), {"session": session})
