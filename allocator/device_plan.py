"""Which page moves where, worked out on the device: tensors in, tensors out, nothing read.

The rule is that of `allocator.plan`, which walks over pages one by one. Why both give the same moves:

Number the band's pages from the frontier: place ``x = 0`` is next to the watermark. Let ``s_0 < s_1 < ...`` be the places of live pages
and ``d_0 > d_1 > ...`` those of holes, farthest first. The walk sends ``s_j`` to ``d_j`` until the cursors meet, so move ``j`` happens
exactly if ``s_j < d_j`` (and no page before or at it is blocked, and ``j`` is below the cap); as ``s`` rises and ``d`` falls, the moves
are the first ``m`` of them, ``m`` being how many ``j`` satisfy that. Two facts keep this cheap:

- *Only a window is looked at.* If ``s_j < d_j``, then all ``j + 1`` holes filled so far lie beyond ``s_j``, so at most ``H - j - 1`` holes
  and ``P`` pending pages lie before it beside ``j`` live ones: ``s_j < H + P``. The window has ``H + P`` places, whatever the pool's size.
- *Holes need no search.* Sorted, hole number ``i`` from the frontier touches it exactly if its place is ``i``; and once a place is
  greater than its number, so are all after it. The boundary holes are as many as satisfy the equation.

An urgent pass has no pending pages and no blocks. Its window has ``H`` places, ``k`` of them live, hence ``k`` holes lie beyond it, and
``s_j < H <= d_j`` for the first ``k`` and no more: ``m = k``, and afterwards the whole window is vacant. So the watermark retreats by
``H``, a length, before anybody knows ``m``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sources:
    """``rank[x]``: how many of the first ``x + 1`` places of a window are live, int64 ``[window]``."""

    rank: torch.Tensor

    @property
    def count(self) -> torch.Tensor:
        """All live places: int64 ``[]``."""
        return self.rank[-1]

    def places(self, ordinals: torch.Tensor) -> torch.Tensor:
        """Place of the first, second, ... live page for ``ordinals`` 1, 2, ...; the window's size where there are not that many."""
        return torch.searchsorted(self.rank, ordinals)


def live_places(owners: torch.Tensor) -> Sources:
    """Live places of a window, given ``physical_to_virtual`` of its pages in the order of places: int64 ``[window]``, not empty."""
    return Sources(torch.cumsum(owners >= 0, 0))


def descending_by_rank(pages: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """``pages`` (int64 ``[n]``, each once, all in ``[low, high)``) descending: each goes where the number of higher ones sends it.

    It takes time in proportion to ``n`` and to ``high - low``, and no comparison of pages that a processor would have to guess.
    """
    from_the_top = (high - 1) - pages
    rank = pages.new_zeros(high - low).scatter_(0, from_the_top, 1).cumsum_(0).index_select(0, from_the_top)
    return pages.new_zeros(pages.shape[0] + 1).scatter_(0, rank, pages)[1:]


def selected(pages: torch.Tensor, is_wanted: torch.Tensor, count: int) -> torch.Tensor:
    """Those of ``pages`` (int64 ``[n]``) that are wanted (bool ``[n]``), in their order; int64 ``[count]``, as many as there are. Every
    page writes itself to the row that its rank says, those that are not wanted to one row that is dropped."""
    rows = torch.cumsum(is_wanted, 0).mul_(is_wanted)
    return pages.new_zeros(count + 1).scatter_(0, rows, pages)[1:]


def count_moves(
    sources: torch.Tensor, targets: torch.Tensor, blocked_from: torch.Tensor | int
) -> torch.Tensor:
    """How many of the pairs are moves, int64 ``[]``.

    Args:
        sources: places of the first live pages, ascending, int64 ``[n]``; the window's size where there is none.
        targets: places of the farthest holes, descending, int64 ``[n]``.
        blocked_from: the first place that may not move, at most the window's size; int64 ``[]`` or a number.
    """
    if isinstance(blocked_from, int):
        limit = targets.clamp(max=blocked_from)
    else:
        limit = torch.minimum(targets, blocked_from)
    return torch.count_nonzero(sources < limit)


def first_blocked(
    physical_pages: torch.Tensor, watermark: int | torch.Tensor, grows_up: bool, window: int
) -> torch.Tensor:
    """The first place of the window that is among ``physical_pages`` (int64 ``[n]``, -1 for none), else the window's size; int64 ``[]``.

    What lies beyond the watermark is not in the band: an id that was freed since has page -1, and for a pool that grows down the place
    of -1 is negative, for one that grows up it is past any page of the band.
    """
    if grows_up:
        places = (watermark - 1) - physical_pages
    else:
        places = physical_pages - (watermark + 1)
        places = torch.where(places < 0, window, places)
    return places.amin().clamp(max=window)


def window_pages(
    numbers: torch.Tensor, watermark: torch.Tensor, *, grows_up: bool, low: int, high: int
) -> torch.Tensor:
    """Pages next to the watermark in the order of places, -1 for those outside ``[low, high)``; int64 ``[window]``.

    Args:
        numbers: 0, 1, 2, ..., one for each place of the window.
        watermark: int64 ``[]``.
        low, high: where the pool's pages begin and end.
    """
    if grows_up:
        pages = (watermark - 1) - numbers
        return torch.where(pages < low, -1, pages)
    pages = numbers + (watermark + 1)
    return torch.where(pages >= high, -1, pages)


def unfilled_and_vacated(
    ascending: torch.Tensor,
    count: torch.Tensor,
    vacated: torch.Tensor,
    numbers: torch.Tensor,
    *,
    touching: torch.Tensor,
    moves: torch.Tensor,
    grows_up: bool,
) -> torch.Tensor:
    """The hole list after a flush: holes that are left, ascending, then the pages vacated by moves; int64 ``[len(ascending)]``, of which
    the first ``count - touching`` are valid, or without the vacated ones the first ``count - touching - moves``.

    Args:
        ascending: the holes before, the first ``count`` valid.
        vacated: sources of the moves, in their order, the first ``moves`` valid.
    """
    capacity = ascending.shape[0]
    row = numbers[:capacity]
    left = count - touching - moves
    at = torch.where(row < left, row + (moves if grows_up else touching), row + (capacity - left))
    both = torch.cat([ascending, vacated])
    return both[at.clamp(0, both.shape[0] - 1)]
