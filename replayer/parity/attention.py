"""Attention over paged keys and values: written to and read from the pools at physical places, whoever calls it.

Virtual token ids become physical ones once a forward and pool, by `translate_kv_loc`, as in SGLang 0.5.23; the layers then gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from replayer.parity.pools import KVPools, PoolView


@dataclass(frozen=True)
class Rows:
    """Tokens of one request in a batch: positions ``[begin, end)`` are computed, those before are in the pools.

    ``pages`` are the request's virtual pages by pool name, page ``i`` of them for positions ``[i * page_size, (i + 1) * page_size)``;
    0 where a pool holds it no more.
    """

    begin: int
    end: int
    pages: dict[str, list[int]]


@dataclass(frozen=True)
class Group:
    """Requests with equally many query tokens, computed as one: tokens ``[start, start + requests * queries)`` of the batch."""

    start: int
    requests: int
    queries: int


@dataclass(frozen=True)
class Reads:
    """What a group reads of one pool: physical token ids, int64 ``[requests * keys]``, padded with 0, and which of them each query
    may see, bool ``[requests, 1, queries, keys]``."""

    places: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class PoolPass:
    """One forward's dealings with one pool; ``written`` are virtual token ids, int64 ``[tokens]``, ``places`` where they are."""

    written: torch.Tensor
    places: torch.Tensor
    reads: tuple[Reads, ...]


class PagedBatch:
    """A batch as attention sees it. Made right before its forward: physical places hold until pages move the next time."""

    def __init__(self, pools: KVPools, rows: Sequence[Rows]) -> None:
        self._pools = pools
        self.groups = _groups(rows)
        self.passes = {view.name: self._pass(view, rows) for view in pools.views}

    def _pass(self, view: PoolView, rows: Sequence[Rows]) -> PoolPass:
        size = self._pools.page_size
        written = np.concatenate(
            [_token_ids(row.pages[view.name], np.arange(row.begin, row.end), size) for row in rows]
        )
        on_device = self._on_device(written)
        reads, at = [], 0
        for group in self.groups:
            reads.append(self._reads(view, rows[at : at + group.requests], group.queries))
            at += group.requests
        return PoolPass(on_device, view.allocator.translate_kv_loc(on_device), tuple(reads))

    def _reads(self, view: PoolView, rows: Sequence[Rows], queries: int) -> Reads:
        firsts = [view.first_position_read(row.begin) for row in rows]
        width = max(row.end - first for row, first in zip(rows, firsts, strict=True))
        ids = np.zeros((len(rows), width), dtype=np.int64)
        mask = np.zeros((len(rows), 1, queries, width), dtype=bool)
        for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            keys = np.arange(first, row.end)
            ids[index, : len(keys)] = _token_ids(row.pages[view.name], keys, self._pools.page_size)
            ahead = np.arange(row.begin, row.end)[:, None] - keys[None, :]
            seen = ahead >= 0
            if view.window is not None:
                seen &= ahead < view.window
            mask[index, 0, :, : len(keys)] = seen
        places = view.allocator.translate_kv_loc(self._on_device(ids))
        return Reads(places.reshape(-1), torch.from_numpy(mask).to(self._pools.device))

    def _on_device(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self._pools.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write the layer's ``key`` and ``value`` (``[kv_heads, tokens, head_dim]``), then attend from ``query`` (``[heads, tokens,
        head_dim]``) to everything the tokens may see. Returns ``[tokens, heads, head_dim]``."""
        view, index = self._pools.layer(layer)
        this = self.passes[view.name]
        keys, values = view.store.k_buffer[index], view.store.v_buffer[index]
        keys.index_copy_(0, this.places, key.transpose(0, 1))
        values.index_copy_(0, this.places, value.transpose(0, 1))
        answers = []
        for group, reads in zip(self.groups, this.reads, strict=True):
            count, queries = group.requests, group.queries
            answer = torch.nn.functional.scaled_dot_product_attention(
                query[:, group.start : group.start + count * queries]
                .unflatten(1, (count, queries))
                .transpose(0, 1),
                keys.index_select(0, reads.places).unflatten(0, (count, -1)).transpose(1, 2),
                values.index_select(0, reads.places).unflatten(0, (count, -1)).transpose(1, 2),
                attn_mask=reads.mask,
                scale=scaling,
                enable_gqa=query.shape[0] != key.shape[0],
            )
            answers.append(answer.transpose(1, 2).flatten(0, 1))
        return torch.cat(answers)


def _groups(rows: Sequence[Rows]) -> list[Group]:
    """Neighbours that compute one token each are one group (a decode batch), all others one each."""
    groups: list[Group] = []
    start = 0
    for row in rows:
        queries = row.end - row.begin
        if groups and queries == 1 and groups[-1].queries == 1:
            groups[-1] = Group(groups[-1].start, groups[-1].requests + 1, 1)
        else:
            groups.append(Group(start, 1, queries))
        start += queries
    return groups


def _token_ids(pages: list[int], positions: np.ndarray, page_size: int) -> np.ndarray:
    ids: np.ndarray = np.asarray(pages, dtype=np.int64)[positions // page_size] * page_size
    ids += positions % page_size
    return ids
