"""Writes small traces of level ``composite``: each call is made on kvtape's own composite, and written down with what it answered.

The sister of `tests.scenario`. Calls without a pool's name are the composite's; those of `Scenario` that name one go to that member.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recorder.trace import COMPOSITE, EventKind, Header
from replayer.targets import Target, TargetOptions, build_target
from tests.scenario import PoolShape, Scenario, _Silent

#: Layouts by name, page size 4 unless asked otherwise. 64 bytes a token of full, 128 of swa, and states of 64 bytes.
SWA = (PoolShape("full", "down"), PoolShape("swa", "up", layer_num=2, owner="full"))
MAMBA = (PoolShape("full", "down"), PoolShape("mamba", "up", kind="mamba", head_dim=2))
MAMBA_SWA = (
    PoolShape("full", "down"),
    PoolShape("swa", "float", layer_num=2, owner="full"),
    PoolShape("mamba", "up", kind="mamba", head_dim=2),
)


def sized(shapes: Sequence[PoolShape], page_size: int, *, lazy: bool = True) -> tuple[PoolShape, ...]:
    """The layout with pages of so many tokens (states keep pages of one slot)."""
    return tuple(
        PoolShape(
            shape.name, shape.grow_direction, shape.kind, 1 if shape.kind == "mamba" else page_size, shape.layer_num,
            shape.head_dim, shape.owner, lazy,
        )
        for shape in shapes
    )  # fmt: skip


class CompositeScenario(Scenario):
    """Call what an engine would call; ``close()`` gives the trace's path.

    Args:
        layout: `SWA`, `MAMBA` or `MAMBA_SWA`, with pages of ``page_size`` tokens.
        settings: of the header: ``max_state_slots``, ``full_max_total_num_tokens`` and so on.
    """

    def __init__(
        self,
        path: Path,
        layout: Sequence[PoolShape] = SWA,
        total_bytes: int = 64 * 256,
        *,
        page_size: int = 4,
        lazy: bool = True,
        results: bool = True,
        force: bool = False,
        leases_shut_gates: bool = False,
        move_cap: int = 4096,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._settings = settings or {}
        super().__init__(
            path,
            sized(layout, page_size, lazy=lazy),
            total_bytes,
            move_cap,
            results,
            force,
            leases_shut_gates,
        )
        self.page_size = page_size

    def _target(self, header: Header) -> Target:
        header.level = COMPOSITE
        header.settings |= self._settings
        target = build_target(header, TargetOptions(kv="stamp"), _Silent())
        self.composite, self.slots = target.composite, target.slots
        header.allocator = type(target.composite).__name__
        return target

    def _install_gates(self) -> None:
        leases = self.header.settings.get("move_gate") == "leases"
        self.composite.set_disagg_move_gate(lambda: self.gate_open and not (leases and self.open_leases))

    def _tell_of_copy(self, pool: str, key: Any, event: Any) -> None:
        self.composite.set_hicache_transfer_done_event(key, event)

    # -- alloc

    def take(self, need_size: int) -> list[int] | None:
        """``alloc``."""
        result = self.composite.alloc(need_size)
        self.write(EventKind.ALLOC, None, result, value=need_size)
        return None if result is None else result.tolist()

    def extend(self, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        """``alloc_extend``."""
        lens = [torch.tensor(x, dtype=torch.int64) for x in (prefix, seq, last)]
        tokens = int((lens[1] - lens[0]).sum())
        result = self.composite.alloc_extend(lens[0], lens[0], lens[1], lens[1], lens[2], tokens)
        self.write(EventKind.ALLOC_EXTEND, None, result, value=tokens, list0=prefix, list1=seq, list2=last)
        return None if result is None else result.tolist()

    def extend_swa_tail(self, prefix: int, seq: int, last: int, swa_tail_len: int) -> list[int] | None:
        """``alloc_extend_swa_tail``."""
        lens = [torch.tensor([x], dtype=torch.int64) for x in (prefix, seq, last)]
        result = self.composite.alloc_extend_swa_tail(
            lens[0], lens[0], lens[1], lens[1], lens[2], seq - prefix, swa_tail_len
        )
        self.write(
            EventKind.ALLOC_EXTEND_SWA_TAIL, None, result, value=seq - prefix, value2=swa_tail_len, list0=[prefix],
            list1=[seq], list2=[last],
        )  # fmt: skip
        return None if result is None else result.tolist()

    def decode(self, seq: list[int], last: list[int]) -> list[int] | None:
        """``alloc_decode``."""
        lens = [torch.tensor(x, dtype=torch.int64) for x in (seq, last)]
        result = self.composite.alloc_decode(lens[0], lens[0], lens[1])
        self.write(EventKind.ALLOC_DECODE, None, result, list1=seq, list2=last)
        return None if result is None else result.tolist()

    def ensure_capacity(self, full_tokens: int, swa_tokens: int) -> bool:
        answer = bool(self.composite.ensure_capacity(full_tokens, swa_tokens))
        self.write(EventKind.ENSURE_CAPACITY, None, int(answer), value=full_tokens, value2=swa_tokens)
        return answer

    def set_full_to_swa_mapping(self, tokens: Sequence[int], swa_physical_tokens: Sequence[int]) -> None:
        self.composite.set_full_to_swa_mapping(_ids(tokens), _ids(swa_physical_tokens))
        self.write(
            EventKind.SET_FULL_TO_SWA_MAPPING, None, list0=list(tokens), list1=list(swa_physical_tokens)
        )

    # -- free

    def give(self, tokens: Sequence[int]) -> None:
        """``free``."""
        self.composite.free(_ids(tokens))
        self.write(EventKind.FREE, None, list0=list(tokens))

    def give_segment(self, tokens: Sequence[int], start: int = 0) -> None:
        """``free_segment``."""
        self.composite.free_segment(_ids(tokens), start_pos=start)
        self.write(EventKind.FREE_SEGMENT, None, list0=list(tokens), value=start)

    def free_swa(self, tokens: Sequence[int]) -> None:
        self.composite.free_swa(_ids(tokens))
        self.write(EventKind.FREE_SWA, None, list0=list(tokens))

    def free_swa_segment(self, tokens: Sequence[int], start: int = 0) -> None:
        self.composite.free_swa_segment(_ids(tokens), start_pos=start)
        self.write(EventKind.FREE_SWA_SEGMENT, None, list0=list(tokens), value=start)

    def free_full(self, tokens: Sequence[int]) -> None:
        self.composite.free_full(_ids(tokens))
        self.write(EventKind.FREE_FULL, None, list0=list(tokens))

    def free_full_segment(self, tokens: Sequence[int], start: int = 0) -> None:
        self.composite.free_full_segment(_ids(tokens), start_pos=start)
        self.write(EventKind.FREE_FULL_SEGMENT, None, list0=list(tokens), value=start)

    def group_begin(self) -> None:
        """``free_group_begin``."""
        self.composite.free_group_begin()
        self.write(EventKind.FREE_GROUP_BEGIN, None)

    def group_end(self) -> None:
        """``free_group_end``."""
        self.composite.free_group_end()
        self.write(EventKind.FREE_GROUP_END, None)

    def flush_deferred_full_frees(self) -> None:
        self.composite.flush_deferred_full_frees()
        self.write(EventKind.FLUSH_DEFERRED_FULL_FREES, None)

    # -- states

    def prepare_mamba_allocation(self, target_size: int) -> None:
        self.composite.prepare_mamba_allocation(target_size)
        self.write(EventKind.PREPARE_MAMBA_ALLOCATION, None, value=target_size)

    def slot_alloc(self, need_size: int = 1) -> list[int] | None:
        result = self.slots.alloc(need_size)
        self.write(EventKind.SLOT_ALLOC, "mamba", result, value=need_size)
        return None if result is None else result.tolist()

    def slot_free(self, slots: Sequence[int]) -> None:
        self.slots.free(_ids(slots))
        self.write(EventKind.SLOT_FREE, "mamba", list0=list(slots))

    # -- the rest

    def flush_all(self) -> int:
        """``flush_opportunistic``."""
        result = int(self.composite.flush_opportunistic())
        self.write(EventKind.FLUSH, None, result, value=0)
        return result

    def launch(
        self, number: int, writes: Sequence[int] | None = None, reads: Sequence[int] | None = None
    ) -> None:
        """A forward on all pools: ``set_latest_forward_done_event`` and ``set_inflight_forward``; `forward_done` ends it."""
        event = self.event(number)
        self.composite.set_latest_forward_done_event(event)
        self.composite.set_inflight_forward(event, None if writes is None else _ids(writes))
        self.write(
            EventKind.FORWARD_BEGIN, None, value=number, list0=None if writes is None else list(writes),
            list1=None if reads is None else list(reads),
        )  # fmt: skip

    def clear(self) -> None:
        self.composite.clear()
        self.write(EventKind.CLEAR, None)


def _ids(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)
