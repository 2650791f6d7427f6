"""`TritonFlush`: `TorchFlush` in Triton kernels. A flush is two launches; where its window has more than `plan.BLOCK` places, an urgent one
is three and any other four."""

from __future__ import annotations

from typing import Any

import torch

from allocator.error_log import Fault
from allocator.errors import ConfigurationError
from allocator.flush_ops import Holes, PackPlan, PartPlan, TorchFlush, Window
from allocator.kernels import move, part_plan, plan
from allocator.kv_store import UnifiedPagePool

#: Programs of a move for each multiprocessor: several, so that some copy while others wait for memory.
PROGRAMS_PER_PROCESSOR = 8
#: Programs of a move in the interpreter, which runs them one after the other.
INTERPRETED_PROGRAMS = 2


class TritonFlush(TorchFlush):
    """Plan and move for one pool, in kernels. Takes the arguments of `TorchFlush`.

    Bytes of a `UnifiedPagePool` are moved by the kernel; anything else given as ``kvcache`` moves its own, as it would without kernels.

    Everything is launched from lengths, so that with the watermark and the number of holes on the device `pack` can be captured in a CUDA
    graph and replayed.
    """

    #: Places one program of the plan looks at (a power of two).
    block = plan.BLOCK

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        device = self._tables.physical_to_virtual.device
        self._most_programs = INTERPRETED_PROGRAMS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._most_programs = processors * PROGRAMS_PER_PROCESSOR
        self._words = _words_of(self._kvcache)
        self._chunk = move.chunk_for(0 if self._words is None else self._words.shape[1])
        #: False, where a kernel wants to be told something that nobody doubts.
        self._never = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def window_sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return 1, self.block + 1

    def plan(self, window: Window, ascending: torch.Tensor, rows: int) -> PackPlan:
        inverse, holes = self._tables.physical_to_virtual, ascending.shape[0]
        num_blocks = -(-max(window.size, holes) // self.block)
        is_one_block = window.size <= self.block
        made = torch.empty(2 * rows + 5 + 2 * num_blocks, dtype=torch.int64, device=inverse.device)
        src_pages, dst_pages = made[:rows], made[rows : 2 * rows]
        moves, log, partial = made[2 * rows], made[2 * rows + 1 : 2 * rows + 5], made[2 * rows + 5 :]
        ok = torch.empty((), dtype=torch.bool, device=inverse.device)
        where = {
            "mark": window.mark,
            "extent": window.size if window.extent is None else window.extent,
            "window": window.size,
            "low": window.low,
            "high": window.high,
            "GROWS_UP": window.grows_up,
            "MARK_ON_DEVICE": not isinstance(window.mark, int),
            "EXTENT_ON_DEVICE": window.extent is not None,
            "BLOCK": self.block,
        }
        given = {"inverse": inverse, "holes": ascending, "num_holes": holes}
        outcome = {
            "old_log": self._errors.log,
            "call": self._errors.calls,
            "fault": self._errors.code(Fault.CONTRADICTION),
            "rows": rows,
            "src_pages": src_pages,
            "dst_pages": dst_pages,
            "num_moves": moves,
            "new_log": log,
            "new_ok": ok.view(torch.uint8),
        }
        if is_one_block:
            plan.plan_one_block[(1,)](**given, **where, **outcome)
        else:
            blocks = {"partial": partial, "num_blocks": num_blocks}
            plan.count_blocks[(num_blocks,)](**given, **where, **blocks)
            plan.match_blocks[(num_blocks,)](**given, **where, **blocks, **outcome, SUMS=plan.SUMS)
        return PackPlan(src_pages, dst_pages, moves, log=log, ok=ok)

    def plan_in_part(
        self,
        window: Window,
        holes: Holes,
        rows: int,
        written: torch.Tensor | None = None,
        is_void: torch.Tensor | None = None,
    ) -> PartPlan:
        assert isinstance(window.mark, torch.Tensor) and window.extent is None
        inverse, num_holes = self._tables.physical_to_virtual, holes.ascending.shape[0]
        num_blocks = -(-max(window.size, num_holes) // self.block)
        made = torch.empty(
            2 * rows + num_holes + 5 + 4 * num_blocks, dtype=torch.int64, device=inverse.device
        )
        src_pages, dst_pages, left, numbers, partial = made.split([rows, rows, num_holes, 5, 4 * num_blocks])
        # Without ids, any tensor that there is.
        tokens = inverse if written is None else written.to(torch.int64).contiguous()
        where = {"mark": window.mark, "GROWS_UP": window.grows_up, "BLOCK": self.block}
        given = {"holes": holes.ascending, "num_holes": num_holes, "count": holes.count}
        band = {"inverse": inverse, "window": window.size, "low": window.low, "high": window.high}
        forward = {
            "physical": self._tables.virtual_to_physical,
            "num_virtual_pages": self._tables.num_virtual_ids,
            "written": tokens,
            "num_written": 0 if written is None else tokens.numel(),
            "is_void": (self._never if is_void is None else is_void).view(torch.uint8),
            "page_size": self._page_size,
        }
        moves = {"rows": rows, "src_pages": src_pages, "dst_pages": dst_pages}
        after = {"left_holes": left, "numbers": numbers}
        if window.size <= self.block:
            part_plan.plan_part_one_block[(1,)](**given, **where, **band, **forward, **moves, **after)
        else:
            blocks = {"partial": partial, "num_blocks": num_blocks}
            sums = {"SUMS": plan.SUMS}
            grid = (num_blocks,)
            part_plan.count_part_blocks[grid](**given, **where, **band, **forward, **blocks)
            part_plan.match_part_blocks[grid](**given, **where, **band, **blocks, **moves, **sums)
            part_plan.list_part_blocks[grid](**given, **where, **blocks, src_pages=src_pages, **after, **sums)
        num_moves, touching, unfilled, free, mark = numbers.unbind()
        return PartPlan(src_pages, dst_pages, num_moves, touching, left, unfilled, free, mark)

    def move(self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor) -> torch.Tensor:
        if self._words is None:
            src_pages, dst_pages = self._first(moves, src_pages, dst_pages)
            self._kvcache.move_physical_pages(dst_pages, src_pages, self._page_size)
        return self._move(moves, src_pages, dst_pages, self._errors.ok)

    def pack(self, window: Window, ascending: torch.Tensor, rows: int) -> PackPlan:
        """`plan` and `move` in one go: kernel launches and nothing else, so that a CUDA graph can hold them. What the graph is replayed on
        is in the same tensors: the tables, the bytes, ``ascending`` and, as tensors, the window's ``mark`` and ``extent``; the plan that
        is returned has the outcome. Number of moves and log are left where they are: nobody is told.

        Raises:
            ConfigurationError: the kvcache moves its own bytes.
        """
        if self._words is None:
            raise ConfigurationError("a kvcache that moves its own bytes is not part of kernel launches")
        plan = self.plan(window, ascending, rows)
        assert plan.ok is not None
        self._move(plan.moves, plan.src_pages, plan.dst_pages, plan.ok)
        return plan

    def _move(
        self, moves: torch.Tensor, src_pages: torch.Tensor, dst_pages: torch.Tensor, ok: torch.Tensor
    ) -> torch.Tensor:
        rows = src_pages.shape[0]
        moved = torch.empty_like(src_pages)
        if not rows:
            return moved
        page_words = 0 if self._words is None else self._words.shape[1]
        items = max(-(-rows // move.ROWS), rows * -(-page_words // self._chunk))
        move.move_pages[(min(items, self._most_programs),)](
            words=moved if self._words is None else self._words,
            virtual_to_physical=self._tables.virtual_to_physical,
            physical_to_virtual=self._tables.physical_to_virtual,
            src_pages=src_pages,
            dst_pages=dst_pages,
            moved=moved,
            num_moves=moves,
            ok=ok.view(torch.uint8),
            rows=rows,
            PAGE_WORDS=page_words,
            CHUNK=self._chunk,
            ROWS=move.ROWS,
            num_warps=move.warps_for(self._chunk),
        )
        return moved


def _words_of(kvcache: Any) -> torch.Tensor | None:
    """The buffer in the widest words that pages are whole numbers of, ``[num_pages, words in a page]``, up to 8 bytes (a thread takes two
    of them at once where pages are aligned to 16); None if pages are not known to be runs of bytes."""
    mover = getattr(kvcache.move_physical_pages, "__func__", None)
    if not isinstance(kvcache, UnifiedPagePool) or mover is not UnifiedPagePool.move_physical_pages:
        return None
    pages = kvcache.raw_pages
    for word in (torch.int64, torch.int32, torch.int16):
        if pages.shape[1] % word.itemsize == 0 and pages.data_ptr() % word.itemsize == 0:
            return pages.view(word)
    return pages
