"""The end of a trace of level ``composite``: the part of `replayer.checks.drain` that goes through the composite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from replayer.blame import ids_in
from replayer.checks.growth import whole_pages_growth
from replayer.checks.joint import JointChecks
from replayer.failure import CheckFailure

if TYPE_CHECKING:
    from replayer.composite_drive import CompositeDriver


def probe_joint(driver: CompositeDriver, checks: JointChecks) -> None:
    """``alloc(available_size())`` of the composite is served, on all sides.

    Raises:
        CheckFailure: C10.
    """
    full, size = driver.full, driver.full.page_size
    if driver.swa is not None and (driver.swa.oracle.live & ~full.oracle.live).any():
        return  # window pages were bound to ids that the full side will hand out: nothing that a composite does by itself
    for state in driver.by_number:
        if not state.is_float:
            driver._call("drain", state.allocator.flush_for_allocation)
            driver._judge_log()
    available = int(driver.composite.available_size())
    ids = full.oracle.num_virtual_ids - full.min_page_index - full.oracle.live_count
    pages = min(available // size, ids)
    if not pages:
        return
    tokens = driver._call("drain", driver.composite.alloc, pages * size)
    driver._judge_log()
    answered = ids_in(tokens, "alloc", full.name)
    if answered is None:
        raise CheckFailure("C10", f"refused alloc({pages * size}) of all its pools together", full.name, [], "served",
                           f"None, with available_size() {available}")  # fmt: skip
    own = whole_pages_growth(full, answered, pages * size).new_pages
    checks.placed(full, own)
    if driver.swa is not None:
        driver.swa.oracle.start_pages(own, size)
        checks.placed(driver.swa, own)
    checks.hold("C10")


def free_joint(driver: CompositeDriver, checks: JointChecks) -> None:
    """Close the free group, and free all that has an id on the full side through the composite."""
    if driver._queued:
        driver._before_release()
    if driver._queued is not None:
        driver._call("drain", driver.composite.free_group_end)
        driver._released_group()
        driver._queued = None
    full, swa = driver.full, driver.swa
    pages = full.oracle.live_pages()
    blocked = [state for state in driver.by_number if not state.lazy and state.awaiting_load]
    if not len(pages) or blocked:
        return
    checks.before_free(full, pages)
    tokens = torch.from_numpy(pages * full.page_size).to(driver.device)
    window = pages[:0] if swa is None else pages[swa.oracle.live[pages]]
    driver._call("drain", driver.composite.free, tokens)
    driver._freed_together(pages, window)
