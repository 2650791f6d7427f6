"""Plan of a flush that is not urgent, in one launch where the window fits one block and in three otherwise.

Live page number ``k`` of the window, nearest the watermark first, goes to hole number ``k`` from the far end as long as the page lies
before both that hole and what the running forward will write (`allocator.device_plan` says why). Whether it does depends on nothing but
``k``, so every place decides for itself. The moves are the first of the live pages, hence how many of them there are says what is left of
the holes: every row of the list afterwards is written once, by the row or by the page that comes to be there, and what is written is not
read again in the same launch. Of three launches each adds up what the ones before it have counted block by block, so no program waits for
another.

Everything about pages is int64, and every hole that is loaded is one of the list, whatever the numbers on the device are: in a frozen pool
they may be anything.
"""

import triton
import triton.language as tl

from allocator.kernels.plan import live_pages

# As in `allocator.kernels.plan`: lengths and where a tensor begins differ from flush to flush.
_PLAIN = (
    "inverse", "holes", "num_holes", "count", "mark", "window", "rows", "low", "high",
    "physical", "num_virtual_pages", "written", "num_written", "is_void", "page_size",
    "partial", "num_blocks", "src_pages", "dst_pages", "left_holes", "numbers",
)  # fmt: skip
_as_given = triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)


@triton.jit
def place_of(page, mark, GROWS_UP: tl.constexpr):
    if GROWS_UP:
        return mark - 1 - page
    else:
        return page - mark - 1


@triton.jit
def hole_at(holes, num_holes, count, number, DESCENDING: tl.constexpr):
    """Hole ``number`` of ``count`` in ascending or descending order; any row of the list where there are not that many."""
    if DESCENDING:
        at = count - 1 - number
    else:
        at = number
    return tl.load(holes + tl.minimum(tl.maximum(at, 0), num_holes - 1))


@triton.jit
def count_touching(holes, num_holes, count, mark, number, GROWS_UP: tl.constexpr):
    """How many of these holes, numbered from the watermark, are where they would be if all touched it: those that do."""
    place = place_of(hole_at(holes, num_holes, count, number, GROWS_UP), mark, GROWS_UP)
    return tl.sum(((number < num_holes) & (number < count) & (place == number)).to(tl.int64), 0)


@triton.jit
def first_written(
    physical, num_virtual_pages, written, num_written, is_void, page_size, mark, window, first, step,
    GROWS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first place of the window that is among the pages of these tokens, else the window's size; int64. Looks at ``BLOCK`` tokens from
    ``first`` on, and again ``step`` further, until there are no more."""
    nowhere = tl.cast(window, tl.int64)
    blocked = nowhere
    # No ids if they are void: the loop is over before it begins.
    end = tl.where(tl.load(is_void) != 0, 0, num_written)
    for start in range(first, end, step):
        number = start + tl.arange(0, BLOCK)
        token = tl.load(written + number, mask=number < end, other=-1)
        # Division rounds towards zero here; ids below it name no page anyway.
        virtual_page = tl.maximum(token, 0) // page_size
        is_named = (token >= 0) & (virtual_page < num_virtual_pages)
        place = place_of(tl.load(physical + virtual_page, mask=is_named, other=-1), mark, GROWS_UP)
        if GROWS_UP:
            is_in_band = number < end
        else:
            is_in_band = (number < end) & (place >= 0)
        blocked = tl.minimum(blocked, tl.min(tl.where(is_in_band, place, nowhere), 0))
    return blocked


@triton.jit
def match_in_part(
    holes, num_holes, count, mark, blocked, page, is_live, rank, place, rows, src_pages, dst_pages,
    GROWS_UP: tl.constexpr,
):  # fmt: skip
    """Write the moves of one block, ``rank`` being how many live pages lie before each; which places move."""
    hole = hole_at(holes, num_holes, count, rank, not GROWS_UP)
    limit = tl.minimum(place_of(hole, mark, GROWS_UP), blocked)
    is_move = (is_live > 0) & (rank < rows) & (rank < count) & (place < limit)
    tl.store(src_pages + rank, page, mask=is_move)
    tl.store(dst_pages + rank, hole, mask=is_move)
    return is_move


@triton.jit
def unfilled_hole(holes, num_holes, row, unfilled, touching, moves, GROWS_UP: tl.constexpr):
    """What is in this row of the list afterwards if it is below ``unfilled``, else 0. Of the ascending holes the farthest are filled and
    the nearest given back: the first and the last, or the last and the first."""
    if GROWS_UP:
        at = row + moves
    else:
        at = row + touching
    return tl.load(holes + at, mask=(row < unfilled) & (at >= 0) & (at < num_holes), other=0)


@triton.jit
def conclude_in_part(count, mark, touching, moves, numbers, GROWS_UP: tl.constexpr):
    """Moves, touching holes, holes without and with the vacated pages, and the watermark afterwards: int64 ``[5]``."""
    tl.store(numbers, moves)
    tl.store(numbers + 1, touching)
    tl.store(numbers + 2, count - touching - moves)
    tl.store(numbers + 3, count - touching)
    if GROWS_UP:
        tl.store(numbers + 4, mark - touching)
    else:
        tl.store(numbers + 4, mark + touching)


@_as_given
def plan_part_one_block(
    inverse, holes, num_holes, count, mark, window, rows, low, high,
    physical, num_virtual_pages, written, num_written, is_void, page_size,
    src_pages, dst_pages, left_holes, numbers,
    GROWS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole plan, by one program; ``window <= BLOCK``. There are no more holes than that, though the list may be longer."""
    count = tl.load(count)
    mark = tl.load(mark)
    place = tl.arange(0, BLOCK).to(tl.int64)
    blocked = first_written(
        physical, num_virtual_pages, written, num_written, is_void, page_size, mark, window, 0, BLOCK,
        GROWS_UP, BLOCK,
    )  # fmt: skip
    page, is_live = live_pages(inverse, mark, window, place, window, low, high, GROWS_UP)
    rank = tl.cumsum(is_live, 0) - is_live
    is_move = match_in_part(
        holes, num_holes, count, mark, blocked, page, is_live, rank, place, rows, src_pages, dst_pages, GROWS_UP
    )  # fmt: skip
    moves = tl.sum(is_move.to(tl.int64), 0)
    touching = count_touching(holes, num_holes, count, mark, place, GROWS_UP)
    unfilled = count - touching - moves
    for start in range(0, num_holes, BLOCK):
        row = start + place
        is_vacated = (row >= unfilled) & (row < unfilled + moves)
        hole = unfilled_hole(holes, num_holes, row, unfilled, touching, moves, GROWS_UP)
        tl.store(left_holes + row, hole, mask=(row < num_holes) & (is_vacated == 0))
    at = unfilled + rank
    tl.store(left_holes + at, page, mask=is_move & (at >= 0) & (at < num_holes))
    conclude_in_part(count, mark, touching, moves, numbers, GROWS_UP)


@_as_given
def count_part_blocks(
    inverse, holes, num_holes, count, mark, window, low, high,
    physical, num_virtual_pages, written, num_written, is_void, page_size, partial, num_blocks,
    GROWS_UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """First of three launches: block by block live places, touching holes and the first place of a written page, into the first three parts
    of ``partial`` (int64 ``[4 * num_blocks]``)."""
    count = tl.load(count)
    mark = tl.load(mark)
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, is_live = live_pages(inverse, mark, window, place, window, low, high, GROWS_UP)
    tl.store(partial + block, tl.sum(is_live, 0))
    touching = count_touching(holes, num_holes, count, mark, place, GROWS_UP)
    tl.store(partial + num_blocks + block, touching)
    blocked = first_written(
        physical, num_virtual_pages, written, num_written, is_void, page_size, mark, window,
        block * BLOCK, num_blocks * BLOCK, GROWS_UP, BLOCK,
    )  # fmt: skip
    tl.store(partial + 2 * num_blocks + block, blocked)


@_as_given
def match_part_blocks(
    inverse, holes, num_holes, count, mark, window, rows, low, high, partial, num_blocks, src_pages, dst_pages,
    GROWS_UP: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Second of three launches: the moves, and how many they are in each block, into the last part of ``partial``."""
    count = tl.load(count)
    mark = tl.load(mark)
    block = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    blocked = tl.cast(window, tl.int64)
    for start in range(0, num_blocks, SUMS):
        other = start + tl.arange(0, SUMS)
        before += tl.sum(tl.load(partial + other, mask=other < block, other=0), 0)
        places = tl.load(partial + 2 * num_blocks + other, mask=other < num_blocks, other=window)
        blocked = tl.minimum(blocked, tl.min(places, 0))
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page, is_live = live_pages(inverse, mark, window, place, window, low, high, GROWS_UP)
    rank = before + tl.cumsum(is_live, 0) - is_live
    is_move = match_in_part(
        holes, num_holes, count, mark, blocked, page, is_live, rank, place, rows, src_pages, dst_pages, GROWS_UP
    )  # fmt: skip
    tl.store(partial + 3 * num_blocks + block, tl.sum(is_move.to(tl.int64), 0))


@_as_given
def list_part_blocks(
    holes, num_holes, count, mark, partial, num_blocks, src_pages, left_holes, numbers,
    GROWS_UP: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Third of three launches: the list of holes afterwards, and the numbers."""
    count = tl.load(count)
    mark = tl.load(mark)
    block = tl.program_id(0)
    touching = tl.zeros((), tl.int64)
    moves = tl.zeros((), tl.int64)
    for start in range(0, num_blocks, SUMS):
        other = start + tl.arange(0, SUMS)
        touching += tl.sum(tl.load(partial + num_blocks + other, mask=other < num_blocks, other=0), 0)
        moves += tl.sum(tl.load(partial + 3 * num_blocks + other, mask=other < num_blocks, other=0), 0)
    unfilled = count - touching - moves
    row = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hole = unfilled_hole(holes, num_holes, row, unfilled, touching, moves, GROWS_UP)
    is_vacated = (row >= unfilled) & (row < unfilled + moves)
    vacated = tl.load(src_pages + (row - unfilled), mask=is_vacated, other=0)
    tl.store(left_holes + row, tl.where(is_vacated, vacated, hole), mask=row < num_holes)
    if block == 0:
        conclude_in_part(count, mark, touching, moves, numbers, GROWS_UP)
