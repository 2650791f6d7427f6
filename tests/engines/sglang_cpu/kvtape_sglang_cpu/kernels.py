"""The two paged allocation kernels as plain functions, over SGLang's own ``alloc_extend_naive``, under the call shape of a Triton kernel.

0.5.18 needs two things more: its kernel that writes keys and values into pages, and to be told to take the branches without Triton that
it has for other kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from . import modules

ASKS_FOR_TRITON = (
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.model_executor.forward_batch_info",
)


class GridLaunch:
    """``kernel[grid](...)`` over a function that needs no grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def install() -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    def extend(
        prefix_lens: Any,
        seq_lens: Any,
        last_loc: Any,
        free_pages: Any,
        out: Any,
        batch_size: int,
        page_size: int,
    ) -> None:
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)

    def decode(
        seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, batch_size: int, page_size: int
    ) -> None:
        # A decode step extends each sequence by its last token.
        alloc_extend_naive(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size, out.device)

    target: Any = modules.sub_pool_module()
    target.alloc_extend_kernel = GridLaunch(extend)
    target.alloc_decode_kernel = GridLaunch(decode)
    pools: Any = importlib.import_module("sglang.srt.mem_cache.unified_memory_pool")
    if hasattr(pools, "store_cache_4d_kernel"):
        pools.store_cache_4d_kernel = GridLaunch(_store)
    for name in ASKS_FOR_TRITON:
        module: Any = importlib.import_module(name)
        # They take the backend's name, triton, as a sign that Triton runs here.
        module.support_triton = lambda backend: False


def _store(
    k_pages: Any, v_pages: Any, k: Any, v: Any, loc: Any, *strides: Any, PAGE_SIZE: int, **sizes: Any
) -> None:
    """Rows ``k``, ``v`` ``[tokens, heads, dim]`` to tokens ``loc`` of ``[pages, page_size, heads, dim]``."""
    page, offset = loc.long() // PAGE_SIZE, loc.long() % PAGE_SIZE
    k_pages[page, offset] = k.view(len(loc), *k_pages.shape[2:])
    v_pages[page, offset] = v.view(len(loc), *v_pages.shape[2:])
