"""Token ids for requests that grow: `alloc_extend` (prefill) and `alloc_decode` (one token each), in plain torch.

The rules are SGLang's (``mem_cache/allocator/paged.py``): a request first fills the page its last token lies in, then takes whole
pages in the order of the batch; only a request that crosses a page border takes one. Everything is shape-static given the host-side
lengths, so nothing here reads the device.
"""

from __future__ import annotations

import torch


def new_pages_extend(prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor, page_size: int) -> int:
    """Pages that a batch takes when requests grow from ``prefix_lens`` to ``seq_lens`` (int ``[bs]``, host memory)."""
    prefix, seq = prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()
    return int(((seq + page_size - 1) // page_size - (prefix + page_size - 1) // page_size).sum())


def new_pages_decode(seq_lens_cpu: torch.Tensor, page_size: int) -> int:
    """Pages that a batch takes when each request grows by one token to ``seq_lens`` (int ``[bs]``, host memory)."""
    if page_size == 1:
        return seq_lens_cpu.shape[0]
    return int((seq_lens_cpu.numpy() % page_size == 1).sum())


def extend_token_ids(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Virtual token ids for positions ``prefix_lens[i] .. seq_lens[i] - 1`` of every request, one after another.

    Args:
        prefix_lens, seq_lens, last_loc: int ``[bs]``; ``last_loc[i]`` is the id of token ``prefix_lens[i] - 1`` (unused at 0).
        free_pages: the pages to take, in order; at least as many as are needed.
        num_tokens: sum of ``seq_lens - prefix_lens``.

    Returns:
        int64 ``[num_tokens]``.
    """
    requests = torch.arange(prefix_lens.shape[0], device=prefix_lens.device)
    owner = torch.repeat_interleave(requests, seq_lens - prefix_lens, output_size=num_tokens)
    lens = seq_lens - prefix_lens
    first_of_request = torch.cumsum(lens, 0) - lens
    grown = torch.arange(num_tokens, device=prefix_lens.device) - first_of_request[owner]
    in_tail_page = last_loc[owner] + 1 + grown
    if free_pages.shape[0] == 0:
        return in_tail_page.to(torch.int64)
    pages_before = torch.div(prefix_lens + page_size - 1, page_size, rounding_mode="floor")
    pages_after = torch.div(seq_lens + page_size - 1, page_size, rounding_mode="floor")
    taken = pages_after - pages_before
    first_page = torch.cumsum(taken, 0) - taken - pages_before
    position = prefix_lens[owner] + grown
    page = torch.div(position, page_size, rounding_mode="floor")
    # Rows that stay in the tail page would look one page too low; they are not taken from this side.
    rank = (first_page[owner] + page).clamp_(0, free_pages.shape[0] - 1)
    in_new_page = free_pages[rank] * page_size + (position - page * page_size)
    return torch.where(page < pages_before[owner], in_tail_page, in_new_page)


def decode_token_ids(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Virtual token id of position ``seq_lens[i] - 1`` of every request; int ``[bs]`` in, int64 ``[bs]`` out."""
    count = free_pages.shape[0]
    if page_size == 1:
        return free_pages.clone()
    if count == 0:
        return (last_loc + 1).to(torch.int64)
    crosses = seq_lens % page_size == 1
    # Rows before the first crossing get rank -1, the last page: they do not take it, and it exists.
    rank = torch.cumsum(crosses, 0) - 1
    return torch.where(crosses, free_pages[rank] * page_size, last_loc + 1)
