"""What the engine needs of a language model: its shape, and logits of a flat batch whose attention reads paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from replayer.parity.attention import PagedBatch


@dataclass(frozen=True)
class ModelShape:
    """Sizes that a KV pool follows from, and where the model is."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str


class LanguageModel(Protocol):
    """A decoder. ``input_ids`` and ``positions`` are int64 ``[tokens]``, the tokens of all requests of a batch end to end."""

    @property
    def shape(self) -> ModelShape: ...

    def logits(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Logits of the tokens at ``rows`` (int64 ``[n]``): ``[n, vocabulary]``, in the model's dtype. Every layer's attention has
        written the batch's keys and values when this returns."""
        ...
