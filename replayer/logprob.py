"""C14: log-probabilities of a seeded probe model that reads KV through the mapping, against the same model on an uncompacted copy.

The probe is no language model; it is the part of one that memory can corrupt: attention over every layer's rows of a request, then a
vocabulary of log-probabilities. Grouped-query attention for MHA pools, latent attention for MLA pools, a linear read-out of the slot for
states and for pools of unknown layout. Both sides run the same code on the same shapes in the same order, so that equal bytes give
equal bits and the only difference allowed is 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from allocator import MHASubPoolSpec, MLASubPoolSpec
from replayer.content import ByteStore, IntArray, Words, grow_values
from replayer.failure import CheckFailure
from replayer.pool_state import PoolState
from replayer.targets import spec_of
from replayer.tokens import Tokens

SEED = 20_240_917
VOCABULARY = 256
HIDDEN = 64
#: Query heads that share one KV head.
GROUP = 2
#: Tokens of context per sampled request, layers read, requests per sample, and values of one state that the read-out weighs.
CONTEXT_TOKENS = 128
LAYERS = 4
REQUESTS = 2
STATE_VALUES = 2048

#: ``rows(part name, layer) -> [tokens, *row shape]`` in float32.
Rows = Callable[[str, int], torch.Tensor]


@dataclass
class _Model:
    """Seeded weights for one pool."""

    hidden: torch.Tensor
    query: list[torch.Tensor]
    output: list[torch.Tensor]
    vocabulary: torch.Tensor


class Probe:
    """Counts what it compared; ``sample`` raises on the first difference."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._random = np.random.default_rng(SEED)
        self._models: dict[str, _Model] = {}
        self.compared = 0
        self.tokens = 0
        self.largest_difference = 0.0

    def sample(self, state: PoolState, owner: PoolState, pages: IntArray) -> None:
        """Compare a few requests of ``state``: some that hold one of ``pages``, which just moved, and one that may not.

        ``owner`` is the pool whose ids these are; it knows in which order a request took its pages.

        Raises:
            CheckFailure: C14.
        """
        live = state.oracle.live_pages()
        pages = pages[state.oracle.live[pages]]
        if not len(live) or not len(pages):
            return
        chosen = [int(self._random.choice(pages)) for _ in range(REQUESTS - 1)] + [
            int(self._random.choice(live))
        ]
        for last_page in chosen:
            self._compare(state, self._request_tokens(state, owner, last_page, live))

    def _request_tokens(self, state: PoolState, owner: PoolState, last_page: int, live: IntArray) -> IntArray:
        """Token ids of the request that ends in ``last_page``, oldest first: back from page to page as far as is known, filled up
        with other live pages where a request's order is not (page size 1, where an alloc does not say whose tokens it takes)."""
        oracle = state.oracle
        wanted = 1 if state.is_state else -(-CONTEXT_TOKENS // state.page_size)
        chain, seen, page = [last_page], {last_page}, int(owner.oracle.predecessor[last_page])
        while len(chain) < wanted and page > 0 and page not in seen and oracle.live[page]:
            chain.append(page)
            seen.add(page)
            page = int(owner.oracle.predecessor[page])
        if len(chain) < wanted:
            start = int(np.searchsorted(live, chain[-1]))
            others = np.roll(live, -start)[:wanted]
            chain.extend(int(other) for other in others if int(other) not in seen)
        pages = np.array(chain[:wanted][::-1], dtype=np.int64)
        tokens = (pages[:, None] * state.page_size + np.arange(state.page_size)).reshape(-1)
        kept: IntArray = tokens[(tokens % state.page_size) < np.repeat(oracle.filled[pages], state.page_size)]
        return kept[-CONTEXT_TOKENS:]

    def _compare(self, state: PoolState, tokens: IntArray) -> None:
        if not len(tokens):
            return
        model = self._models.get(state.name)
        if model is None:
            model = self._models[state.name] = self._make_model(state)
        placed = state.allocator.translate_kv_loc(torch.from_numpy(tokens).to(self._device)).cpu().numpy()
        through_mapping = self._log_probabilities(state, model, _rows_at(state, placed))
        own = Tokens.split(tokens, state.page_size)
        reference = self._log_probabilities(state, model, _grown_rows(state, state.oracle.words_of(own)))
        difference = float((through_mapping - reference).abs().max())
        self.compared += 1
        self.tokens += len(tokens)
        self.largest_difference = (
            max(self.largest_difference, difference) if not math.isnan(difference) else math.nan
        )
        if difference != 0.0:
            raise CheckFailure(
                "C14",
                f"log-probabilities of a request with {len(tokens)} tokens differ from the uncompacted reference",
                state.name,
                np.unique(own.pages).tolist()[:16],
                expected="0.0",
                found=f"{difference} (log-probability {int((through_mapping - reference).abs().argmax())} of {VOCABULARY})",
            )

    def _make_model(self, state: PoolState) -> _Model:
        generator = torch.Generator().manual_seed(SEED + state.number)
        spec = spec_of(state.header)
        layers = min(LAYERS, spec.layer_num)

        def weights(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).to(self._device)

        if isinstance(spec, MHASubPoolSpec):
            heads = spec.head_num * GROUP
            query, read = heads * spec.head_dim, heads * (spec.v_head_dim or spec.head_dim)
        elif isinstance(spec, MLASubPoolSpec):
            heads = 2 * GROUP
            query, read = heads * spec.kv_cache_dim, heads * spec.kv_lora_rank
        else:
            query, read = 1, STATE_VALUES
        return _Model(
            weights(1, HIDDEN)[0], [weights(query, HIDDEN) for _ in range(layers)],
            [weights(HIDDEN, read) for _ in range(layers)], weights(VOCABULARY, HIDDEN),
        )  # fmt: skip

    def _log_probabilities(self, state: PoolState, model: _Model, rows: Rows) -> torch.Tensor:
        spec = spec_of(state.header)
        hidden = model.hidden
        for layer, (query, output) in enumerate(zip(model.query, model.output, strict=True)):
            if isinstance(spec, MHASubPoolSpec):
                read = _grouped_query(query @ hidden, rows("k", layer), rows("v", layer))
            elif isinstance(spec, MLASubPoolSpec):
                read = _latent(query @ hidden, rows("kv", layer)[:, 0], spec.kv_lora_rank)
            else:
                read = _read_out([rows(part.name, layer) for part in spec.parts()])
            hidden = torch.tanh(hidden + output @ read)
        return torch.log_softmax(model.vocabulary @ hidden, 0)


def _grouped_query(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query position: ``keys`` ``[tokens, heads, dim]``, ``GROUP`` query heads a KV head; flat ``[heads * dim]``."""
    _, heads, dim = keys.shape
    scores = torch.einsum("hgd,thd->hgt", query.view(heads, GROUP, dim), keys) / math.sqrt(dim)
    return torch.einsum("hgt,thd->hgd", torch.softmax(scores, -1), values).reshape(-1)


def _latent(query: torch.Tensor, rows: torch.Tensor, kv_lora_rank: int) -> torch.Tensor:
    """Latent attention with absorbed projections: scores over whole rows, values are their first ``kv_lora_rank`` numbers."""
    scores = query.view(-1, rows.shape[1]) @ rows.T / math.sqrt(rows.shape[1])
    return (torch.softmax(scores, -1) @ rows[:, :kv_lora_rank]).reshape(-1)


def _read_out(parts: list[torch.Tensor]) -> torch.Tensor:
    """The first values of every part, mean over slots, padded to a fixed length."""
    values = torch.cat(
        [part.reshape(part.shape[0], -1)[:, : STATE_VALUES // len(parts)] for part in parts], 1
    ).mean(0)
    return torch.nn.functional.pad(values, (0, STATE_VALUES - values.shape[0]))


def _rows_at(state: PoolState, physical_tokens: IntArray) -> Rows:
    """What the store holds at physical token ids."""
    store = state.store
    if isinstance(store, ByteStore):
        views = store.rows.layer_views()
        index = torch.from_numpy(physical_tokens)
        return lambda part, layer: _numbers(views[part][layer][index.to(views[part][layer].device)])
    pages, offsets = np.divmod(physical_tokens, state.page_size)
    found = store.found_words(pages)
    assert found is not None
    return _grown_rows(state, found[np.arange(len(pages)), offsets])


def _grown_rows(state: PoolState, words: Words) -> Rows:
    """The rows that belong to stamps, as `replayer.content.entry_grower` lays them out."""
    parts = {part.name: (number, part) for number, part in enumerate(spec_of(state.header).parts())}

    def rows(name: str, layer: int) -> torch.Tensor:
        number, part = parts[name]
        count = part.row_bytes // part.dtype.itemsize
        used = count if not state.is_state and part.dtype != torch.uint8 else min(count, STATE_VALUES)
        values = grow_values(words, used, number * 1024 + layer, part.dtype)
        shape = part.shape if used == count else (used,)
        return _numbers(values.view(words.shape[0], *shape)).to(state.store_device)

    return rows


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    """float32; bytes of an unknown layout are read as fractions."""
    return rows.to(torch.float32) / 255.0 if rows.dtype == torch.uint8 else rows.to(torch.float32)
