"""Plan of an urgent flush, in one launch where the window fits one block and in two otherwise.

Live pages of the window are numbered by a prefix sum in the order of places; page number ``k`` goes to hole number ``k`` from the far end
(`allocator.device_plan` says why these are the moves). Every program of the second launch adds up the blocks before its own from what the
first one counted, so no program waits for another.

Everything about pages is int64: page ids are loaded so, and places are made so before they meet one.
"""

import triton
import triton.language as tl

#: Places that one program looks at.
BLOCK = 1024
#: Blocks that are added up at a time.
SUMS = 1024
# Lengths, pages and where a tensor begins differ from flush to flush: kernels made for "divisible by 16" or "equal to 1" would be compiled
# one by one while an engine is serving.
_PLAIN = (
    "inverse", "holes", "num_holes", "mark", "extent", "window", "rows", "low", "high", "old_log", "call", "fault", "partial", "num_blocks",
    "src_pages", "dst_pages", "num_moves", "new_log", "new_ok",
)  # fmt: skip
_as_given = triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)


@triton.jit
def page_at(mark, place, GROWS_UP: tl.constexpr):
    if GROWS_UP:
        return mark - 1 - place
    else:
        return mark + 1 + place


@triton.jit
def on_device(number, IS_POINTER: tl.constexpr):
    """A number as int64, where it is and where the host gave it."""
    if IS_POINTER:
        return tl.load(number)
    else:
        return tl.cast(number, tl.int64)


@triton.jit
def live_pages(inverse, mark, extent, place, window, low, high, GROWS_UP: tl.constexpr):
    """The page at each place and whether it is live."""
    page = page_at(mark, place, GROWS_UP)
    inside = (place < window) & (place < extent) & (page >= low) & (page < high)
    owner = tl.load(inverse + page, mask=inside, other=-1)
    return page, (owner >= 0).to(tl.int64)


@triton.jit
def holes_beyond(holes, num_holes, mark, extent, number, GROWS_UP: tl.constexpr):
    """How many of these holes lie beyond the window. Padding rows lie on the other side of the watermark."""
    hole = tl.load(holes + number, mask=number < num_holes, other=mark)
    if GROWS_UP:
        place = (mark - 1) - hole
    else:
        place = hole - (mark + 1)
    return tl.sum((place >= extent).to(tl.int64), 0)


@triton.jit
def match(
    holes, num_holes, page, is_live, rank, place, moves, rows, src_pages, dst_pages, GROWS_UP: tl.constexpr
):
    """Write the moves of one block, ``rank`` being how many live pages lie before each, and 0 -> 0 to its rows that are none."""
    is_move = (is_live > 0) & (rank < rows) & (rank < num_holes)
    if GROWS_UP:
        at = rank
    else:
        at = num_holes - 1 - rank
    hole = tl.load(holes + at, mask=is_move, other=0)
    tl.store(src_pages + rank, page, mask=is_move)
    tl.store(dst_pages + rank, hole, mask=is_move)
    is_none = (place < rows) & (place >= moves)
    tl.store(src_pages + place, tl.zeros_like(page), mask=is_none)
    tl.store(dst_pages + place, tl.zeros_like(page), mask=is_none)


@triton.jit
def conclude(live, beyond, old_log, call, fault, num_moves, new_log, new_ok):
    """Number of moves, and the error log after this flush: (fault, call, -1, -1) if the holes contradict the table, as it was otherwise."""
    tl.store(num_moves, live)
    column = tl.arange(0, 4)
    entry = tl.load(old_log + column)
    was_ok = tl.load(old_log) == 0
    is_wrong = live != beyond
    happened = tl.where(column == 0, fault, tl.where(column == 1, call, -1)).to(tl.int64)
    tl.store(new_log + column, tl.where(was_ok & is_wrong, happened, entry))
    tl.store(new_ok, (was_ok & (live == beyond)).to(tl.uint8))


@_as_given
def plan_one_block(
    inverse, holes, num_holes, mark, extent, window, rows, low, high, old_log, call, fault,
    src_pages, dst_pages, num_moves, new_log, new_ok,
    GROWS_UP: tl.constexpr, MARK_ON_DEVICE: tl.constexpr, EXTENT_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole plan, by one program; ``window <= BLOCK``."""
    mark = on_device(mark, MARK_ON_DEVICE)
    extent = on_device(extent, EXTENT_ON_DEVICE)
    place = tl.arange(0, BLOCK).to(tl.int64)
    page, is_live = live_pages(inverse, mark, extent, place, window, low, high, GROWS_UP)
    live = tl.sum(is_live, 0)
    rank = tl.cumsum(is_live, 0) - is_live
    match(holes, num_holes, page, is_live, rank, place, live, rows, src_pages, dst_pages, GROWS_UP)
    beyond = tl.zeros((), tl.int64)
    for start in range(0, num_holes, BLOCK):
        beyond += holes_beyond(holes, num_holes, mark, extent, start + place, GROWS_UP)
    conclude(live, beyond, old_log, call, fault, num_moves, new_log, new_ok)


@_as_given
def count_blocks(
    inverse, holes, num_holes, mark, extent, window, low, high, partial, num_blocks,
    GROWS_UP: tl.constexpr, MARK_ON_DEVICE: tl.constexpr, EXTENT_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First of two launches: live places and holes beyond the window, block by block, into ``partial`` (int64 ``[2 * num_blocks]``)."""
    mark = on_device(mark, MARK_ON_DEVICE)
    extent = on_device(extent, EXTENT_ON_DEVICE)
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, is_live = live_pages(inverse, mark, extent, place, window, low, high, GROWS_UP)
    tl.store(partial + block, tl.sum(is_live, 0))
    tl.store(partial + num_blocks + block, holes_beyond(holes, num_holes, mark, extent, place, GROWS_UP))


@_as_given
def match_blocks(
    inverse, holes, num_holes, mark, extent, window, rows, low, high, old_log, call, fault, partial, num_blocks,
    src_pages, dst_pages, num_moves, new_log, new_ok,
    GROWS_UP: tl.constexpr, MARK_ON_DEVICE: tl.constexpr, EXTENT_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Second of two launches: the moves."""
    mark = on_device(mark, MARK_ON_DEVICE)
    extent = on_device(extent, EXTENT_ON_DEVICE)
    block = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    live = tl.zeros((), tl.int64)
    beyond = tl.zeros((), tl.int64)
    for start in range(0, num_blocks, SUMS):
        other = start + tl.arange(0, SUMS)
        counted = tl.load(partial + other, mask=other < num_blocks, other=0)
        live += tl.sum(counted, 0)
        before += tl.sum(tl.where(other < block, counted, 0), 0)
        beyond += tl.sum(tl.load(partial + num_blocks + other, mask=other < num_blocks, other=0), 0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page, is_live = live_pages(inverse, mark, extent, place, window, low, high, GROWS_UP)
    rank = before + tl.cumsum(is_live, 0) - is_live
    match(holes, num_holes, page, is_live, rank, place, live, rows, src_pages, dst_pages, GROWS_UP)
    if block == 0:
        conclude(live, beyond, old_log, call, fault, num_moves, new_log, new_ok)
