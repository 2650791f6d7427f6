"""Bytes: what a slot holds, how pools share the buffer, and that moving a page carries every row of every layer."""

from __future__ import annotations

import pytest
import torch

from allocator import (
    MambaSubPoolSpec,
    MHASubPoolSpec,
    MLASubPoolSpec,
    UnifiedKVPool,
    UnifiedMambaPool,
    UnifiedMHATokenToKVPool,
    UnifiedMLATokenToKVPool,
    kv_store_for,
)
from allocator.errors import ConfigurationError, LayoutError
from tests.allocator.pools import two_ends

pytestmark = pytest.mark.cpu

KIMI_MLA = MLASubPoolSpec(
    name="full",
    layer_num=24,
    grow_direction="down",
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    store_dtype=torch.bfloat16,
)
KIMI_KDA = MambaSubPoolSpec(
    name="mamba", layer_num=69, grow_direction="up", conv_state_shapes=((3, 4608),), conv_dtype=torch.bfloat16,
    temporal_state_shape=(12, 128, 128), temporal_dtype=torch.float32,
)  # fmt: skip


def test_kimi_k3_tp8_figures() -> None:
    """Entry sizes of the public reports, and page counts of the driven trace, with no memory behind them."""
    assert (KIMI_MLA.entry_bytes(), KIMI_KDA.entry_bytes()) == (27648, 56171520)
    buffer = UnifiedKVPool(
        total_bytes=61031485276, sub_pool_specs=[KIMI_MLA, KIMI_KDA], device="meta", page_size=64
    )
    assert buffer.max_slots("full") // 64 == 34491
    assert -(-buffer.min_slot_index("full") // 64) == 32
    assert buffer.min_slot_index("mamba") == 1
    assert buffer.page_size_of("mamba") == 1


def test_rows_are_views_of_one_buffer_and_move_with_their_page() -> None:
    specs = [
        MHASubPoolSpec(name="full", layer_num=3, grow_direction="down", head_num=2, head_dim=8, store_dtype=torch.float16, v_head_dim=16),
        MLASubPoolSpec(name="mla", layer_num=2, grow_direction="float", kv_lora_rank=16, qk_rope_head_dim=8, store_dtype=torch.bfloat16),
        MambaSubPoolSpec(
            name="mamba", layer_num=2, grow_direction="up", conv_state_shapes=((4, 4), (2, 2)), conv_dtype=torch.float32,
            temporal_state_shape=(2, 4, 4), temporal_dtype=torch.float32,
        ),
    ]  # fmt: skip
    buffer = UnifiedKVPool(total_bytes=64 * 1024, sub_pool_specs=specs, device="cpu", page_size=4)
    assert [spec.name for spec in buffer.sub_pool_specs] == ["mamba", "mla", "full"]
    mha, mla, mamba = (kv_store_for(buffer, name) for name in ("full", "mla", "mamba"))
    assert (
        isinstance(mha, UnifiedMHATokenToKVPool)
        and isinstance(mla, UnifiedMLATokenToKVPool)
        and isinstance(mamba, UnifiedMambaPool)
    )
    assert mha.k_buffer[0].shape[1:] == (2, 8) and mha.v_buffer[2].shape[1:] == (2, 16)
    assert mla.kv_buffer[1].shape[1:] == (1, 24)
    assert mamba.conv_state[1][0].shape[1:] == (2, 2) and mamba.temporal_state[1].shape[1:] == (2, 4, 4)
    for store, page, views in (
        (mha, 20, [*mha.k_buffer, *mha.v_buffer]),
        (mla, 30, mla.kv_buffer),
        (mamba, 40, [*mamba.conv_state[0], *mamba.conv_state[1], *mamba.temporal_state]),
    ):
        slots = slice(page * store.page_size, (page + 1) * store.page_size)
        written = []
        for number, view in enumerate(views):
            value = torch.arange(view[slots].numel(), dtype=torch.float32).view_as(view[slots]) + 7 * number
            view[slots] = value.to(view.dtype)
            written.append(view[slots].clone())
        store.move_physical_pages(torch.tensor([page + 3]), torch.tensor([page]), store.page_size)
        moved = slice((page + 3) * store.page_size, (page + 4) * store.page_size)
        for view, value in zip(views, written, strict=True):
            assert torch.equal(view[moved], value)


def test_pages_are_clean_when_handed_out() -> None:
    """sglang#33974: rows of a page that were never written read as finite, whatever lay there before."""
    full, _ = two_ends()
    store = full.get_kvcache()
    store.unified_buffer._raw.fill_(0xFF)  # NaN in float16
    tokens = full.alloc(8)
    assert tokens is not None
    rows = store.k_buffer[0][full.translate_kv_loc(tokens)]
    assert torch.equal(rows, torch.zeros_like(rows))


def test_what_cannot_be_laid_out() -> None:
    def mha(name: str, direction: str, head_dim: int = 16) -> MHASubPoolSpec:
        return MHASubPoolSpec(
            name=name,
            layer_num=1,
            grow_direction=direction,
            head_num=1,
            head_dim=head_dim,
            store_dtype=torch.float16,
        )

    def pool(*specs: MHASubPoolSpec, total_bytes: int = 4096) -> UnifiedKVPool:
        return UnifiedKVPool(total_bytes=total_bytes, sub_pool_specs=list(specs), device="cpu", page_size=4)

    with pytest.raises(LayoutError, match="multiple of 16"):
        pool(mha("a", "down", head_dim=4), mha("b", "up"))
    with pytest.raises(ConfigurationError, match="two ends"):
        pool(mha("a", "down"), mha("b", "down"))
    with pytest.raises(ConfigurationError, match="unique"):
        pool(mha("a", "down"), mha("a", "up"))
    with pytest.raises(LayoutError, match="larger buffer"):
        pool(mha("a", "down"), mha("b", "up"), total_bytes=300)
    with pytest.raises(ConfigurationError, match="sideways"):
        mha("a", "sideways")


def test_translation_of_what_is_not_there_is_the_sink() -> None:
    full, _ = two_ends()
    tokens = full.alloc(4)
    assert tokens is not None
    asked = torch.tensor([[-1, int(tokens[0]) + 1], [160, 10_000]])
    expected = torch.tensor([[0, int(full.virtual_to_physical[tokens[0] // 4]) * 4 + 1], [0, 0]])
    assert torch.equal(full.translate_kv_loc(asked), expected)
    out = torch.full_like(asked, 7)
    assert full.translate_kv_loc(asked, out=out) is out and torch.equal(out, expected)


def test_clear_and_resize_keep_the_tables_storage() -> None:
    full, swa = two_ends()
    address = full.virtual_to_physical.data_ptr()
    full.alloc(16)
    full.clear()
    assert full.allocated_count() == 0 and full.virtual_to_physical.data_ptr() == address
    full.resize(128)
    assert (full.num_pages, full.virtual_to_physical.data_ptr()) == (32, address)
    assert full.alloc(8) is not None
    with pytest.raises(ConfigurationError):
        full.resize(10**6)
    assert swa.available_size() > 0
