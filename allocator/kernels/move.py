"""Moving pages: bytes of all layers and both tables, in one launch.

Page ``i`` of a pool is one run of bytes, so a page moves as one, all its layers at once, cut into chunks that programs take in turn. The
number of programs depends on lengths alone; how much they find to do is read from the device. So rows that are no move cost nothing but
their part of the tables' loop.

Sources and targets of one flush never overlap, so pages can be copied in any order and without a temporary: targets are holes when the
flush begins and sources are live pages, and no page is both; a page that a move vacates is never a target of the same flush.
"""

import triton
import triton.language as tl

#: Rows of the tables' loop that one program does at a time.
ROWS = 128
#: Words of a page that one program copies at a time: 16 KiB of 8-byte words.
MAX_CHUNK = 2048

# All but the buffer, for which what is known of its alignment makes accesses wide, and where it is the same at every flush.
_PLAIN = (
    "virtual_to_physical",
    "physical_to_virtual",
    "src_pages",
    "dst_pages",
    "moved",
    "num_moves",
    "ok",
    "rows",
)


def chunk_for(page_words: int) -> int:
    """Words of a page that one program copies at a time: a power of two, as large as a page or as chunks may be."""
    return min(int(triton.next_power_of_2(max(page_words, 1))), MAX_CHUNK)


def warps_for(chunk: int) -> int:
    """Warps of a program: not so many that a thread would get less than two words of a chunk, which it moves in one access."""
    return max(1, min(4, chunk // 64))


@triton.jit
def remap(
    virtual_to_physical, physical_to_virtual, src_pages, dst_pages, moved, moves, rows,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Point both tables at the new places of the first ``moves`` pages, unmap the old ones, and write the sources, 0 past them, to
    ``moved``. Each row is one program's, and no other row reads or writes what it does: sources, targets and owners are distinct."""
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        is_move = row < moves
        src = tl.load(src_pages + row, mask=(row < rows) & is_move, other=0)
        dst = tl.load(dst_pages + row, mask=(row < rows) & is_move, other=0)
        owner = tl.load(physical_to_virtual + src, mask=(row < rows) & is_move, other=-1)
        # Where there are fewer rows than threads, several threads load one row and one of them stores: all must have loaded by then.
        tl.debug_barrier()
        is_owned = owner >= 0
        tl.store(virtual_to_physical + owner, dst, mask=is_owned)
        tl.store(physical_to_virtual + dst, owner, mask=is_owned)
        tl.store(physical_to_virtual + src, tl.full([ROWS], -1, tl.int64), mask=is_owned)
        tl.store(moved + row, src, mask=row < rows)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def move_pages(
    words, virtual_to_physical, physical_to_virtual, src_pages, dst_pages, moved, num_moves, ok, rows,
    PAGE_WORDS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Move the first ``num_moves`` (int64 ``[]``) of ``rows`` pages, or none if not ``ok``.

    ``words`` is the buffer in words of a page, as wide as pages are aligned; ``PAGE_WORDS`` of them are a page, and programs copy ``CHUNK``
    at a time. ``PAGE_WORDS = 0`` leaves the bytes alone.
    """
    moves = tl.where(tl.load(ok) != 0, tl.minimum(tl.load(num_moves), rows), 0)
    remap(virtual_to_physical, physical_to_virtual, src_pages, dst_pages, moved, moves, rows, ROWS)
    if PAGE_WORDS > 0:
        CHUNKS: tl.constexpr = (PAGE_WORDS + CHUNK - 1) // CHUNK
        for item in range(tl.program_id(0), moves * CHUNKS, tl.num_programs(0)):
            row = item // CHUNKS
            src = tl.load(src_pages + row)
            dst = tl.load(dst_pages + row)
            word = (item % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
            # Pages are int64, so the offset of a word is too: buffers are larger than 2**31 bytes.
            values = tl.load(words + src * PAGE_WORDS + word, mask=word < PAGE_WORDS)
            tl.store(words + dst * PAGE_WORDS + word, values, mask=word < PAGE_WORDS)
