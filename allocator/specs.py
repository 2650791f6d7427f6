"""What one slot of a sub-pool holds, in bytes.

A slot's *entry* is the K and V (or latent, or state) of one token in all of the pool's layers. Token pools are token-major:
``[K_0 | V_0 | K_1 | V_1 | ...]``, one entry per token, entries of a page back to back, so that moving a page is one contiguous copy.
State pools keep ``[conv[0] x layers | conv[1] x layers | ... | temporal x layers]`` per slot, as SGLang 0.5.23's
``mem_cache/unified_memory_pool.py`` does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from allocator.errors import ConfigurationError, LayoutError

#: Kernels load and store KV rows in 16-byte vectors (SGLang 0.5.23, ``mem_cache/layout/token_major.py``).
ROW_ALIGN_BYTES = 16
#: Entries of token pools are padded to this, same source.
ENTRY_ALIGN_BYTES = 32

GROW_DIRECTIONS = ("up", "down", "float")


@dataclass(frozen=True)
class RowPart:
    """One family of rows inside an entry: layer ``l`` has ``shape`` elements of ``dtype`` at ``offset + l * layer_stride`` bytes."""

    name: str
    offset: int
    layer_stride: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class SubPoolSpec(ABC):
    """Layout of one sub-pool. ``grow_direction`` is ``"up"`` or ``"down"`` for the two ends of the buffer, ``"float"`` between."""

    name: str
    layer_num: int
    grow_direction: str

    #: Token pools hand out whole pages of tokens; state pools hold one state per slot and always have page size 1.
    is_state: ClassVar[bool] = False
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.grow_direction not in GROW_DIRECTIONS:
            raise ConfigurationError(
                f"grow_direction {self.grow_direction!r} is none of {', '.join(GROW_DIRECTIONS)}",
                pool=self.name,
            )
        self._check_positive(layer_num=self.layer_num)

    @abstractmethod
    def parts(self) -> tuple[RowPart, ...]:
        """Row families of an entry, in byte order."""

    @abstractmethod
    def entry_bytes(self) -> int:
        """Bytes of one slot, all layers, padding included."""

    @abstractmethod
    def get_dtype(self) -> torch.dtype:
        """The dtype of the (first) rows."""

    def _check_positive(self, **sizes: int) -> None:
        for what, size in sizes.items():
            if size <= 0:
                raise ConfigurationError(f"{what} must be positive, not {size}", pool=self.name)

    def _token_major(
        self, rows: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype
    ) -> tuple[RowPart, ...]:
        stride = sum(math.prod(shape) * dtype.itemsize for _, shape in rows)
        parts, offset = [], 0
        for name, shape in rows:
            part = RowPart(name, offset, stride, shape, dtype)
            if part.row_bytes % ROW_ALIGN_BYTES:
                raise LayoutError(
                    f"the {name} row of one token has {part.row_bytes} bytes, which is no multiple of {ROW_ALIGN_BYTES}; "
                    "such a model cannot use the unified pool",
                    pool=self.name,
                )
            parts.append(part)
            offset += part.row_bytes
        return tuple(parts)

    def _token_major_entry_bytes(self) -> int:
        payload = self.layer_num * self.parts()[0].layer_stride
        return -(-payload // ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES


@dataclass(frozen=True, kw_only=True)
class MHASubPoolSpec(SubPoolSpec):
    """Multi-head (or grouped-query) attention: one K row ``(head_num, head_dim)`` and one V row per token and layer."""

    head_num: int
    head_dim: int
    store_dtype: torch.dtype
    v_head_dim: int | None = None

    kind: ClassVar[str] = "mha"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        self._check_positive(head_num=self.head_num, head_dim=self.head_dim, v_head_dim=self.v_head_dim or 0)

    def parts(self) -> tuple[RowPart, ...]:
        assert self.v_head_dim is not None
        rows: list[tuple[str, tuple[int, ...]]] = [
            ("k", (self.head_num, self.head_dim)),
            ("v", (self.head_num, self.v_head_dim)),
        ]
        return self._token_major(rows, self.store_dtype)

    def entry_bytes(self) -> int:
        return self._token_major_entry_bytes()

    def get_dtype(self) -> torch.dtype:
        return self.store_dtype


@dataclass(frozen=True, kw_only=True)
class MLASubPoolSpec(SubPoolSpec):
    """Latent attention: one row ``(1, kv_lora_rank + qk_rope_head_dim)`` per token and layer; V is its first ``kv_lora_rank``."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    store_dtype: torch.dtype

    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)

    @property
    def kv_cache_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def parts(self) -> tuple[RowPart, ...]:
        return self._token_major([("kv", (1, self.kv_cache_dim))], self.store_dtype)

    def entry_bytes(self) -> int:
        return self._token_major_entry_bytes()

    def get_dtype(self) -> torch.dtype:
        return self.store_dtype


@dataclass(frozen=True, kw_only=True)
class MambaSubPoolSpec(SubPoolSpec):
    """Recurrent state: per slot and layer the convolution states and one temporal state. Not padded, page size 1."""

    conv_state_shapes: tuple[tuple[int, ...], ...]
    conv_dtype: torch.dtype
    temporal_state_shape: tuple[int, ...]
    temporal_dtype: torch.dtype

    is_state: ClassVar[bool] = True
    kind: ClassVar[str] = "mamba"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.conv_state_shapes:
            raise ConfigurationError("conv_state_shapes is empty", pool=self.name)

    def parts(self) -> tuple[RowPart, ...]:
        families = [(f"conv{i}", shape, self.conv_dtype) for i, shape in enumerate(self.conv_state_shapes)]
        families.append(("temporal", self.temporal_state_shape, self.temporal_dtype))
        parts, offset = [], 0
        for name, shape, dtype in families:
            row_bytes = math.prod(shape) * dtype.itemsize
            if offset % dtype.itemsize:
                raise LayoutError(
                    f"the {name} states would start at byte {offset}, unaligned for {dtype}", pool=self.name
                )
            parts.append(RowPart(name, offset, row_bytes, tuple(shape), dtype))
            offset += self.layer_num * row_bytes
        return tuple(parts)

    def entry_bytes(self) -> int:
        return sum(self.layer_num * part.row_bytes for part in self.parts())

    def get_dtype(self) -> torch.dtype:
        return self.conv_dtype


@dataclass(frozen=True, kw_only=True)
class OpaqueSubPoolSpec(SubPoolSpec):
    """A pool of which only the size of an entry is known (a trace that carries no head counts). Rows are plain bytes."""

    opaque_entry_bytes: int
    opaque_is_state: bool = False

    kind: ClassVar[str] = "opaque"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive(opaque_entry_bytes=self.opaque_entry_bytes)
        if self.opaque_is_state:
            object.__setattr__(self, "is_state", True)

    def parts(self) -> tuple[RowPart, ...]:
        row = self.opaque_entry_bytes // self.layer_num
        return (RowPart("bytes", 0, row, (row,), torch.uint8),)

    def entry_bytes(self) -> int:
        return self.opaque_entry_bytes

    def get_dtype(self) -> torch.dtype:
        return torch.uint8
