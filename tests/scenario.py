"""Writes small synthetic traces: each call is made on kvtape's own allocator, and written down with what it answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allocator import FloatMultiEndedAllocator, MultiEndedAllocator
from recorder.trace import UNSET, EventKind, Header, PoolHeader, Provenance, TraceWriter
from replayer.hazards import Hazards, ReplayEvent
from replayer.targets import Target, TargetOptions, build_target


@dataclass(frozen=True)
class PoolShape:
    """A pool of a scenario: MHA with one head of ``head_dim`` float32 in ``layer_num`` layers, or a state pool."""

    name: str
    grow_direction: str
    kind: str = "mha"
    page_size: int = 1
    layer_num: int = 1
    head_dim: int = 8
    owner: str | None = None
    lazy: bool = True

    def entry_bytes(self) -> int:
        if self.kind == "mamba":
            return self.layer_num * (16 + 16) * self.head_dim
        return -(-self.layer_num * 2 * self.head_dim * 4 // 32) * 32

    def layout(self) -> dict[str, Any]:
        if self.kind == "mamba":
            return {
                "conv_state_shapes": [[4, self.head_dim]], "conv_dtype": "float32",
                "temporal_state_shape": [4, self.head_dim], "temporal_dtype": "float32",
            }  # fmt: skip
        return {"head_num": 1, "head_dim": self.head_dim, "dtype": "float32"}


def header_for(shapes: Sequence[PoolShape], total_bytes: int, move_cap: int = 4096) -> Header:
    page_size = max(shape.page_size for shape in shapes)
    floor = max(s.entry_bytes() * (1 if s.kind == "mamba" else page_size) for s in shapes)
    pages = {s.name: total_bytes // s.entry_bytes() // s.page_size for s in shapes}
    pools = [
        PoolHeader(
            name=s.name,
            kind=s.kind,
            grow_direction=s.grow_direction,
            page_size=s.page_size,
            entry_bytes=s.entry_bytes(),
            layer_num=s.layer_num,
            num_pages=pages[s.name],
            min_page_index=math.ceil(math.ceil(floor / s.entry_bytes()) / s.page_size),
            num_virtual_ids=pages[s.owner or s.name],
            is_id_owner=s.owner is None,
            lazy_compaction=s.lazy and s.grow_direction != "float",
            layout=s.layout(),
        )
        for s in shapes
    ]
    return Header(
        engine="kvtape",
        engine_version="scenario",
        pools=pools,
        provenance=Provenance(
            kind="synthetic",
            how="a scenario of the test suite, calls made on kvtape's allocator",
            hardware="a CPU",
        ),
        settings={"placement": "engine", "move_cap": move_cap},
        total_bytes=total_bytes,
        device="cpu",
    )


TWO_ENDS = (PoolShape("full", "down"), PoolShape("swa", "up", layer_num=2))


class _Copied:
    """The done event of a copy to or from the host, which is over when the scenario says so."""

    fired = False

    def query(self) -> bool:
        return self.fired

    def wait(self) -> None: ...


class _Silent:
    def moved(self, pool: str, dst_pages: torch.Tensor, src_pages: torch.Tensor) -> None: ...

    def zeroed(self, pool: str, pages: torch.Tensor) -> None: ...


class Scenario:
    """Call what an engine would call; ``close()`` gives the trace's path."""

    def __init__(
        self,
        path: Path,
        shapes: Sequence[PoolShape] = TWO_ENDS,
        total_bytes: int = 64 * 64,
        move_cap: int = 4096,
        results: bool = True,
        force: bool = False,
        leases_shut_gates: bool = False,
    ) -> None:
        self.header = header_for(shapes, total_bytes, move_cap)
        if leases_shut_gates:
            self.header.settings["move_gate"] = "leases"
        self.path = path
        states = self._target(self.header).pools
        self.writer = TraceWriter(path, self.header, force=force)
        self.pools: dict[str, MultiEndedAllocator] = {name: state.allocator for name, state in states.items()}
        self.numbers = {name: number for number, name in enumerate(self.pools)}
        self.results = results
        self.hazards = Hazards()
        self.events: dict[int, ReplayEvent] = {}
        self.gate_open = True
        self.open_leases: set[tuple[int, str]] = set()
        self.copies: dict[tuple[int, str], _Copied] = {}
        if leases_shut_gates:
            self._install_gates()
        self.seq = -1

    def _target(self, header: Header) -> Target:
        return build_target(header, TargetOptions(kv="stamp"), _Silent())

    def write(self, kind: EventKind, pool: str | None, result: Any = UNSET, **arguments: Any) -> None:
        self.seq += 1
        if not self.results:
            result = UNSET
        if isinstance(result, torch.Tensor):
            result = result.numpy()
        self.writer.append(
            kind,
            pool=-1 if pool is None else self.numbers[pool],
            time_us=self.seq * 10,
            result=result,
            **arguments,
        )

    def alloc(self, pool: str, need_size: int) -> list[int] | None:
        result = self.pools[pool].alloc(need_size)
        self.write(EventKind.ALLOC, pool, result, value=need_size)
        return None if result is None else result.tolist()

    def alloc_extend(self, pool: str, prefix: list[int], seq: list[int], last: list[int]) -> list[int] | None:
        lens = [torch.tensor(x, dtype=torch.int64) for x in (prefix, seq, last)]
        tokens = int((lens[1] - lens[0]).sum())
        result = self.pools[pool].alloc_extend(lens[0], lens[0], lens[1], lens[1], lens[2], tokens)
        self.write(EventKind.ALLOC_EXTEND, pool, result, value=tokens, list0=prefix, list1=seq, list2=last)
        return None if result is None else result.tolist()

    def alloc_decode(self, pool: str, seq: list[int], last: list[int]) -> list[int] | None:
        lens = [torch.tensor(x, dtype=torch.int64) for x in (seq, last)]
        result = self.pools[pool].alloc_decode(lens[0], lens[0], lens[1])
        self.write(EventKind.ALLOC_DECODE, pool, result, list1=seq, list2=last)
        return None if result is None else result.tolist()

    def alloc_with_virtual(self, pool: str, pages: list[int]) -> None:
        self.pools[pool].alloc_with_virtual(torch.tensor(pages, dtype=torch.int64))
        self.write(EventKind.ALLOC_WITH_VIRTUAL, pool, list0=pages)

    def free(self, pool: str, tokens: Sequence[int]) -> None:
        self.pools[pool].free(torch.tensor(list(tokens), dtype=torch.int64))
        self.write(EventKind.FREE, pool, list0=list(tokens))

    def free_segment(self, pool: str, tokens: Sequence[int], start: int) -> None:
        self.pools[pool].free_segment(torch.tensor(list(tokens), dtype=torch.int64), start_pos=start)
        self.write(EventKind.FREE_SEGMENT, pool, list0=list(tokens), value=start)

    def free_group_begin(self, pool: str) -> None:
        self.pools[pool].free_group_begin()
        self.write(EventKind.FREE_GROUP_BEGIN, pool)

    def free_group_end(self, pool: str) -> None:
        self.pools[pool].free_group_end()
        self.write(EventKind.FREE_GROUP_END, pool)

    def flush(self, pool: str, *, urgent: bool = False) -> int:
        made = self.pools[pool]
        result = made.flush_for_allocation() if urgent else made.flush_opportunistic()
        self.write(EventKind.FLUSH, pool, result, value=int(urgent))
        return result

    def make_room(self, pool: str, side: str, min_bytes: int) -> int:
        made = self.pools[pool]
        assert isinstance(made, FloatMultiEndedAllocator)
        result = made.make_room(side=side, min_bytes=min_bytes)  # type: ignore[arg-type]
        self.write(EventKind.MAKE_ROOM, pool, result, value=("low", "high").index(side), value2=min_bytes)
        return result

    def compact_holes(self, pool: str, side: str) -> int:
        made = self.pools[pool]
        assert isinstance(made, FloatMultiEndedAllocator)
        result = made.compact_holes(retreat_side=side)  # type: ignore[arg-type]
        self.write(EventKind.COMPACT_HOLES, pool, result, value=("low", "high").index(side))
        return result

    def forward_begin(
        self, pool: str, number: int, writes: Sequence[int] | None = None, reads: Sequence[int] | None = None
    ) -> None:
        event = self.event(number)
        self.pools[pool].set_latest_forward_done_event(event)
        self.pools[pool].set_inflight_forward(
            event, None if writes is None else torch.tensor(list(writes), dtype=torch.int64)
        )
        self.write(
            EventKind.FORWARD_BEGIN, pool, value=number, list0=None if writes is None else list(writes),
            list1=None if reads is None else list(reads),
        )  # fmt: skip

    def event(self, number: int) -> ReplayEvent:
        """The done event of this number, made when it is first asked for."""
        return self.events.setdefault(number, ReplayEvent(number, self.hazards))

    def forward_done(self, number: int) -> None:
        self.events[number].fired = True
        self.write(EventKind.FORWARD_DONE, None, value=number)

    def move_gate(self, *, is_open: bool) -> None:
        self.gate_open = is_open
        self._install_gates()
        self.write(EventKind.MOVE_GATE, None, value=int(is_open))

    def _install_gates(self) -> None:
        leases = self.header.settings.get("move_gate") == "leases"
        for made in self.pools.values():
            made.disagg_move_gate = lambda: self.gate_open and not (leases and self.open_leases)

    # -- places used from outside

    def lease_begin(
        self,
        number: int,
        pool: str,
        physical_pages: Sequence[int],
        virtual_pages: Sequence[int] | None = None,
    ) -> None:
        """Somebody outside uses these places until `lease_end`. ``virtual_pages`` says whose they are, -1 for reserved ones."""
        self.open_leases.add((number, pool))
        self.write(
            EventKind.LEASE_BEGIN, pool, value=number, list0=list(physical_pages),
            list1=None if virtual_pages is None else list(virtual_pages),
        )  # fmt: skip

    def export(self, number: int, pool: str, tokens: Sequence[int]) -> list[int]:
        """Lease the pages of these token ids, as an engine does that hands them to a transfer; their places."""
        pages = pages_of(tokens, self.pools[pool].page_size)
        places = [self.place_of(pool, page) for page in pages]
        self.lease_begin(number, pool, places, pages)
        return places

    def lease_end(self, number: int, pool: str) -> None:
        self.open_leases.discard((number, pool))
        self.write(EventKind.LEASE_END, pool, value=number)

    def backup(self, number: int, pool: str, tokens: Sequence[int], host_slots: Sequence[int]) -> None:
        """Queue a copy of the pages of these token ids to the host, in ascending order of pages; `copy_done` ends it."""
        pages = pages_of(tokens, self.pools[pool].page_size)
        places = [self.place_of(pool, page) for page in pages]
        self._begin_copy(EventKind.BACKUP_BEGIN, number, pool, places, host_slots, pages)

    def load_back(self, number: int, pool: str, tokens: Sequence[int], host_slots: Sequence[int]) -> None:
        """Queue a copy from the host into the pages of these token ids, which are live."""
        pages = pages_of(tokens, self.pools[pool].page_size)
        places = [self.place_of(pool, page) for page in pages]
        self._begin_copy(EventKind.LOAD_BACK_BEGIN, number, pool, places, host_slots, pages)

    def load_back_places(
        self, number: int, pool: str, physical_pages: Sequence[int], host_slots: Sequence[int]
    ) -> None:
        """Queue a copy from the host into reserved places (`alloc_physical`)."""
        self._begin_copy(EventKind.LOAD_BACK_BEGIN, number, pool, physical_pages, host_slots, None)

    def _begin_copy(
        self, kind: EventKind, number: int, pool: str, places: Sequence[int], host_slots: Sequence[int],
        pages: Sequence[int] | None,
    ) -> None:  # fmt: skip
        event = self.copies[number, pool] = _Copied()
        what = "load" if kind == EventKind.LOAD_BACK_BEGIN else "backup"
        self._tell_of_copy(pool, (pool, number, what), event)
        self.write(kind, pool, value=number, list0=list(places), list1=list(host_slots), list2=pages)

    def _tell_of_copy(self, pool: str, key: tuple[str, int, str], event: _Copied) -> None:
        self.pools[pool].set_hicache_transfer_done_event(key, event)

    def copy_done(self, number: int, pool: str | None = None) -> None:
        """A copy is over; without a pool, those of this number in all pools."""
        for (other, name), event in self.copies.items():
            if other == number and pool in (None, name):
                event.fired = True
        self.write(EventKind.HOST_COPY_DONE, pool, value=number)

    def host_free(self, pool: str, host_slots: Sequence[int]) -> None:
        self.write(EventKind.HOST_FREE, pool, list0=list(host_slots))

    def alloc_physical(self, pool: str, need_size: int) -> list[int] | None:
        result = self.pools[pool].alloc_physical(need_size)
        self.write(EventKind.ALLOC_PHYSICAL, pool, result, value=need_size)
        return None if result is None else result.tolist()

    def free_physical(self, pool: str, tokens: Sequence[int]) -> None:
        self.pools[pool].free_physical(torch.tensor(list(tokens), dtype=torch.int64))
        self.write(EventKind.FREE_PHYSICAL, pool, list0=list(tokens))

    def cancel_physical(self, pool: str, tokens: Sequence[int]) -> None:
        self.pools[pool].cancel_physical_reservation(torch.tensor(list(tokens), dtype=torch.int64))
        self.write(EventKind.CANCEL_PHYSICAL, pool, list0=list(tokens))

    def bind(self, pool: str, pages: Sequence[int], physical_pages: Sequence[int]) -> None:
        self.pools[pool].bind(torch.tensor(list(pages)), torch.tensor(list(physical_pages)))
        self.write(EventKind.BIND, pool, list0=list(pages), list1=list(physical_pages))

    def place_of(self, pool: str, page: int) -> int:
        return int(self.pools[pool].virtual_to_physical[page])

    def close(self) -> Path:
        self.writer.close()
        return self.path


def pages_of(tokens: Sequence[int], page_size: int) -> list[int]:
    """Virtual pages of token ids, ascending."""
    return np.unique(np.array(tokens, dtype=np.int64) // page_size).tolist()
