"""Frees of a full pool and a window pool that share virtual ids: both sides, one of them, one by one and in groups."""

from __future__ import annotations

import torch

from allocator.composites.free_group import PairedFreeGroup
from allocator.composites.members import Composite
from allocator.end import MultiEndedAllocator
from allocator.errors import (
    BindError,
    FreeGroupError,
    NotAllocatedError,
    PageAlignmentError,
    StillPairedError,
    require,
)


class WindowFrees(Composite):
    """The release half of `allocator.composites.paired.UnifiedSWAAllocatorBase`.

    On a CPU a wrong call is refused before any pool has changed, in a group when it is queued or when the group closes. Elsewhere the pools
    find it themselves (`allocator.errors`, `allocator.error_log`).

    Where SGLang 0.5.23 does otherwise:

    - the window page that goes with an id is the one it has when the free is queued, not when the group closes (#36135, #36381, #36646);
    - a segment free of pages without a window page is refused; SGLang's puts -1 on the list of free places (#38519);
    - so are ids that are none, which SGLang's passes over or frees (#38836), and the same page twice in a group;
    - `free_full` of a page whose window page is live is refused: SGLang's leaves that place without an owner.
    """

    swa_attn_allocator: MultiEndedAllocator
    _group: PairedFreeGroup | None

    # -- groups

    @property
    def free_group(self) -> PairedFreeGroup | None:
        """What the open group holds back, None if no group is open."""
        return self._group

    def free_group_begin(self) -> None:
        """Hold frees of the full side back until `free_group_end`.

        Raises:
            FreeGroupError: a group is open already (sgl-project/sglang#36739).
        """
        if self._group is not None:
            raise FreeGroupError("a free group is open already; free groups do not nest")
        self._group = PairedFreeGroup(
            self.page_size, self.full_attn_allocator.num_virtual_ids, self.full_attn_allocator.device
        )

    def free_group_end(self) -> None:
        """Free what was queued. Without an open group nothing happens, as in SGLang: nothing is freed a second time.

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing of the group was freed; the group is closed.
        """
        group, self._group = self._group, None
        if not group:
            return
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        # Tokens, and of which of them the window side goes too (None: of all).
        tokens, segments = (
            [(group.tokens(queued), group.claimed(queued, self._is_paired))] if queued else []
            for queued in (group.both, group.both_segments)
        )
        full_segments = [*(each for each, _ in segments), *group.full_segments]
        self._require_freeable(full, [*(each for each, _ in tokens), *group.full_only], full_segments)
        self._require_window_freeable(tokens, segments)
        for each, claimed in tokens:
            self._free_tokens(each, claimed)
        if group.full_only:
            full.free(torch.cat(group.full_only))
        for each, claimed in segments:
            if claimed is None:
                self._free_window_representatives(each)
            else:
                swa.free_named(each, claimed, in_order=True)
        if full_segments:
            self._free_full_representatives(torch.cat(full_segments))

    def flush_deferred_full_frees(self) -> None:
        """Free what was queued and go on with an empty group."""
        if self._group:
            self.free_group_end()
            self.free_group_begin()

    # -- both sides

    def free(self, free_index: torch.Tensor | None) -> None:
        """Free the pages of these virtual token ids (int ``[n]``; any subset of a page's tokens frees it once), and the window pages of
        those that have one.

        Raises:
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        tokens = free_index.detach().to(torch.int64)
        is_paired = self._is_paired(tokens)
        if self._group is not None:
            self._require_freeable(self.full_attn_allocator, [tokens], [])
            self._group.queue(tokens.clone(), is_paired)
            return
        self._require_freeable(self.full_attn_allocator, [tokens], [])
        self._free_tokens(tokens, is_paired)

    def free_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """Free consecutive tokens of one request from position ``start_pos`` on, a page border, all of whose pages have a window page.

        Raises:
            PageAlignmentError: no page border.
            NotAllocatedError, DuplicateFreeError: a page that is not live on one of the sides; nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        representatives = self._representatives(free_index, start_pos)
        self._require_freeable(self.swa_attn_allocator, [], [representatives])
        self._require_freeable(self.full_attn_allocator, [], [representatives])
        if self._group is not None:
            self._group.queue_segment(representatives.clone())
        else:
            self._free_window_representatives(representatives)
            self._free_full_representatives(representatives)

    # -- the window side

    def free_swa(self, free_index: torch.Tensor | None) -> None:
        """Free the window pages of these ids, as far as they have one. The ids and their full pages stay. At once, in a group too.

        Raises:
            NotAllocatedError: an id that is none; nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        tokens = free_index.detach().to(torch.int64)
        self._require_ids(tokens)
        is_paired = self._is_paired(tokens)
        # At page size 1 a token is its page, and nothing has to be sorted.
        self.swa_attn_allocator.free_named(tokens, is_paired, in_order=self.page_size == 1)
        self._note_released(tokens, is_paired)

    def free_swa_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """`free_swa` of consecutive tokens of one request from a page border on, all of whose pages have a window page; asks the device
        nothing.

        Raises:
            PageAlignmentError: no page border.
            NotAllocatedError: a page without a window page; nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        representatives = self._representatives(free_index, start_pos)
        self._free_window_representatives(representatives)
        self._note_released(representatives)

    # -- the full side

    def free_full(self, free_index: torch.Tensor | None) -> None:
        """Free the full pages, and the ids, of tokens whose window pages are free already.

        Raises:
            StillPairedError: they are not; nothing was freed.
            NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        tokens = free_index.detach().to(torch.int64)
        self._require_unpaired(tokens)
        if self._group is not None:
            self._require_freeable(self.full_attn_allocator, [tokens], [])
            self._group.full_only.append(tokens.clone())
        else:
            self.full_attn_allocator.free(tokens)

    def free_full_segment(self, free_index: torch.Tensor | None, *, start_pos: int) -> None:
        """`free_full` of consecutive tokens of one request from a page border on.

        Raises:
            PageAlignmentError, StillPairedError, NotAllocatedError, DuplicateFreeError: nothing was freed.
        """
        if free_index is None or free_index.numel() == 0:
            return
        representatives = self._representatives(free_index, start_pos)
        self._require_unpaired(representatives)
        if self._group is not None:
            self._require_freeable(self.full_attn_allocator, [], [representatives])
            self._group.full_segments.append(representatives.clone())
        else:
            self._free_full_representatives(representatives)

    # -- pairs

    def set_full_to_swa_mapping(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Give virtual token ids window places that are taken already: *physical* token ids of the window pool, of
        ``swa_attn_allocator.alloc_physical``. int ``[n]`` each, position by position, from a page border on.

        An id whose free is queued in the open group gives up the window page it was queued with now (#36135, #36381, #36646).

        Raises:
            PageAlignmentError: the two are not of the same length, or not aligned alike.
            BindError: an id that has a window page, or a place outside the band.
        """
        if full_indices.numel() == 0 and swa_indices.numel() == 0:
            return
        pages = self._pages(self._page_starts(full_indices, swa_indices))
        places = self._pages(swa_indices.to(torch.int64)[:: self.page_size])
        swa, group = self.swa_attn_allocator, self._group
        if group is not None and (group.both or group.both_segments):
            is_waiting = group.waiting_for(pages) & (swa._tables.physical_of(pages) > 0)
            swa._require_taken(places, BindError)
            swa.free_named(pages * self.page_size, is_waiting, in_order=True)
            group.note_released(pages, is_waiting)
            group.note_paired()
        swa.bind(pages, places)

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        """Nothing to do: the window pool's own table is the mapping, and `free_swa` clears it."""

    # -- what the above is made of

    def _pages(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.div(tokens, self.page_size, rounding_mode="floor")

    def _window_place(self, tokens: torch.Tensor) -> torch.Tensor:
        """Window page of each token, int64 ``[n]``: -1 if it has none, 0 for the padding page."""
        return self.swa_attn_allocator._tables.physical_of(self._pages(tokens))

    def _is_paired(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._window_place(tokens) > 0

    def _free_tokens(self, tokens: torch.Tensor, is_paired: torch.Tensor | None) -> None:
        """Both sides of ``tokens``, the window side only where ``is_paired`` (bool ``[n]``; None: of all). The full side first: where a
        wrong id is found on the device, it freezes the window pool before that one is written to."""
        self.full_attn_allocator.free(tokens)
        if is_paired is None:
            self.swa_attn_allocator.free(tokens)
        else:
            self.swa_attn_allocator.free_named(tokens, is_paired)

    def _free_window_representatives(self, representatives: torch.Tensor) -> None:
        self.swa_attn_allocator.free(representatives, _pages=self._pages(representatives))

    def _free_full_representatives(self, representatives: torch.Tensor) -> None:
        self.full_attn_allocator.free(representatives, _pages=self._pages(representatives))

    def _note_released(self, tokens: torch.Tensor, is_released: torch.Tensor | None = None) -> None:
        if self._group is not None:
            self._group.note_released(self._pages(tokens), is_released)

    # -- refusals, before anything changes

    def _require_freeable(
        self, pool: MultiEndedAllocator, tokens: list[torch.Tensor], segments: list[torch.Tensor]
    ) -> None:
        """Every page named is live in ``pool``; tokens of a list may share a page, what stands for pages may not."""
        if self._answers_at_once and (tokens or segments):
            pool.require_freeable(tokens, segments)

    def _require_window_freeable(
        self,
        tokens: list[tuple[torch.Tensor, torch.Tensor | None]],
        segments: list[tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """The same of the window pool, for those tokens of each list whose window side is to go (None: all)."""
        if not self._answers_at_once:
            return
        swa = self.swa_attn_allocator
        named, named_segments = (
            [ids if mask is None else swa.those_named(ids, mask) for ids, mask in lists]
            for lists in (tokens, segments)
        )
        self._require_freeable(swa, named, named_segments)

    def _require_ids(self, tokens: torch.Tensor) -> None:
        if not self._answers_at_once:
            return
        end = self.full_attn_allocator.num_virtual_ids * self.page_size
        bad = (tokens < 0) | (tokens >= end)
        require(
            ~bad.any(),
            "kvtape: free of an id that is none",
            lambda: NotAllocatedError(
                f"free of token id(s) {tokens[bad].tolist()}: ids are 0 to {end - 1}",
                pool="swa",
                ids=tokens[bad].tolist(),
                state=self.swa_attn_allocator.allocator_state_str(),
            ),
        )

    def _require_unpaired(self, tokens: torch.Tensor) -> None:
        if not self._answers_at_once:
            return
        paired = self._is_paired(tokens)

        def refused() -> StillPairedError:
            pages = torch.unique(self._pages(tokens[paired])).tolist()
            return StillPairedError(
                f"virtual page(s) {pages} have window pages still, which would be left without an owner; free both sides, or call "
                "free_swa before",
                pool="full",
                ids=pages,
            )

        require(~paired.any(), "kvtape: the full side alone of pages with a window page was freed", refused)

    def _page_starts(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> torch.Tensor:
        """The first token of every page of ``full_indices``, int64."""
        full, places = full_indices.to(torch.int64), swa_indices.to(torch.int64)

        def refused() -> PageAlignmentError:
            return PageAlignmentError(
                f"{full.shape[0]} ids and {places.shape[0]} window places are not whole pages of {self.page_size} tokens, one for one",
                pool="swa",
            )

        if full.shape != places.shape:
            raise refused()
        if self._answers_at_once and self.page_size > 1:
            offsets = torch.arange(full.shape[0], dtype=torch.int64, device=full.device) % self.page_size
            aligned = (full % self.page_size == offsets) & (places % self.page_size == offsets)
            require(aligned.all(), "kvtape: window places that are not whole pages", refused)
        return full[:: self.page_size]
