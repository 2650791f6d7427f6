"""After the last event: everything is freed, every reader is done, every gate is open. Then nothing may be left (C12), and what the
allocator says it can hand out it must hand out (C10)."""

from __future__ import annotations

import numpy as np
import torch

from replayer.blame import ids_in
from replayer.checks.drain_joint import free_joint, probe_joint
from replayer.checks.growth import whole_pages_growth
from replayer.checks.joint import JointChecks
from replayer.checks.suite import Checks
from replayer.composite_drive import CompositeDriver
from replayer.drive import Driver
from replayer.failure import CheckFailure
from replayer.oracle import TraceContradiction
from replayer.pool_state import PoolState


def drain(driver: Driver, checks: Checks) -> None:
    """Probe the capacity, free all that lives, flush, and look at what is left. Ends the replay: nothing can follow.

    Raises:
        CheckFailure: C10 or C12, or whatever a call of the drain itself violates.
    """
    driver.records_flushes = False
    try:
        _finish_forwards(driver)
        if checks.on("C10"):
            if isinstance(driver, CompositeDriver) and isinstance(checks, JointChecks):
                probe_joint(driver, checks)
            else:
                for state in driver.by_number:
                    _probe_capacity(driver, checks, state)
        for state in driver.by_number:
            _release_reserved(driver, checks, state)
        if isinstance(driver, CompositeDriver) and isinstance(checks, JointChecks):
            free_joint(driver, checks)
        for state in driver.by_number:
            _free_all(driver, checks, state)
            driver._judge_log()
        for _ in range(2):
            for state in driver.by_number:
                _flush(driver, state)
        if checks.on("C12"):
            for state in driver.by_number:
                _require_empty(state)
                checks.hold("C12")
    except (
        TraceContradiction
    ) as error:  # the drain frees only what the oracle holds live, so this is an oracle fault
        raise CheckFailure("CALL", f"the drain contradicts the oracle: {error}") from None
    except CheckFailure as failure:
        failure.seq = driver.seq if failure.seq < 0 else failure.seq
        failure.call = failure.call or "drain after the last event"
        raise


def _finish_forwards(driver: Driver) -> None:
    for event in driver._events.values():
        event.fired = True
        driver.hazards.finished_through(event.number)
    for name in driver.pools:
        driver.hazards.gate_open[name] = True
    driver.hazards.leases.drop()
    driver.hazards.copies.finish_all()
    driver._judge_log()
    for state in driver.by_number:
        state.allocator.set_latest_forward_done_event(None)
        driver.hazards.set_latest(state.name, None)


def _flush(driver: Driver, state: PoolState) -> None:
    driver._call("drain", state.allocator.flush_for_allocation)
    driver._judge_log()


def _probe_capacity(driver: Driver, checks: Checks, state: PoolState) -> None:
    """``alloc(available_size())`` is served, and when nothing is available and every neighbour is packed, one page is not.

    Not with floats in the chain: they may always move over.
    """
    if not state.header.is_id_owner or any(other.is_float for other in driver.by_number):
        return
    for other in driver.by_number:
        _flush(driver, other)
    available = state.allocator.available_size()
    pages = min(available // state.page_size, len(state.allocator.free_virtual_ids))
    if pages:
        tokens = driver._call("drain", state.allocator.alloc, pages * state.page_size)
        driver._judge_log()
        answered = ids_in(tokens, "alloc", state.name)
        if answered is None:
            raise CheckFailure("C10", f"refused alloc({pages * state.page_size})", state.name, [], "served",
                               f"None, with available_size() {available}")  # fmt: skip
        checks.placed(state, whole_pages_growth(state, answered, pages * state.page_size).new_pages)
        checks.hold("C10")
    if state.allocator.available_size() == 0:
        tokens = driver._call("drain", state.allocator.alloc, state.page_size)
        driver._judge_log()
        if tokens is not None:
            raise CheckFailure(
                "C10", "served a page beyond available_size() 0 with all neighbours packed", state.name
            )
        checks.hold("C10")


def _release_reserved(driver: Driver, checks: Checks, state: PoolState) -> None:
    reserved = np.flatnonzero(state.reserved)
    if not len(reserved):
        return
    tokens = torch.from_numpy((reserved[:, None] * state.page_size + np.arange(state.page_size)).reshape(-1))
    waiting = state.awaiting_load >= len(reserved)
    checks.before_release_physical(state, tokens.numpy(), reserved_only=waiting)
    release = "cancel_physical_reservation" if waiting else "free_physical"
    driver._call("drain", getattr(state.allocator, release), tokens.to(driver.device))
    driver._judge_log()


def _free_all(driver: Driver, checks: Checks, state: PoolState) -> None:
    if state.allocator.free_group is not None:
        driver._call("drain", state.allocator.free_group_end)
        queued = driver._group.pop(state.name, None)
        if queued:
            driver._freed(state, np.concatenate(queued), in_steps=True)
    if not state.lazy and not state.is_float and state.awaiting_load:
        return  # pages bound without a load: nothing may move, so nothing can be freed
    pages = state.oracle.live_pages()
    if not len(pages):
        return
    checks.before_free(state, pages)
    tokens = torch.from_numpy(pages * state.page_size).to(driver.device)
    driver._call("drain", state.allocator.free, tokens)
    driver._freed(state, pages)


def _require_empty(state: PoolState) -> None:
    low, high = state.band()
    if high - low != state.reserved_count and not state.awaiting_load:
        raise CheckFailure(
            "C12",
            "everything is freed and no forward runs, yet the band is not empty",
            state.name,
            expected=f"{state.reserved_count} pages (reserved)",
            found=f"{high - low} pages: {state.holes()} holes, {state.pending()} pending",
        )
