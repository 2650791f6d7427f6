"""`FloatMultiEndedAllocator`: the allocator of a pool between the two ends, with a span that can move.

A float keeps its holes: they are where its next pages go. It gives back only holes at the borders of its span, and moves pages only
when a neighbour needs the room. Behaviour and names follow SGLang 0.5.23's class of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from allocator.band import Band, Side
from allocator.end import MultiEndedAllocator
from allocator.errors import ConfigurationError
from allocator.lookup import DEVICE_STRATEGY


class FloatMultiEndedAllocator(MultiEndedAllocator):
    """Owns the span ``[low_wm_page, high_wm_page)``. Takes the arguments of `MultiEndedAllocator`; never lazy.

    Raises:
        ConfigurationError: lazy compaction asked for, or a spec that does not float.
    """

    #: Requests take holes from the two ends of the hole list in turn; only one that took some turns it, and `clear` does not (SGLang's).
    _next_hole_end: Side = "low"

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("lazy_compaction", False):
            raise ConfigurationError(
                "a float reuses its holes; lazy compaction is for the ends",
                pool=kwargs.get("sub_pool_name", ""),
            )
        super().__init__(**kwargs)
        if self.grow_direction != "float":
            raise ConfigurationError(
                f"a float needs a 'float' spec, not {self.grow_direction!r}", pool=self.sub_pool_name
            )

    @classmethod
    def _class_for(cls, strategy: str) -> type[MultiEndedAllocator]:
        from allocator.device_middle import DeviceFloatMultiEndedAllocator

        if strategy != DEVICE_STRATEGY and issubclass(cls, DeviceFloatMultiEndedAllocator):
            raise ConfigurationError(
                f"{cls.__name__} plans on the device: its strategy is {DEVICE_STRATEGY!r}, not {strategy!r}"
            )
        if strategy != DEVICE_STRATEGY or issubclass(cls, DeviceFloatMultiEndedAllocator):
            return cls
        if cls is FloatMultiEndedAllocator:
            return DeviceFloatMultiEndedAllocator
        raise ConfigurationError(
            f"{cls.__name__} reads its holes on the host; for strategy {DEVICE_STRATEGY!r} derive it from "
            f"{DeviceFloatMultiEndedAllocator.__name__}"
        )

    def _reset_watermarks(self) -> None:
        # Empty is empty wherever it is parked: neighbours look through.
        self.low_wm_page = self.high_wm_page = self.num_pages
        self.watermark_physical = -1
        #: False proves that both border pages are live, so that giving back borders needs no read of the holes.
        self._holes_dirty = False

    # -- span

    def _span_pages(self) -> int:
        return self.high_wm_page - self.low_wm_page

    def _hole_pages(self) -> int:
        return len(self.holes)

    def _live_pages(self) -> int:
        return self._span_pages() - self._hole_pages()

    def _allocated_pages(self) -> int:
        return self._live_pages()

    @property
    def live_page_count(self) -> int:
        return self._live_pages()

    def _is_frontier_transparent(self) -> bool:
        return self._live_pages() == 0

    def _byte_low_frontier(self) -> int:
        return self.low_wm_page * self.entry_bytes_per_page

    def _byte_high_frontier(self) -> int:
        return self.high_wm_page * self.entry_bytes_per_page

    def _band_pages(self) -> tuple[int, int]:
        return self.low_wm_page, self.high_wm_page

    def _region_bounds_pages(self) -> tuple[int, int]:
        """Pages ``[low, high)`` that lie wholly between the neighbours."""
        return (
            max(
                -(-self._chain_high_frontier_below_bytes() // self.entry_bytes_per_page), self.min_page_index
            ),
            min(self._chain_low_frontier_above_bytes() // self.entry_bytes_per_page, self.num_pages),
        )

    def pages_in_band(self, *, low_byte: int, high_byte: int) -> int:
        """Whole pages of this pool's own grid inside ``[low_byte, high_byte)``."""
        low = max(-(-low_byte // self.entry_bytes_per_page), self.min_page_index)
        return max(0, min(high_byte // self.entry_bytes_per_page, self.num_pages) - low)

    def _gap_pages(self) -> tuple[int, int]:
        """Free pages below and above the span; the whole region on both sides while the pool is empty."""
        low, high = self._region_bounds_pages()
        if self._is_frontier_transparent():
            return max(0, high - low), max(0, high - low)
        return max(0, self.low_wm_page - low), max(0, high - self.high_wm_page)

    def _gap_bytes(self, side: Side) -> int:
        return self._gap_pages()[0 if side == "low" else 1] * self.entry_bytes_per_page

    # -- capacity

    def _available_in(self, gap_low: int, gap_high: int) -> int:
        # One request grows one side only, so the gaps do not add up.
        return (min(max(gap_low, gap_high), self._index_room()) + self._hole_pages()) * self.page_size

    def _certain_size(self) -> int:
        return self._available_in(*self._gap_pages())

    def _certain_schedulable_size(self) -> int:
        gap_low, gap_high = self._gap_pages()
        return self._available_in(
            gap_low + self._drainable_hole_bytes("low") // self.entry_bytes_per_page,
            gap_high + self._drainable_hole_bytes("high") // self.entry_bytes_per_page,
        )

    # -- alloc and free

    def take_physical_pages(self, num_pages: int) -> torch.Tensor | None:
        """Holes first, then beyond one border of the span; int64 ``[num_pages]``, or None with nothing changed."""
        from_holes = min(num_pages, self._hole_pages())
        beyond = num_pages - from_holes
        first = self._extend_span(beyond) if beyond else 0
        if first is None:
            return None
        fresh = torch.arange(first, first + beyond, dtype=torch.int64, device=self.device)
        if not from_holes:
            return fresh
        taken = self.holes.take(from_holes, self._next_hole_end)
        self._next_hole_end = "high" if self._next_hole_end == "low" else "low"
        return torch.cat([taken, fresh]) if beyond else taken

    def _extend_span(self, num_pages: int) -> int | None:
        """Grow the span by ``num_pages`` in one piece, towards the wider gap if both fit; the first page, or None. From empty, the
        span starts in the middle of the region, so that both neighbours keep room."""
        low, high = self._region_bounds_pages()
        if self._is_frontier_transparent():
            if num_pages > high - low:
                return None
            first = low + (high - low - num_pages) // 2
            self.low_wm_page, self.high_wm_page = first, first + num_pages
            return first
        gap_low, gap_high = self.low_wm_page - low, high - self.high_wm_page
        prefers_high = gap_high >= gap_low
        if num_pages <= gap_high and (prefers_high or num_pages > gap_low):
            self.high_wm_page += num_pages
            return self.high_wm_page - num_pages
        if num_pages <= gap_low:
            self.low_wm_page -= num_pages
            return self.low_wm_page
        return None

    def _frees_in_order_given(self) -> bool:
        return True

    def _frees_move(self) -> bool:
        """A float's free moves nothing, so no gate can forbid it."""
        return False

    def _release_physical(self, physical_pages: torch.Tensor) -> None:
        self.holes.add(physical_pages)
        self._holes_dirty = True
        self._park_if_empty()

    def _park_if_empty(self) -> bool:
        """Lengths alone tell whether anything is live, so this asks the device nothing."""
        if self._live_pages():
            return False
        self.holes.clear()
        self._reset_watermarks()
        return True

    # -- giving back and moving

    def _flush(self, *, urgent: bool) -> int:
        """Give back border holes; returns pages given back. Interior holes are not a backlog here, and nothing moves."""
        return self._give_back_borders()

    def flush_opportunistic(self) -> int:
        return self._flush(urgent=False) if self._holes_dirty and self._hole_pages() else 0

    def _give_back_borders(self) -> int:
        """Shrink the span over holes at its borders. Reads the holes, so it is not done at every free; until it is, the span is
        merely wider than it needs to be."""
        if self._park_if_empty() or not self._holes_dirty or not self._hole_pages():
            self._holes_dirty = False
            return 0
        self._holes_dirty = False
        before = self._span_pages()
        holes: list[int] = self.holes.pages.tolist()
        interior = set(holes)
        while self.low_wm_page in interior:
            interior.remove(self.low_wm_page)
            self.low_wm_page += 1
        while self.high_wm_page - 1 in interior:
            interior.remove(self.high_wm_page - 1)
            self.high_wm_page -= 1
        if len(interior) != len(holes):
            self._set_holes(sorted(interior))
        return before - self._span_pages()

    def _set_holes(self, ascending: list[int]) -> None:
        self.holes.set_sorted(torch.tensor(ascending, dtype=torch.int64, device=self.device))

    def _live_on_host(self) -> tuple[list[int], set[int]]:
        """Live pages, ascending, and the holes: one read."""
        holes = set(self.holes.pages.tolist())
        return [page for page in range(self.low_wm_page, self.high_wm_page) if page not in holes], holes

    def make_room(self, *, side: Side, min_bytes: int) -> int:
        """Open at least ``min_bytes`` between the span's ``side`` border and the neighbour there, moving the fewest pages.

        Returns the bytes now open on that side; fewer than asked means that it cannot be done, or that a gate forbids moving, and
        then nothing has changed.
        """
        open_bytes = self._gap_bytes(side)
        if self.moves_blocked():
            return open_bytes
        self._settle_everything()
        if open_bytes >= min_bytes or self._is_frontier_transparent():
            return open_bytes
        low, high = self._region_bounds_pages()
        live_count = self._live_pages()
        if (high - low - live_count) * self.entry_bytes_per_page < min_bytes:
            return open_bytes
        needed = -(-(min_bytes - open_bytes) // self.entry_bytes_per_page)
        if needed >= live_count:
            self._shift_to(low if side == "high" else high - live_count)
            return self._gap_bytes(side)
        return self._gap_bytes(side) if self._leave_border(side, needed) else open_bytes

    def _leave_border(self, side: Side, count: int) -> bool:
        """Move the ``count`` live pages nearest to the ``side`` border, not all there are, to the other side of those that stay, and end
        the span at what is live then. False, and nothing has changed, if there is no room for them."""
        live, holes = self._live_on_host()
        src_list = live[: -count - 1 : -1] if side == "high" else live[:count]
        dst_list = self._places_beyond(src_list, holes, side)
        if dst_list is None:
            return False
        self._move(src_list, dst_list)
        final = sorted((set(live) - set(src_list)) | set(dst_list))
        self.low_wm_page, self.high_wm_page = final[0], final[-1] + 1
        occupied = set(final)
        self._set_holes([page for page in range(self.low_wm_page, self.high_wm_page) if page not in occupied])
        self._holes_dirty = False
        return True

    def _places_beyond(self, src_list: list[int], holes: set[int], side: Side) -> list[int] | None:
        """Where pages leaving the ``side`` border go: holes on the far side of all of them, farthest first, then beyond the far
        border. None if that is not enough."""
        if side == "high":
            nearest = min(src_list)
            places = sorted(page for page in holes if page < nearest)[: len(src_list)]
        else:
            nearest = max(src_list)
            places = sorted((page for page in holes if page > nearest), reverse=True)[: len(src_list)]
        fresh = len(src_list) - len(places)
        gap_low, gap_high = self._gap_pages()
        if fresh > (gap_low if side == "high" else gap_high):
            return None
        if side == "high":
            return places + list(range(self.low_wm_page - 1, self.low_wm_page - 1 - fresh, -1))
        return places + list(range(self.high_wm_page, self.high_wm_page + fresh))

    def compact_holes(self, *, retreat_side: Side) -> int:
        """Close all holes by packing towards the other side; the span ends sooner on ``retreat_side``. Returns pages moved."""
        if self.moves_blocked() or not self._hole_pages():
            return 0
        self._settle_everything()
        low, high = self._band_pages()
        return self._shift_to(low if retreat_side == "high" else high - self._live_pages())

    def _settle_everything(self) -> None:
        """Order this stream after whatever still reads or writes pages that may move now: the forward, and copies to the host."""
        self._forward.settle()
        self._forward.settle_transfers()

    def _shift_to(self, first: int) -> int:
        """Move the live pages in order to the block that starts at ``first``, below or above all of them or at one of their borders;
        returns pages moved."""
        live, _ = self._live_on_host()
        moved = 0
        for begin, end in self._shift_in_parts(live, first):
            self._move(live[begin:end], list(range(first + begin, first + end)))
            moved += end - begin
        self._end_span_at(first, len(live))
        return moved

    @staticmethod
    def _shift_in_parts(live: list[int], first: int) -> Iterator[tuple[int, int]]:
        """Which of ``live`` (pages, ascending) move when all of them shift to ``first``, ``first + 1``, ...: parts ``live[begin:end]``, one
        after the other, so that every place is vacated before it is filled, and within a part no place is also a source."""
        begin, end = 0, len(live)
        while begin < end and live[begin] == first + begin:
            begin += 1
        while begin < end and live[end - 1] == first + end - 1:
            end -= 1
        if begin < end and live[begin] > first + begin:
            while begin < end:
                stop = min(end, live[begin] - first)
                yield begin, stop
                begin = stop
        else:
            # A shift upwards starts at the top.
            while begin < end:
                start = max(begin, live[end - 1] - first + 1)
                yield start, end
                end = start

    def _end_span_at(self, first: int, live: int) -> None:
        """The span is ``live`` pages from ``first`` on, and none of them a hole."""
        if live:
            self.low_wm_page, self.high_wm_page = first, first + live
        else:
            self._reset_watermarks()
        self.holes.clear()

    def open_side_for(self, demand: Mapping[Band, int]) -> None:
        """Make room for a request that needs ``demand[pool]`` pages of each pool, this one possibly among them.

        A pool growing down ends at this float's high side, one growing up at its low side. The room asked for is the whole gap a
        pool needs, not what is missing, plus one page of slack for the grids not lining up.
        """
        wanted = {band: pages for band, pages in demand.items() if pages > 0}
        if not wanted or self._is_frontier_transparent():
            return
        if any(pages > band._index_room() for band, pages in wanted.items()):
            return  # no number of bytes gives a pool ids it does not have
        need: dict[Side, int] = {"low": 0, "high": 0}
        for band, pages in wanted.items():
            if band is not self:
                beyond_holes = max(0, pages - (len(band.holes) if band.lazy_compaction else 0))
                need["high" if band.grow_direction == "down" else "low"] += (
                    beyond_holes * band.entry_bytes_per_page
                )
        gap: dict[Side, int] = {
            "low": max(0, self._byte_low_frontier() - self._chain_high_frontier_below_bytes()),
            "high": max(0, self._chain_low_frontier_above_bytes() - self._byte_high_frontier()),
        }
        surplus = {side: gap[side] - need[side] for side in need}
        own = max(0, wanted.get(self, 0) - self._hole_pages()) * self.entry_bytes_per_page
        slack = max(band.entry_bytes_per_page for band in wanted)
        short: list[Side] = [side for side in need if surplus[side] < 0]
        if len(short) == 2:
            return  # opening one side closes the other
        if short:
            side, far = short[0], self._other(short[0])
            target = need[side] + max(0, own - max(0, surplus[far])) + slack
            if target > gap[side]:
                self.make_room(side=side, min_bytes=target)
        elif own > max(surplus.values()):
            side = "low" if surplus["low"] >= surplus["high"] else "high"
            self.make_room(side=side, min_bytes=need[side] + own + slack)

    @staticmethod
    def _other(side: Side) -> Literal["low", "high"]:
        return "high" if side == "low" else "low"
