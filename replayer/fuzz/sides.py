"""One set of allocators under a random program: its events, its figures, and what two sides must agree in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from recorder.trace import Header
from replayer.blame import ids_in, number_in
from replayer.fuzz.joint import joint_figures, without_known_faults
from replayer.pool_state import PoolState
from replayer.targets import TargetOptions, build_target


@dataclass
class Disagreement(AssertionError):
    """What a program found; an AssertionError, so that Hypothesis shrinks it.

    ``seq``: the event after which it shows, -1 if none. ``target``: the allocator that a replay shows it on.
    """

    message: str
    seq: int = -1
    target: TargetOptions | None = None

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"event {self.seq}: {self.message}" if self.seq >= 0 else self.message


class ForwardEnd:
    """The event at the end of a forward, or of a copy: true from ``forward_done`` on. A stream's wait for it tells the host nothing."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired

    def wait(self, stream: Any = None) -> None: ...


class MoveCount:
    """A store's log that only counts: batches and pages moved."""

    def __init__(self) -> None:
        self.batches = self.pages = 0

    def moved(self, pool: str, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None:
        self.batches += 1
        self.pages += int((dst_pages != src_pages).sum())

    def zeroed(self, pool: str, pages: torch.Tensor) -> None: ...


class Side:
    """Allocators of one kind over one buffer, wired as the header says. ``name`` is what a disagreement calls it."""

    def __init__(self, name: str, header: Header, target: TargetOptions) -> None:
        self.name, self.target = name, target
        self.moves = MoveCount()
        built = build_target(header, target, self.moves)
        self.states: dict[str, PoolState] = built.pools
        #: What joins the pools in a program of level ``composite``, and the slots of its state pool; else None.
        self.composite, self.slots = built.composite, built.slots
        self.pools: dict[str, Any] = {name: state.allocator for name, state in self.states.items()}
        self.events: dict[int, ForwardEnd] = {}
        self.copies: dict[int, ForwardEnd] = {}
        self.gate_open = True

    def event(self, number: int) -> ForwardEnd:
        return self.events.setdefault(number, ForwardEnd())

    def copy(self, number: int) -> ForwardEnd:
        """The end of a copy to or from the host."""
        return self.copies.setdefault(number, ForwardEnd())

    def shut_or_open(self, is_open: bool) -> None:
        self.gate_open = is_open
        if self.composite is not None:
            self.composite.set_disagg_move_gate(lambda: self.gate_open)
            return
        for made in self.pools.values():
            if made.disagg_move_gate is None:
                made.disagg_move_gate = lambda: self.gate_open

    def figures(self, pool: str) -> dict[str, Any]:
        """Everything about a pool that does not depend on whose allocator it is. The order of holes is not part of it: lists are sorted
        when a page is taken.

        Raises:
            Disagreement: the allocator raises when it is asked.
        """
        with self._asked(f"its figures of pool {pool!r}"):
            return self._figures(pool)

    def available(self, pool: str | None) -> int:
        """``available_size()``, without a pool the composite's; raises as `figures` does."""
        with self._asked(f"what is available of {'all pools' if pool is None else repr(pool)}"):
            return int((self.composite if pool is None else self.pools[pool]).available_size())

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise Disagreement(
                f"{self.name} does not tell {what}: {type(error).__name__}: {error}", target=self.target
            ) from None

    def _figures(self, pool: str) -> dict[str, Any]:
        state, made = self.states[pool], self.pools[pool]
        ids = made.free_virtual_ids
        return {
            "band": state.band(),
            "virtual_to_physical": made.virtual_to_physical.tolist(),
            "free_virtual_ids": None if ids is None else ids.tolist(),
            "holes": sorted(made._free_phys_pages.tolist()),
            "pending": sorted(made._pending_reuse_pages_cpu),
            "allocated_count": made.allocated_count(),
            "available_size": made.available_size(),
            "schedulable_available_size": made.schedulable_available_size(),
        }

    def joint_figures(self) -> dict[str, Any]:
        """What a composite says of its members together; nothing where there is none. Raises as `figures` does."""
        with self._asked("its figures of all pools together"):
            return self._joint_figures()

    def _joint_figures(self) -> dict[str, Any]:
        if self.composite is None:
            return {}
        found = joint_figures(self.composite, self.slots)
        if self.target.allocator == "sglang":
            return without_known_faults(self.composite, self.slots, found)
        return found

    def recorded_state(self) -> dict[str, dict[str, int | bytes | None]]:
        """The same as figures of a trace's state frame, so that a replay can compare them (C15)."""
        from recorder.trace.digests import mix64

        found: dict[str, dict[str, int | bytes | None]] = {}
        for name, state in self.states.items():
            figures, low_high = self.figures(name), state.band()
            marks = (
                {"low_watermark": low_high[0], "high_watermark": low_high[1]}
                if state.is_float
                else {"watermark": int(self.pools[name].watermark_physical)}
            )
            ids = self.pools[name].free_virtual_ids
            table = state.table("virtual_to_physical")[: self.pools[name].num_virtual_ids]
            found[name] = {
                **marks,
                **{
                    key: figures[key]
                    for key in ("allocated_count", "available_size", "schedulable_available_size")
                },
                "holes": len(figures["holes"]),
                "pending": len(figures["pending"]),
                "virtual_to_physical_mix64": mix64(table),
                "free_virtual_ids_mix64": None if ids is None else mix64(ids.numpy()),
            }
        return found


def ids_of(answer: Any, call: str) -> list[int] | None:
    """The ids that a call answered.

    Raises:
        CheckFailure: it answered something else.
    """
    ids = ids_in(answer, call, "")
    return None if ids is None else ids.tolist()


def number_of(answer: Any, call: str) -> int:
    """The number that a call answered, which may come late.

    Raises:
        CheckFailure: it answered something else.
    """
    return number_in(answer, call, "")
