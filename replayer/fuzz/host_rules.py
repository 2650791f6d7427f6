"""A host tier beside a composite: pages are backed up, places are reserved for what comes back, and loads end the reservations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from recorder.trace import EventKind
from replayer.fuzz.composite_program import CompositeProgram
from replayer.fuzz.rules import Rules


@dataclass
class Copy:
    """A copy that is not over, of virtual pages. ``fills``: host slots that hold a window page afterwards."""

    number: int
    pool: str
    pages: list[int]
    fills: list[int]


class HostTierRules(Rules):
    """Only where compaction is lazy: an eager pool moves pages at every free, whatever is under way."""

    has_host_tier: bool

    @property
    def run(self) -> CompositeProgram:
        raise NotImplementedError

    def _start_host_tier(self, *, there: bool) -> None:
        self.has_host_tier = there
        #: Host slots that hold a window page.
        self.hosted: list[int] = []
        self.copies: list[Copy] = []
        self.copied = self.host_slots = 0

    def _settled(self, pages: Iterable[int]) -> list[int]:
        """Those of them into which no request grows, ascending: a tree keeps whole pages."""
        growing = {
            grant.tokens[-1] // grant.page_size
            for grant in self.model.grants
            if grant.grows and grant.length % grant.page_size
        }
        return sorted(set(pages) - growing)

    @precondition(lambda self: self.has_host_tier and bool(self.model.grants))
    @rule(data=st.data(), of_window=st.booleans())
    def backup(self, data: st.DataObject, of_window: bool) -> None:
        """Pages of a pool are copied to the host; they may move meanwhile."""
        pool = "swa" if of_window and self.model.bound.get("swa") else "full"
        live = self._settled(self.model.bound["swa"] if pool == "swa" else self.model.live_pages("full"))
        if not live:
            return
        pages = sorted(data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique=True)))
        self._back_up(pool, pages)

    def _wait_for_forwards(self) -> None:
        """SGLang's copies wait on the device for the forwards launched before them, which still write places freed since."""
        while self.model.unfinished:
            self.run.forward_done(self.model.unfinished.pop(0))

    def _pages_in_copies(self) -> set[int]:
        return {page for copy in self.copies for page in copy.pages}

    def _back_up(self, pool: str, pages: list[int]) -> Copy:
        self._wait_for_forwards()
        slots = list(range(self.host_slots, self.host_slots + len(pages)))
        self.host_slots += len(pages)
        table = self.run.reference.pools[pool].virtual_to_physical
        places = [int(table[page]) for page in pages]
        self.copied += 1
        self.run.backup(self.copied, pool, places, slots, pages)
        self.copies.append(Copy(self.copied, pool, pages, slots if pool == "swa" else []))
        return self.copies[-1]

    @precondition(lambda self: self.has_host_tier and bool(self.model.bound.get("swa")))
    @rule(data=st.data(), packs=st.booleans())
    def swap(self, data: st.DataObject, packs: bool) -> None:
        """Window pages go to the host, leave the device, and come back to other places."""
        live = self._settled(self.model.bound["swa"])
        if not live:
            return
        pages = sorted(data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique=True)))
        self._end_copies_of(pages, "swa")
        backup = self._back_up("swa", pages)
        self._end_copy(backup)
        size = self.model.page_size["swa"]
        tokens = [token for grant in self.model.grants for token in grant.tokens]
        self.run.give(EventKind.FREE_SWA, [token for token in tokens if token // size in pages])
        self.model.bound["swa"].difference_update(pages)
        if packs:
            self.run.flush_all()
        places = self.run.alloc_physical("swa", len(pages) * size)
        if places:
            self._map(pages, places)
            self._load(pages, places, backup.fills)

    @precondition(lambda self: bool(self.copies))
    @rule(data=st.data())
    def copy_done(self, data: st.DataObject) -> None:
        self._end_copy(self.copies[data.draw(st.integers(0, len(self.copies) - 1))])

    def _end_copy(self, copy: Copy) -> None:
        self.copies.remove(copy)
        self.run.copy_done(copy.number, copy.pool)
        self.hosted += copy.fills

    def _end_copies_of(self, pages: Sequence[int], *pools: str) -> None:
        """These pages are about to go. SGLang keeps pages that a copy reads or writes locked in its tree, and never frees them before."""
        for copy in list(self.copies):
            if copy.pool in pools and not set(pages).isdisjoint(copy.pages):
                self._end_copy(copy)

    # -- the way back

    @precondition(lambda self: self.has_host_tier and "swa" in self.model.shapes)
    @rule(pages=st.integers(1, 4))
    def reserve(self, pages: int) -> None:
        """Window places for what will come from the host; until its load is queued nothing moves."""
        size = self.model.page_size["swa"]
        # As a cache does, for pages that have none. Now and then there are none, and the load is given up.
        pages = min(pages, max(1, len(self.model.unbound("swa"))))
        tokens = self.run.alloc_physical("swa", pages * size)
        if tokens:
            self.model.reservations.append(("swa", tokens))

    @precondition(lambda self: bool(self.model.reservations))
    @rule(maps=st.sampled_from([True, True, False]), loads=st.sampled_from([True, True, False]))
    def end_reservation(self, maps: bool, loads: bool) -> None:
        """Window pages come back to requests that had lost them, with a load or (the load fails) without; or the load is given up."""
        _, places = self.model.reservations.pop()
        size = self.model.page_size["swa"]
        count = len(places) // size
        bare = self._settled(self.model.unbound("swa"))[:count]
        if not maps or len(bare) < count:
            self.run.free_physical("swa", places, cancel=True)
            return
        self._map(bare, places)
        if loads and len(self.hosted) >= count:
            self._load(bare, places, self.hosted[-count:])

    def _map(self, pages: list[int], places: list[int]) -> None:
        size = self.model.page_size["swa"]
        tokens = [page * size + offset for page in pages for offset in range(size)]
        self.run.set_full_to_swa_mapping(tokens, places)
        self.model.bound["swa"].update(pages)

    def _load(self, pages: list[int], places: list[int], slots: list[int]) -> None:
        """By SGLang's rule a load that is queued ends all reservations: what is not in it has been given up by then."""
        while self.model.reservations:
            self.run.free_physical("swa", self.model.reservations.pop()[1], cancel=True)
        self._wait_for_forwards()
        size = self.model.page_size["swa"]
        self.copied += 1
        self.run.load_back(self.copied, "swa", [place // size for place in places[::size]], slots, pages)
        self.copies.append(Copy(self.copied, "swa", pages, []))
