"""Composites on the device: seeded programs, answer by answer and place by place those of strategy ``batched`` on the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from allocator import UnifiedMambaSlotAllocator, kv_store_for
from allocator.lookup import DEVICE_STRATEGY
from gpu.verdicts import Results
from tests.allocator.composite_program import our_composite
from tests.allocator.composite_state import composite_state, live_pages, pools_of
from tests.engine.composites import LAYOUTS, Scheduler

PAGE_SIZES = (1, 4, 16)
STEPS = 200
#: Between two looks at all the state, which wait for the device, a composite works on what it knows.
LOOK_EVERY = 20
#: Arguments that are in host memory.
HOST_COPIES = {"alloc_extend": (1, 3), "alloc_decode": (1,)}


class OnDevice:
    """A composite whose ids are on ``device``, for a program that has them on the CPU."""

    def __init__(self, made: Any, device: str) -> None:
        self._made, self._device = made, device

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._made, name)
        if not callable(value):
            return value
        on_host = HOST_COPIES.get(name, ())

        def call(*arguments: Any, **keywords: Any) -> Any:
            answer = value(
                *(each if at in on_host else self._sent(each) for at, each in enumerate(arguments)),
                **keywords,
            )
            return answer.cpu() if isinstance(answer, torch.Tensor) else answer

        return call

    def _sent(self, argument: Any) -> Any:
        return argument.to(self._device) if isinstance(argument, torch.Tensor) else argument


class Writing(Scheduler):
    """A program whose forwards write: a number into the first bytes of every page of a token, which has to move with the page."""

    def __init__(self, made: Any, device: str, seed: int) -> None:
        super().__init__(made, seed, UnifiedMambaSlotAllocator)
        self._device = device
        self._written: dict[int, int] = {}
        self._pools = {name: pool for name, pool in pools_of(made).items() if name != "mamba"}

    def launch(self, written: torch.Tensor) -> None:
        virtual_pages = torch.unique(written // self.page_size)
        number = len(self.events) + 1
        self._written.update(dict.fromkeys(virtual_pages.tolist(), number))
        on_device = virtual_pages.to(self._device)
        for name, pool in self._pools.items():
            # Pages without a place are written to the padding page, as on a real engine.
            places = pool.virtual_to_physical[on_device].clamp(min=0)
            self._first_bytes(name).index_fill_(0, places, number)
        super().launch(written)

    def _first_bytes(self, name: str) -> torch.Tensor:
        """int64 ``[num_pages]``, a view of the pool."""
        return self.made.unified_buffer.pages(name).view(torch.int64)[:, 0]

    def misplaced(self) -> str:
        """The first page whose number is not with it; empty if there is none."""
        for name, pool in self._pools.items():
            found = self._first_bytes(name).tolist()
            for virtual, physical in live_pages(pool).items():
                if found[physical] != self._written[virtual]:
                    return f"{name}: bytes of virtual page {virtual} are not on page {physical}"
        return ""


def check_composites(results: Results, device: str, strategies: list[str]) -> None:
    """Every layout and page size. Bytes are compared too: each live page has a number in it that has to move with it."""
    slowest = 0.0
    for strategy in sorted(strategies, key=lambda each: each != DEVICE_STRATEGY):
        done, wanted, failure, moved, waits = 0, len(LAYOUTS) * len(PAGE_SIZES), "", 0, 0
        for layout, page_size in ((layout, page_size) for layout in LAYOUTS for page_size in PAGE_SIZES):
            if not results.has_time(
                f"composites from {layout}, pages of {page_size} on, {strategy}", slowest
            ):
                break
            begin = time.monotonic()
            try:
                failure, program = _compare(layout, page_size, strategy, device)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            slowest = max(slowest, time.monotonic() - begin)
            if failure:
                failure = f"{layout}, pages of {page_size}: {failure}"
                break
            done, moved = done + 1, moved + program.moved
            waits += sum(getattr(pool, "blocking_reads", 0) for pool in pools_of(program.made).values())
        results.row(
            "composites", strategy=strategy, equal=done, of=wanted, moved=moved, waits=waits, difference=failure or "none"
        )  # fmt: skip
        if done or failure:
            found = failure or f"{done} of {wanted} programs equal"
            results.add(f"composites, {strategy}", not failure, found, "as strategy batched on the CPU")


def _compare(layout: str, page_size: int, strategy: str, device: str) -> tuple[str, Writing]:
    """The first difference, empty if there is none, and the program on the device."""
    expected = _program(layout, page_size, "batched", "cpu")
    found = _program(layout, page_size, strategy, device)
    for number in range(STEPS):
        answer, wanted = found.step(), expected.step()
        if answer != wanted:
            return f"step {number} answered {str(answer)[:80]}, not {str(wanted)[:80]}", found
        if number % LOOK_EVERY == LOOK_EVERY - 1 or number == STEPS - 1:
            if _places(found.made) != _places(expected.made):
                return f"after step {number} places or lists differ", found
            if found.sizes() != expected.sizes():
                return f"after step {number} sizes differ", found
            if misplaced := found.misplaced():
                return f"after step {number} {misplaced}", found
    return "", found


def _places(made: Any) -> dict[str, Any]:
    """Without a float's note that its borders are to be looked at: one without holes may have it or not, by when its numbers come."""
    state = composite_state(made)
    for pool in state.values():
        low, high, next_hole_end, _ = pool["span"]
        pool["span"] = [low, high, next_hole_end]
    return state


def _program(layout: str, page_size: int, strategy: str, device: str) -> Writing:
    made = our_composite(layout, page_size, lazy=True, strategy=strategy, store=kv_store_for, device=device)
    return Writing(made if device == "cpu" else OnDevice(made, device), device, 40 + page_size)
