"""An attention backend in torch operations that finds its keys and values through the unified pool's tables.

SGLang's own ``torch_native`` reads the ids of ``req_to_token`` as if they were rows of the buffer; in the unified pool they are virtual.
Here the rows are looked up once per forward, from the allocator's tables as they are when the forward is launched, like a kernel's
arguments are. All that is run is one attention per sequence, with a mask, in the model's own precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import modules


@dataclass(frozen=True)
class Sequence:
    """One sequence of a forward: its new tokens are rows ``[start, stop)`` of the batch; it holds ``length`` tokens with them."""

    start: int
    stop: int
    length: int
    full_rows: torch.Tensor
    window_rows: torch.Tensor


def install() -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    write_locations = _planned_writes if modules.has_kv_loc_plan() else _translated_writes

    class UnifiedPoolBackend(TorchNativeAttnBackend):  # type: ignore[misc]
        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self._runner = runner
            self._allocator = runner.token_to_kv_pool_allocator
            self._window: int = runner.sliding_window_size
            self._is_windowed = {
                layer: windowed for layer, (_, windowed) in self.token_to_kv_pool.layers_mapping.items()
            }
            self._sequences: list[Sequence] = []
            self._writes: Any = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            batch = forward_batch
            self._writes = write_locations(KVWriteLoc, self._runner, batch)
            lengths = batch.seq_lens.tolist()
            new = [1] * len(lengths) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
            table = self.req_to_token_pool.req_to_token
            self._sequences = []
            start = 0
            for request, length, count in zip(batch.req_pool_indices.tolist(), lengths, new, strict=True):
                virtual = table[request, :length].to(torch.int64)
                self._sequences.append(
                    Sequence(
                        start,
                        start + count,
                        length,
                        self._allocator.translate_kv_loc(virtual).long(),
                        self._allocator.translate_loc_from_full_to_swa(virtual).long(),
                    )
                )
                start += count

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **_: Any
        ) -> torch.Tensor:
            if save_kv_cache and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, self._writes, k, v)
            windowed = self._is_windowed[layer.layer_id]
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = q.new_zeros(heads.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            for sequence in self._sequences:
                rows = sequence.window_rows if windowed else sequence.full_rows
                first = sequence.length - (sequence.stop - sequence.start)
                oldest = max(0, first - self._window) if windowed else 0
                rows = rows[oldest:]
                out[sequence.start : sequence.stop] = scaled_dot_product_attention(
                    heads[sequence.start : sequence.stop].transpose(0, 1).unsqueeze(0),
                    _tokens(keys, rows).transpose(0, 1).unsqueeze(0),
                    _tokens(values, rows).transpose(0, 1).unsqueeze(0),
                    attn_mask=_mask(first, sequence.length, oldest, self._window if windowed else None),
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )[0].transpose(0, 1)
            return out.view(heads.shape[0], -1)

        # A decode step is an extension by one token.
        forward_decode = forward_extend

    attention_registry.ATTENTION_BACKENDS["triton"] = UnifiedPoolBackend


def _tokens(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Tokens ``rows`` of a layer's buffer, ``[tokens, heads, dim]`` or, in 0.5.18, ``[pages, page_size, heads, dim]``."""
    if buffer.dim() == 4:
        page_size = buffer.shape[1]
        return buffer[rows // page_size, rows % page_size]
    return buffer[rows]


def _mask(first: int, length: int, oldest: int, window: int | None) -> torch.Tensor:
    """Which of the tokens ``[oldest, length)`` each of the tokens ``[first, length)`` may see: bool ``[new, seen]``."""
    query = torch.arange(first, length).unsqueeze(1)
    key = torch.arange(oldest, length).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key >= query - window)


def _planned_writes(kv_write_loc: Any, runner: Any, batch: Any) -> Any:
    from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

    translator = runner.kv_index_translator
    return kv_write_loc(
        translator.write_ids(batch, IdSpaceKind.FULL),
        translator.write_ids(batch, IdSpaceKind.SLIDING_WINDOW),
        physical=True,
    )


def _translated_writes(kv_write_loc: Any, runner: Any, batch: Any) -> Any:
    allocator = runner.token_to_kv_pool_allocator
    virtual = batch.out_cache_loc
    return kv_write_loc(
        virtual,
        allocator.translate_loc_from_full_to_swa(virtual),
        full_loc=allocator.translate_kv_loc(virtual),
    )
