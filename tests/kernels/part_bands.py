"""Bands before a flush that is not urgent, and what planning and moving makes of them: torch operations, kernels, and a walk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from allocator.flush_ops import Holes, PartPlan, TorchFlush, Window
from allocator.unsettled import FAR
from tests.kernels.bands import Band, Pool

#: Tokens that name no page of the band.
OTHER_TOKENS = ("unmapped", "padding", "negative", "past the table", "far past the table")


@dataclass(frozen=True)
class PartBand:
    """``places``: from the watermark on, ``L`` live, ``.`` a hole, ``-`` a page that waits to be reused.

    ``written``: what the running forward writes, by place or as one of `OTHER_TOKENS`; None if there is none. ``is_void``: what the device
    says of that, None if nobody asked. ``most_live``: how many live pages the host reckons with beyond those there are. ``padding``: rows
    of the list behind the holes.
    """

    places: str
    grows_up: bool = True
    page_size: int = 1
    cap: int = 4096
    written: tuple[int | str, ...] | None = None
    is_void: bool | None = None
    most_live: int = 0
    padding: int = 0
    seed: int = 0
    lead: int = 2
    token_dtype: torch.dtype = torch.int64
    is_frozen: bool = False

    def pool(self, flush_class: type[TorchFlush], device: str, **tuning: Any) -> Pool:
        band = Band(
            holds=tuple(place == "L" for place in self.places),
            holes=tuple(x for x, place in enumerate(self.places) if place == "."),
            grows_up=self.grows_up, page_size=self.page_size, seed=self.seed, lead=self.lead, is_frozen=self.is_frozen,
            spare=5 + self.padding,  # no list is longer than there are pages
        )  # fmt: skip
        return Pool(band, flush_class, device, **tuning)

    def tokens(self, pool: Pool) -> torch.Tensor | None:
        """The virtual token ids of ``written``, with others of no meaning between them in memory."""
        if self.written is None:
            return None
        tables = pool.tables
        size = tables.num_virtual_ids
        others = {
            "unmapped": int((tables.virtual_to_physical[:-1] < 0).nonzero()[-1]), "padding": 0, "negative": -1,
            "past the table": size, "far past the table": size + 1000,
        }  # fmt: skip

        def token(named: int | str) -> int:
            if isinstance(named, str):
                page = others[named]
            else:
                at = pool.mark - 1 - named if self.grows_up else pool.mark + 1 + named
                page = int(tables.physical_to_virtual[at])
            return page * self.page_size + (self.page_size - 1)

        tokens = torch.tensor([token(named) for named in self.written], dtype=self.token_dtype)
        return torch.stack([tokens, tokens - 1], 1).to(tables.virtual_to_physical.device)[:, 0]

    def arguments(self, pool: Pool) -> tuple[Window, Holes, int, torch.Tensor | None, torch.Tensor | None]:
        """As `LateFlush` would call ``plan_in_part``."""
        device = pool.ascending.device
        low, high = (
            (self.lead, pool.num_pages) if self.grows_up else (1, pool.num_pages - self.lead)
        )  # the other end's pages are not this pool's
        ascending = torch.cat([pool.ascending, torch.full((self.padding,), FAR, device=device)])
        capacity = ascending.shape[0]
        rows = min(capacity, self.cap, pool.live + self.most_live)
        size = min(capacity + self.places.count("-"), len(self.places))
        mark, count = (
            torch.full((), number, device=device) for number in (pool.mark, capacity - self.padding)
        )
        is_void = None if self.is_void is None else torch.full((), self.is_void, device=device)
        window = Window(mark, size, None, self.grows_up, low, high)
        return window, Holes(ascending, count), rows, self.tokens(pool), is_void

    def walk(self) -> tuple[list[int], list[int], int]:
        """Places that pages move from and to, and how many holes touch the watermark: two cursors that come towards each other."""
        written = () if self.is_void or self.written is None else self.written
        sources: list[int] = []
        targets: list[int] = []
        far = len(self.places)
        for near, place in enumerate(self.places):
            if near in written or len(sources) == self.cap:
                break
            if place != "L":
                continue
            far = self.places.rfind(".", near, far)
            if far < 0:
                break
            sources.append(near)
            targets.append(far)
        return sources, targets, len(self.places) - len(self.places.lstrip("."))


def outcome(plan: PartPlan) -> dict[str, Any]:
    """All that is valid of a plan."""
    moves = int(plan.moves)
    return {
        "moves": moves,
        "touching": int(plan.touching),
        "src": plan.src_pages[:moves].tolist(),
        "dst": plan.dst_pages[:moves].tolist(),
        "unfilled": int(plan.unfilled),
        "free": int(plan.free),
        "holes": plan.holes[: int(plan.free)].tolist(),
        "mark": int(plan.mark),
        "lengths": [len(each) for each in (plan.src_pages, plan.dst_pages, plan.holes)],
        "dtypes": {each.dtype for each in vars(plan).values()},
    }


def expect_same_in_part(
    band: PartBand, flush_class: type[TorchFlush], device: str = "cpu", **tuning: Any
) -> dict[str, Any]:
    """Flush the band with torch operations and with ``flush_class``; fail unless the walk's moves are made by both, and plans, tables and
    bytes are equal."""
    reference, tried = band.pool(TorchFlush, device), band.pool(flush_class, device, **tuning)
    before = reference.state()
    plans = []
    for pool in (reference, tried):
        window, holes, rows, *forward = band.arguments(pool)
        given = holes.ascending.clone()
        plans.append(pool.ops.plan_in_part(window, holes, rows, *forward))
        assert pool.state() == before and torch.equal(holes.ascending, given), "planning changed something"
    expected = outcome(plans[0])
    sources, targets, touching = band.walk()

    def pages(places: list[int]) -> list[int]:
        return [reference.mark - 1 - x if band.grows_up else reference.mark + 1 + x for x in places]

    gone = {*pages(targets), *pages(list(range(touching)))}
    left = [page for page in reference.ascending.tolist() if page not in gone]
    assert expected["src"] == pages(sources) and expected["dst"] == pages(targets)
    assert expected["touching"] == touching and expected["holes"] == left + expected["src"]
    assert outcome(plans[1]) == expected
    if rows:
        for pool, plan in zip((reference, tried), plans, strict=True):
            pool.ops.move(plan.moves, plan.src_pages, plan.dst_pages)
    after, tried_after = reference.state(), tried.state()
    for key, value in after.items():
        assert tried_after[key] == value, key
    assert (after != before) == bool(expected["moves"] and not band.is_frozen)
    return expected


def named_part_bands() -> dict[str, PartBand]:
    """Bands by what is special about them; both directions."""
    nothing = OTHER_TOKENS
    shapes = {
        "one hole, nothing live": PartBand("."),
        "one hole, nothing live, but who knows": PartBand(".", most_live=3, padding=2),
        "all vacant": PartBand("." * 23, most_live=4),
        "holes next to the watermark": PartBand("." * 7 + "L" * 23),
        "holes at the far end": PartBand("L" * 23 + "." * 7),
        "every other page": PartBand("L." * 23),
        "every other page, the other half": PartBand(".L" * 23),
        "more holes than pages": PartBand("L..." * 9),
        "only pages that wait in the window": PartBand("------.LL-.LLLLLL"),
        "a list with padding": PartBand("L.L.." * 5, padding=9),
        "padding longer than the band": PartBand("L.L..", padding=30),
        "touching holes, then a page, then holes": PartBand("...L....L"),
        "a cap of none": PartBand("..L." * 5, cap=0),
        "pages of 4 slots": PartBand("LL." * 8, page_size=4, written=(10, 13)),
        "written at place 0": PartBand("LL.L...", written=(0,)),
        "written behind touching holes": PartBand("..LL.L...", written=(3, 2)),
        "written in the middle": PartBand("LLLL......", written=(3, 2)),
        "written beyond the window": PartBand("LL..LLLL", written=(6, 7)),
        "written where only holes and moved pages are nearer": PartBand("L.L.L.L.L.L.", written=(4,)),
        "only ids of no page are written": PartBand("L." * 12, written=nothing),
        "the same, pages of 4": PartBand("L." * 12, page_size=4, written=nothing),
        "many ids": PartBand("L." * 30, written=(*nothing, *range(58, 11, -2), *nothing)),
        "many ids, the nearest one last": PartBand("L." * 30, written=(*nothing, *range(58, 15, -2), *nothing, 8)),
        "ids of 32 bits": PartBand("L." * 12, written=(*nothing, 4, 8), token_dtype=torch.int32),
        "ids that are void": PartBand("L." * 12, written=(0, 2), is_void=True),
        "ids that are not void": PartBand("L." * 12, written=(4, 6), is_void=False),
        "no hole is valid": PartBand("LLL-LL", padding=3),
        "the cap": PartBand("L." * 20, cap=3),
        "pages that wait": PartBand("-L-.L--.LL." * 3),
        "pages of 3 slots": PartBand("LL.-" * 6, page_size=3, written=(17, *nothing)),
        "frozen": PartBand("L." * 12, is_frozen=True),
        "touching holes, pages that wait, padding": PartBand("....." + "L.-LL." * 4, padding=9, page_size=4),
    }  # fmt: skip
    return {
        f"{name}, {'up' if up else 'down'}": replace(shape, grows_up=up)
        for name, shape in shapes.items()
        for up in (True, False)
    }
