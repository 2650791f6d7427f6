"""The flush's mapping lookup: which virtual page lives on each page that is about to move.

This one step is why kvtape exists. Reading it row by row stops the host once per moved page; sgl-project/sglang#33060 gathers batches
of 16 and more; #34066 gathers always. The strategies answer the same, so they differ in nothing but the number of synchronisations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from allocator.errors import CorruptMappingError, UnknownStrategyError, require

#: ``lookup(physical_to_virtual, sources on the host, the same on the device, pool name) -> int64 [n] virtual pages``.
Lookup = Callable[[torch.Tensor, Sequence[int], torch.Tensor, str], torch.Tensor]

#: #33060 gathers from this many moves on.
HYBRID_GATHER_FROM = 16


def per_row(
    physical_to_virtual: torch.Tensor, src_list: Sequence[int], src_pages: torch.Tensor, pool: str
) -> torch.Tensor:
    """One scalar read per moved page: SGLang before #34066. N device-to-host reads, one host-to-device copy."""
    virtual = [int(physical_to_virtual[page].item()) for page in src_list]
    unmapped = [page for page, v in zip(src_list, virtual, strict=True) if v < 0]
    if unmapped:
        raise _unmapped_source(pool, unmapped)
    return torch.tensor(virtual, dtype=torch.int64, device=physical_to_virtual.device)


def batched(
    physical_to_virtual: torch.Tensor, src_list: Sequence[int], src_pages: torch.Tensor, pool: str
) -> torch.Tensor:
    """One gather per batch and an asynchronous assertion: #34066. No device-to-host read."""
    virtual = physical_to_virtual.index_select(0, src_pages)
    require(
        (virtual >= 0).all(),
        "kvtape: a page that is about to move has no virtual page",
        lambda: _unmapped_source(pool, src_pages[virtual < 0].tolist()),
    )
    return virtual


def hybrid(
    physical_to_virtual: torch.Tensor, src_list: Sequence[int], src_pages: torch.Tensor, pool: str
) -> torch.Tensor:
    """Scalar reads for small batches, a gather from `HYBRID_GATHER_FROM` moves on: #33060."""
    lookup = per_row if len(src_list) < HYBRID_GATHER_FROM else batched
    return lookup(physical_to_virtual, src_list, src_pages, pool)


#: The strategy whose flush makes its plan on the device too (`allocator.device_end`). Where a move is planned on the host all the same
#: (a float making room), it looks up as ``batched`` does.
DEVICE_STRATEGY = "device"
STRATEGIES: dict[str, Lookup] = {
    "per-row": per_row,
    "hybrid": hybrid,
    "batched": batched,
    DEVICE_STRATEGY: batched,
}
DEFAULT_STRATEGY = "batched"


def lookup_for(strategy: str) -> Lookup:
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise UnknownStrategyError(
            f"there is no lookup strategy {strategy!r}; known: {', '.join(STRATEGIES)}"
        ) from None


def _unmapped_source(pool: str, pages: Sequence[int]) -> CorruptMappingError:
    return CorruptMappingError(
        f"physical page(s) {list(pages)} inside the band are neither hole nor pending, yet no virtual page maps to them",
        pool=pool,
        ids=pages,
    )
