"""What a composite says about all its pools together, and where SGLang 0.5.23's is known to say otherwise than its own calls do."""

from __future__ import annotations

from typing import Any, Final

#: Methods and properties without arguments, in tokens or slots; a composite has those that belong to its pools.
SIZES: Final = (
    "available_size", "full_available_size", "swa_available_size", "schedulable_full_available_size",
    "schedulable_swa_available_size", "conserve_full_available_size", "conserve_swa_available_size", "current_full_capacity",
    "current_swa_capacity", "size", "mamba_slot_full_token_cost",
)  # fmt: skip
#: Pages of both sides, and states, that are asked for without being taken.
ASKED: Final = (1, 3, 9)


def joint_figures(composite: Any, slots: Any) -> dict[str, Any]:
    """Figures of a composite and its slot allocator (None without states)."""
    found = {name: getattr(composite, name, None) for name in SIZES}
    figures: dict[str, Any] = {name: one() if callable(one) else one for name, one in found.items()}
    if hasattr(composite, "can_reserve"):
        size = composite.page_size
        figures["can_reserve"] = [
            composite.can_reserve(full * size, swa * size) for full in ASKED for swa in ASKED
        ]
    if slots is not None:
        figures["slots"] = slots.available_size(), slots.schedulable_available_size(), len(slots.free_slots)
        figures["full_tokens_before_mamba_recheck"] = [
            composite.full_tokens_before_mamba_recheck(count) for count in ASKED
        ]
    # Pools that do not add up: each side has its own words for it.
    lines = composite.verify_byte_accounting()
    figures["verify_byte_accounting"] = sorted({line.partition("]")[0] + "]" for line in lines})
    return figures


def without_known_faults(composite: Any, slots: Any, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of SGLang's composite, with what it is known to get wrong (docs/findings.md, docs/composites.md) put right by its own
    counts: a fault that is known is not compared away, it is computed."""
    swa = getattr(composite, "swa_attn_allocator", None)
    if swa is None or not swa._pending_hicache_load_pages:
        return figures
    if slots is None:
        # Places reserved for a load will need ids: `ensure_capacity` knows that, `available_size` does not.
        full, size = composite.full_attn_allocator, composite.page_size
        ids = full.num_virtual_ids - full.min_page_index - swa.allocated_count() // size
        return {**figures, "available_size": min(figures["available_size"], max(0, ids) * size)}
    # Reserved places of a float are no lost pages, as long as no more are missing than were reserved.
    span = swa.physical_to_virtual[swa.low_wm_page : swa.high_wm_page]
    missing = len(span) - int((span != -1).sum()) - len(swa._free_phys_pages)
    named = figures["verify_byte_accounting"]
    if 0 < missing <= swa._pending_hicache_load_pages:
        named = [name for name in named if name != "[swa]"]
    return {**figures, "verify_byte_accounting": named}
