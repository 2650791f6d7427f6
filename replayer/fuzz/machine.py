"""Which call comes next: a Hypothesis state machine, so that a program that finds something shrinks to its shortest form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from replayer.fuzz.model import Model, consecutive
from replayer.fuzz.rules import PAGE_SIZES, Rules
from replayer.fuzz.shapes import CHAINS, Setting

if TYPE_CHECKING:
    from replayer.fuzz.session import Session


class Programs(Rules):
    """`machine_for` gives the class that belongs to a session."""

    @initialize(
        chain=st.sampled_from(CHAINS),
        page_size=st.sampled_from(PAGE_SIZES),
        lazy=st.sampled_from([True, True, True, False]),
        move_cap=st.sampled_from([4096, 4096, 1, 2, 5, 0]),
        pages=st.integers(8, 90),
        reserves=st.sampled_from([False, False, False, True]),
    )
    def start(
        self, chain: object, page_size: int, lazy: bool, move_cap: int, pages: int, reserves: bool
    ) -> None:
        known = [one for one in CHAINS if one.known_to_sglang or not self.session.with_sglang]
        taken = chain if chain in known else known[0]
        if self.session.with_sglang:
            # SGLang 0.5.23 looks at the bound after a move: with a bound of 0 it moves one page, and so do we not.
            move_cap = max(move_cap, 1)
        setting = Setting(taken, page_size, lazy, move_cap, pages)
        self.program = None
        self.model = Model(setting, decodes_single_tokens=not self.session.with_sglang)
        # Loads from the host need lazy compaction: while places are reserved nothing may move, and an eager free always would.
        self.reserves = reserves and lazy
        self.program = self.session.begin(setting)

    # -- calls on sub-pools

    def _call_extend(self, pool: str, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        return self.run.alloc_extend(pool, prefix, seq, last)

    def _call_decode(self, pool: str, seq: list[int], last: list[int]) -> list[int] | None:
        return self.run.alloc_decode(pool, seq, last)

    def _call_group(self, pool: str, *, ends: bool) -> None:
        (self.run.free_group_end if ends else self.run.free_group_begin)(pool)

    def _grouping_pools(self) -> list[str]:
        return self.model.owners

    # -- handing out

    @rule(data=st.data(), pages=st.integers(0, 12), how=st.sampled_from(["some"] * 7 + ["all", "beyond"]))
    def alloc(self, data: st.DataObject, pages: int, how: str) -> None:
        """Some pages, exactly what is said to be available, or more than that."""
        pool = data.draw(st.sampled_from(self.model.owners))
        size = self.model.page_size[pool]
        need = pages * size
        if how != "some":
            need = self.run.available(pool) + (need if how == "beyond" else 0)
        self._granted(pool, self.run.alloc(pool, need))

    @precondition(lambda self: bool(self.model.guests))
    @rule(data=st.data(), most=st.integers(1, 12))
    def bind_new(self, data: st.DataObject, most: int) -> None:
        """The other side of ids that live: ``alloc_with_virtual``, which must be served if it fits."""
        guest = data.draw(st.sampled_from(self.model.guests))
        room = self.run.available(guest) // self.model.page_size[guest]
        pages = self.model.unbound(guest)[: min(most, room)]
        if pages:
            self.run.alloc_with_virtual(guest, pages)
            self.model.bound[guest].update(pages)

    @precondition(lambda self: bool(self.model.guests))
    @rule(data=st.data(), most=st.integers(1, 3))
    def hand_over(self, data: st.DataObject, most: int) -> None:
        """Places of some ids become those of others: ``bind``, then ``unbind``, as SGLang's tree does with window pages."""
        guest = data.draw(st.sampled_from(self.model.guests))
        old = sorted(self.model.bound[guest])[:most]
        new = self.model.unbound(guest)[: len(old)]
        old = old[: len(new)]
        if not old or guest in self.model.groups:
            return
        table = self.run.reference.pools[guest].virtual_to_physical
        self.run.bind(guest, new, [int(table[page]) for page in old])
        self.run.unbind(guest, old)
        self.model.bound[guest] -= set(old)
        self.model.bound[guest] |= set(new)

    # -- places without ids

    @precondition(lambda self: self.reserves and bool(self.model.guests))
    @rule(data=st.data(), pages=st.integers(1, 4))
    def reserve(self, data: st.DataObject, pages: int) -> None:
        pool = data.draw(st.sampled_from(self.model.guests))
        tokens = self.run.alloc_physical(pool, pages * self.model.page_size[pool])
        if tokens:
            self.model.reservations.append((pool, tokens))

    @precondition(lambda self: bool(self.model.reservations))
    @rule(what=st.sampled_from(["bind", "free", "cancel"]))
    def end_reservation(self, what: str) -> None:
        pool, tokens = self.model.reservations.pop()
        if what != "bind":
            self.run.free_physical(pool, tokens, cancel=what == "cancel")
            return
        size = self.model.page_size[pool]
        physical = [token // size for token in tokens[::size]]
        pages = self.model.unbound(pool)
        if len(pages) < len(physical):
            self.run.free_physical(pool, tokens, cancel=True)
            return
        self.run.bind(pool, pages[: len(physical)], physical)
        self.model.bound[pool].update(pages[: len(physical)])

    # -- giving back

    @precondition(lambda self: bool(self.model.grants))
    @rule(data=st.data(), what=st.sampled_from(["all", "head", "tail", "any"]), named=st.booleans())
    def free(self, data: st.DataObject, what: str, named: bool) -> None:
        self._free(data, what, named)

    @precondition(lambda self: bool(self.model.grants and self.model.lazy))
    @rule(data=st.data(), done=st.booleans())
    def step(self, data: st.DataObject, done: bool) -> None:
        """What an engine does between two batches: one is launched, pages of others go, and the pools are packed meanwhile."""
        if done and self.model.unfinished:
            self.run.forward_done(self.model.unfinished.pop(0))
        self._launch(data, padded=False)
        self._free(data, data.draw(st.sampled_from(["all", "any", "any"])), named=False)
        for pool in self.model.lazy:
            self.run.flush(pool, urgent=False)

    def _free(self, data: st.DataObject, what: str, named: bool) -> None:
        """Pages of one grant, or of several, by any of their tokens."""
        grants = self._some(data, self.model.grants, 4 if what == "all" else 1)
        grants = [grant for grant in grants if grant.pool == grants[0].pool]
        pool = grants[0].pool
        size = self.model.page_size[pool]
        tokens: list[int] = []
        for grant in grants:
            pages = self._pages(data, grant, what)
            gone = grant.take_out(set(pages))
            tokens += gone if size == 1 or data.draw(st.booleans()) else self._one_a_page(data, gone, size)
        pages = list(dict.fromkeys(token // size for token in tokens))
        self._free_guests(pool, pages)
        names = named and len(tokens) == len(pages) and pool not in self.model.groups
        self.run.free(pool, tokens, pages if names else None)
        self.model.forget_empty()

    @precondition(lambda self: bool(self.model.grants))
    @rule(data=st.data(), what=st.sampled_from(["all", "head", "tail"]))
    def free_segment(self, data: st.DataObject, what: str) -> None:
        """Consecutive tokens of one request, from a page border on."""
        (grant,) = self._some(data, self.model.grants, 1)
        pages = self._pages(data, grant, what)
        if what != "head" and not grant.grows and grant.length % grant.page_size:
            pages = grant.pages()
        tokens = grant.take_out(set(pages))
        self._free_guests(grant.pool, pages)
        if consecutive(tokens, pages, grant.page_size):
            self.run.free_segment(grant.pool, tokens, 0)
        else:
            self.run.free(grant.pool, tokens)
        self.model.forget_empty()

    @staticmethod
    def _one_a_page(data: st.DataObject, tokens: list[int], size: int) -> list[int]:
        by_page: dict[int, list[int]] = {}
        for token in tokens:
            by_page.setdefault(token // size, []).append(token)
        offset = data.draw(st.integers(0, size - 1))
        return [named[min(offset, len(named) - 1)] for named in by_page.values()]

    def _free_guests(self, owner: str, pages: list[int]) -> None:
        """The other side of pages about to go, first; as the engines do."""
        for guest in self.model.guests_of(owner):
            bound = [page for page in pages if page in self.model.bound[guest]]
            if bound:
                self._free_bound(guest, bound)

    def _free_bound(self, guest: str, pages: list[int]) -> None:
        self.run.free(guest, [page * self.model.page_size[guest] for page in pages])
        self.model.bound[guest] -= set(pages)

    @precondition(lambda self: any(self.model.bound.values()))
    @rule(data=st.data(), most=st.integers(1, 8))
    def leave_the_window(self, data: st.DataObject, most: int) -> None:
        """The guest's pages go, the owner's stay."""
        guest = data.draw(st.sampled_from([name for name, pages in self.model.bound.items() if pages]))
        self._free_bound(guest, sorted(self.model.bound[guest])[:most])

    # -- packing

    @rule(data=st.data(), urgent=st.booleans())
    def flush(self, data: st.DataObject, urgent: bool) -> None:
        self.run.flush(data.draw(st.sampled_from(sorted(self.model.shapes))), urgent=urgent)

    @precondition(lambda self: bool(self.model.floats))
    @rule(data=st.data(), side=st.sampled_from(["low", "high"]), nbytes=st.integers(1, 1 << 14))
    def make_room(self, data: st.DataObject, side: str, nbytes: int) -> None:
        self.run.make_room(data.draw(st.sampled_from(self.model.floats)), side, nbytes)

    @precondition(lambda self: bool(self.model.floats))
    @rule(data=st.data(), side=st.sampled_from(["low", "high"]))
    def compact_holes(self, data: st.DataObject, side: str) -> None:
        self.run.compact_holes(data.draw(st.sampled_from(self.model.floats)), side)

    # -- what surrounds the calls

    @precondition(lambda self: bool(self.model.lazy))
    @rule(data=st.data(), padded=st.booleans())
    def forward(self, data: st.DataObject, padded: bool) -> None:
        self._launch(data, padded)

    def _launch(self, data: st.DataObject, padded: bool) -> None:
        number = self._next_forward()
        for pool in self.model.lazy:
            able = self.model.tokens_to_write(pool)
            writes = data.draw(st.lists(st.sampled_from(able), max_size=4, unique=True)) if able else []
            if padded and writes:
                writes = [*writes, 0, 0]
            self.run.forward_begin(pool, number, writes or None)


def machine_for(session: Session) -> type[Programs]:
    return type("Programs", (Programs,), {"session": session})
