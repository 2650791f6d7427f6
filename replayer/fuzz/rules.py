"""What both kinds of random programs do alike: requests that grow, pages that go, free groups, ends of forwards, gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from replayer.fuzz.model import Grant, Model
from replayer.fuzz.program import Program

if TYPE_CHECKING:
    from replayer.fuzz.session import Session

PAGE_SIZES = (1, 2, 4, 16, 64)


class Rules(RuleBasedStateMachine):
    """Base of the machines. A subclass sets ``model`` and ``program`` when it starts, and says which calls stand behind the growth of
    requests and behind groups."""

    session: ClassVar[Session]
    model: Model
    program: Program | None

    @property
    def run(self) -> Program:
        assert self.program is not None
        return self.program

    # -- the calls of a kind of programs

    def _call_extend(self, pool: str, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        raise NotImplementedError

    def _call_decode(self, pool: str, seq: list[int], last: list[int]) -> list[int] | None:
        raise NotImplementedError

    def _call_group(self, pool: str, *, ends: bool) -> None:
        raise NotImplementedError

    def _grouping_pools(self) -> list[str]:
        """Pools that can hold frees back."""
        raise NotImplementedError

    def _handed_out(self, pool: str, before: set[int]) -> None:
        """A call has given out pages; ``before`` are those that lived before it."""

    def _cleared(self) -> None:
        """All pools were emptied."""

    # -- growing

    def _granted(self, pool: str, tokens: list[int] | None, length: int | None = None) -> None:
        """A request begins with these tokens, the last ones of its ``length`` positions."""
        if tokens:
            self.model.grants.append(
                Grant(pool, self.model.page_size[pool], tokens, len(tokens) if length is None else length)
            )

    @rule(data=st.data(), new=st.lists(st.integers(1, 40), max_size=3), more=st.integers(1, 40))
    def extend(self, data: st.DataObject, new: list[int], more: int) -> None:
        """Some requests grow by ``more`` tokens, others begin."""
        if not self.model.token_owners:
            return
        pool = data.draw(st.sampled_from(self.model.token_owners))
        grown = self._some_that_grow(data, pool)
        if not grown and not new:
            return
        before = set(self.model.live_pages(pool))
        prefix = [grant.length for grant in grown] + [0] * len(new)
        seq = [grant.length + more for grant in grown] + new
        last = [grant.tokens[-1] for grant in grown] + [-1] * len(new)
        tokens = self._call_extend(pool, prefix, seq, last)
        if tokens is None:
            return
        for grant in grown:
            grant.append(tokens[:more])
            tokens = tokens[more:]
        for length in new:
            self._granted(pool, tokens[:length])
            tokens = tokens[length:]
        self._handed_out(pool, before)

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        if not self.model.decoding_owners:
            return
        pool = data.draw(st.sampled_from(self.model.decoding_owners))
        grown = self._some_that_grow(data, pool)
        if not grown:
            return
        before = set(self.model.live_pages(pool))
        tokens = self._call_decode(
            pool, [grant.length + 1 for grant in grown], [grant.tokens[-1] for grant in grown]
        )
        if tokens is not None:
            for grant, token in zip(grown, tokens, strict=True):
                grant.append([token])
            self._handed_out(pool, before)

    def _some_that_grow(self, data: st.DataObject, pool: str) -> list[Grant]:
        able = [grant for grant in self.model.grants if grant.pool == pool and grant.grows]
        return self._some(data, able, 3)

    @staticmethod
    def _some(data: st.DataObject, things: Sequence[Grant], most: int) -> list[Grant]:
        if not things:
            return []
        chosen = data.draw(st.lists(st.integers(0, len(things) - 1), min_size=1, max_size=most, unique=True))
        return [things[at] for at in chosen]

    # -- which pages go

    @staticmethod
    def _pages(data: st.DataObject, grant: Grant, what: str) -> list[int]:
        """All pages of a request, those of its head or its tail, or any."""
        pages = grant.pages()
        if what == "all":
            return pages
        if what == "any":
            return data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
        count = data.draw(st.integers(1, len(pages)))
        return pages[:count] if what == "head" else pages[-count:]

    # -- free groups

    @rule(data=st.data())
    def group_begin(self, data: st.DataObject) -> None:
        closed = [name for name in self._grouping_pools() if name not in self.model.groups]
        if closed:
            pool = data.draw(st.sampled_from(closed))
            self._call_group(pool, ends=False)
            self.model.groups.add(pool)

    @precondition(lambda self: bool(self.model.groups))
    @rule(data=st.data())
    def group_end(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(sorted(self.model.groups)))
        self._call_group(pool, ends=True)
        self.model.groups.remove(pool)

    # -- what surrounds the calls

    @precondition(lambda self: bool(self.model.unfinished))
    @rule()
    def forward_done(self) -> None:
        self.run.forward_done(self.model.unfinished.pop(0))

    def _next_forward(self) -> int:
        """The number of the forward that is launched now."""
        self.model.forwards += 1
        self.model.unfinished.append(self.model.forwards)
        return self.model.forwards

    @precondition(lambda self: bool(self.model.lazy))
    @rule(shut=st.sampled_from([False, False, True]))
    def gate(self, shut: bool) -> None:
        if shut == self.run.reference.gate_open:
            self.run.move_gate(is_open=not shut)

    @precondition(lambda self: self.model.forwards > 2 and not self.model.groups)
    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.run.clear()
            self.model.clear()
            self._cleared()

    def teardown(self) -> None:
        program = getattr(self, "program", None)
        if program is not None:
            self.session.finish(program)
