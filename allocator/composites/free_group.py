"""What an open free group of a composite with a window has queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Queued:
    """One free of both sides: token ids (int64 ``[n]``), which of their pages had a window page then (bool ``[n]``; None: all), and how
    many times window pages had been released in this group."""

    tokens: torch.Tensor
    was_paired: torch.Tensor | None
    releases: int


class PairedFreeGroup:
    """Frees held back. Which window page goes with a full page is settled when the free is queued: a cache may pair the id again before
    the group closes, and that page is not this free's to release (sgl-project/sglang#36135, #36381, #36646).

    Args:
        page_size: tokens in a page.
        num_virtual_ids: virtual pages there are.
        device: where ids are.
    """

    def __init__(self, page_size: int, num_virtual_ids: int, device: str | torch.device) -> None:
        self._page_size, self._num_ids, self._device = page_size, num_virtual_ids, device
        self.both: list[Queued] = []
        self.full_only: list[torch.Tensor] = []
        #: Token ids that stand for whole pages.
        self.both_segments: list[Queued] = []
        self.full_segments: list[torch.Tensor] = []
        self._releases = 0
        #: Whether an id was given a window page since the group was opened. Before that no queued free can take a wrong one.
        self._has_new_pairs = False
        #: After which release each virtual page gave up its window page, int64 ``[num_virtual_ids + 1]``; made when first needed.
        self._released_at: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self.both or self.full_only or self.both_segments or self.full_segments)

    def queue(self, tokens: torch.Tensor, was_paired: torch.Tensor) -> None:
        self.both.append(Queued(tokens, was_paired, self._releases))

    def queue_segment(self, representatives: torch.Tensor) -> None:
        self.both_segments.append(Queued(representatives, None, self._releases))

    def note_released(self, virtual_pages: torch.Tensor, is_released: torch.Tensor | None = None) -> None:
        """The window pages of these (int64 ``[n]``; those for which ``is_released``, bool ``[n]``, says so) were released or given to
        others: what was queued has no claim on later ones."""
        if not (self.both or self.both_segments):
            return
        self._releases += 1
        if self._released_at is None:
            self._released_at = torch.zeros(self._num_ids + 1, dtype=torch.int64, device=self._device)
        rows = virtual_pages.clamp(0, self._num_ids)
        if is_released is not None:
            rows = torch.where(is_released, rows, self._num_ids)  # of no page
        self._released_at.index_fill_(0, rows, self._releases)

    def note_paired(self) -> None:
        """Ids were given window pages."""
        self._has_new_pairs = True

    def claimed(
        self, queued: Sequence[Queued], is_paired: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Of which of `tokens` the window pages are still theirs: bool ``[n]``, None if those of all are.

        Args:
            is_paired: which of some tokens have a window page now, bool. A cache may have taken it for other ids, and it stays with those.
        """
        tokens = self.tokens(queued)
        masks = [self._mask(entry) for entry in queued]
        if all(mask is None for mask in masks):
            return None
        claimed = torch.cat(
            [
                torch.ones_like(entry.tokens, dtype=torch.bool) if mask is None else mask
                for entry, mask in zip(queued, masks, strict=True)
            ]
        )
        return claimed & is_paired(tokens)

    @staticmethod
    def tokens(queued: Sequence[Queued]) -> torch.Tensor:
        """All of ``queued``, one after another: int64 ``[n]``."""
        return queued[0].tokens if len(queued) == 1 else torch.cat([entry.tokens for entry in queued])

    def _mask(self, entry: Queued) -> torch.Tensor | None:
        if not self._has_new_pairs or self._released_at is None or entry.releases == self._releases:
            return entry.was_paired
        pages = torch.div(entry.tokens, self._page_size, rounding_mode="floor").clamp(0, self._num_ids)
        kept = self._released_at[pages] <= entry.releases
        return kept if entry.was_paired is None else kept & entry.was_paired

    def waiting_for(self, virtual_pages: torch.Tensor) -> torch.Tensor:
        """Which of these pages (int64 ``[n]``) are queued together with the window page that they have: bool ``[n]``."""
        # Marked and looked up: `isin` sorts both sides on a GPU, and stops the host to know how many there are.
        is_waiting = torch.zeros(self._num_ids + 1, dtype=torch.bool, device=self._device)
        for entry in (*self.both, *self.both_segments):
            mask = self._mask(entry)
            pages = torch.div(entry.tokens, self._page_size, rounding_mode="floor")
            is_waiting.index_fill_(
                0, self._rows(pages if mask is None else torch.where(mask, pages, -1)), True
            )
        is_waiting[-1:].fill_(False)
        return is_waiting.index_select(0, self._rows(virtual_pages))

    def _rows(self, virtual_pages: torch.Tensor) -> torch.Tensor:
        """The pages, and the row past the last one for what is none."""
        return torch.where(virtual_pages < 0, self._num_ids, virtual_pages).clamp(max=self._num_ids)
