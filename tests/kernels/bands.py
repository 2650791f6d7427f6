"""Bands in every state, and what planning and moving makes of them with torch operations or with kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from allocator import OpaqueSubPoolSpec, UnifiedKVPool, UnifiedPagePool, kv_store_for
from allocator.error_log import ErrorLog
from allocator.flush_ops import TorchFlush, Window
from allocator.read_back import ReadBack
from allocator.tables import PageTables
from allocator.unsettled import FAR


@dataclass(frozen=True)
class Band:
    """``holds[x]``: whether place ``x``, counted from the watermark, is live. ``lead`` pages lie between the buffer's end and the band's.
    ``holes``: which of the places that are not live are listed as holes; None for all of them. ``on_device``: watermark and number of holes
    are known there only. ``moves_itself``: the bytes are a store's that wants to be asked."""

    holds: tuple[bool, ...]
    grows_up: bool = True
    page_size: int = 1
    entry_bytes: int = 32
    seed: int = 0
    lead: int = 2
    spare: int = 5
    is_frozen: bool = False
    holes: tuple[int, ...] | None = None
    on_device: bool = False
    moves_itself: bool = False


class CountingPool(UnifiedPagePool):
    """A store of another kind, derived from ours."""

    rows_moved = 0

    def move_physical_pages(self, dst_pages: torch.Tensor, src_pages: torch.Tensor, page_size: int) -> None:
        self.rows_moved += src_pages.shape[0]
        super().move_physical_pages(dst_pages, src_pages, page_size)


class Pool:
    """The band in a buffer of its own, with tables and bytes as they would be."""

    def __init__(
        self, band: Band, flush_class: type[TorchFlush] = TorchFlush, device: str = "cpu", **tuning: Any
    ) -> None:
        self.band = band
        order = torch.Generator().manual_seed(band.seed)
        size = len(band.holds)
        self.num_pages = num_pages = band.lead + size + band.spare
        spec = OpaqueSubPoolSpec(
            name="pool",
            layer_num=1,
            grow_direction="up" if band.grows_up else "down",
            opaque_entry_bytes=band.entry_bytes,
        )
        page_bytes = band.entry_bytes * band.page_size
        buffer = UnifiedKVPool(
            total_bytes=num_pages * page_bytes + 3,
            sub_pool_specs=[spec],
            device=device,
            page_size=band.page_size,
        )
        buffer._raw.copy_(torch.randint(0, 256, buffer._raw.shape, dtype=torch.uint8, generator=order))
        self.bytes = buffer._raw
        self.tables = PageTables(num_pages, num_pages, device)
        self.mark = band.lead + size if band.grows_up else num_pages - 1 - band.lead - size
        places = torch.arange(size)
        pages = self.mark - 1 - places if band.grows_up else self.mark + 1 + places
        live = pages[torch.tensor(band.holds, dtype=torch.bool)]
        owners = 1 + torch.randperm(num_pages - 1, generator=order)[: live.shape[0]]
        self.tables.bind(owners.to(device), live.to(device))
        listed = (
            [x for x, is_live in enumerate(band.holds) if not is_live]
            if band.holes is None
            else list(band.holes)
        )
        self.ascending = torch.sort(pages[torch.tensor(listed, dtype=torch.int64)])[0].to(device)
        self.live = live.shape[0]
        self.errors = ErrorLog(device, ReadBack(device))
        self.errors.calls = 17
        if band.is_frozen:
            self.errors._log = torch.tensor([1, 2, 3, 4], device=device)
            self.errors.ok = self.errors._log[0] == 0
        self.store = kv_store_for(buffer, "pool")
        if band.moves_itself:
            self.store = CountingPool(unified_buffer=buffer, sub_pool_name="pool")
        self.ops = flush_class(
            tables=self.tables, kvcache=self.store, errors=self.errors, page_size=band.page_size,
            numbers=torch.arange(num_pages + 1, device=device),
        )  # fmt: skip
        for name, value in tuning.items():
            setattr(self.ops, name, value)

    def window(self) -> tuple[Window, torch.Tensor, int]:
        """What an urgent flush looks at: as many places as there are holes; with the watermark on the device more of both, padded."""
        count, up = self.ascending.shape[0], self.band.grows_up
        low, high = self.band.lead if up else 1, self.num_pages if up else self.num_pages - self.band.lead
        if not self.band.on_device:
            return Window(self.mark, count, None, up, low, high), self.ascending, min(self.live, count)
        device = self.ascending.device
        room = min(count + 3, len(self.band.holds))
        padding = torch.full((room - count,), FAR if up else -1, device=device)
        holes = torch.cat([self.ascending, padding] if up else [padding, self.ascending])
        mark, extent = (torch.full((), number, device=device) for number in (self.mark, count))
        return Window(mark, room, extent, up, low, high), holes, min(self.live, room)

    def flush(self) -> dict[str, Any]:
        """Plan and move as an urgent flush does; the answers."""
        window, ascending, rows = self.window()
        plan = self.ops.plan(window, ascending, rows)
        moves = int(plan.moves)
        self.ops.note(plan)
        moved = self.ops.move(plan.moves, plan.src_pages, plan.dst_pages) if rows else plan.src_pages
        done = min(moves, rows)
        return {
            "moves": moves,
            "src": plan.src_pages[:done].tolist(),
            "dst": plan.dst_pages[:done].tolist(),
            "moved": moved.tolist(),
            "asked to move": getattr(self.store, "rows_moved", None),
            "log": self.errors.log.tolist(),
            "log of the plan": (self.errors.log if plan.log is None else plan.log).tolist(),
            "ok": bool(self.errors.ok),
        }

    def state(self) -> dict[str, Any]:
        return {
            "v2p": self.tables.virtual_to_physical.tolist(),
            "p2v": self.tables.physical_to_virtual.tolist(),
            "bytes": bytes(self.bytes.cpu().numpy()),
        }


def expect_same(
    band: Band, flush_class: type[TorchFlush], device: str = "cpu", **tuning: Any
) -> dict[str, Any]:
    """Flush the band with torch operations and with ``flush_class``; fail unless answers, tables and bytes are equal."""
    reference, tried = Pool(band, device=device), Pool(band, flush_class, device, **tuning)
    assert reference.state() == tried.state()
    before = reference.state()["bytes"]
    expected, found = reference.flush(), tried.flush()
    assert found == expected
    after, tried_after = reference.state(), tried.state()
    for key, value in after.items():
        assert tried_after[key] == value, key
    if expected["ok"]:
        sources, targets = set(expected["src"]), set(expected["dst"])
        assert len(sources) == len(targets) == len(expected["src"]), "sources or targets are named twice"
        assert not sources & targets, "a flush's sources and targets overlap"
        # Not only the same: the reference's bytes are where they should be.
        size = band.entry_bytes * band.page_size
        for src, dst in zip(expected["src"], expected["dst"], strict=True):
            assert after["bytes"][dst * size : (dst + 1) * size] == before[src * size : (src + 1) * size]
    return expected


def named_bands() -> dict[str, Band]:
    """Bands by what is special about them; both directions."""
    n = 23
    shapes = {
        "one hole, nothing live": Band((False,)),
        "all vacant": Band((False,) * n),
        "holes next to the watermark": Band((False,) * 7 + (True,) * n),
        "holes at the far end": Band((True,) * n + (False,) * 7),
        "every other page": Band((True, False) * n),
        "every other page, the other half": Band((False, True) * n),
        "more holes than pages": Band((True, False, False, False) * 9),
        "pages of 4 slots": Band((True, True, False) * 8, page_size=4),
        "pages of whole 16 bytes": Band((True, False) * 9, entry_bytes=48),
        "pages of 8, 4, 2 and 1 bytes": Band((True, False) * 9, entry_bytes=24),
        "pages of 4": Band((True, False) * 9, entry_bytes=20),
        "pages of 2": Band((True, False) * 9, entry_bytes=22),
        "pages of 1": Band((True, False) * 9, entry_bytes=21),
        "a store that moves its own bytes": Band((True, False) * 9, page_size=4, moves_itself=True),
        "the same, frozen": Band((True, False) * 9, page_size=4, moves_itself=True, is_frozen=True),
        "frozen": Band((True, False) * 9, is_frozen=True),
        "a hole that is not listed": Band((True, False, True, True, False, False, True), holes=(4, 5)),
        "a live page that is listed, frozen": Band((True, False, True, False), holes=(0,), is_frozen=True),
        "a live page that is listed": Band((True, False, True, True, False, False, True), holes=(1, 4, 5, 6)),
    }
    return {
        f"{name}, {'up' if up else 'down'}, {'device' if on_device else 'host'}": replace(
            shape, grows_up=up, on_device=on_device
        )
        for name, shape in shapes.items()
        for up in (True, False)
        for on_device in (False, True)
    }
