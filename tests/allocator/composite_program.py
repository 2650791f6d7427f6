"""Seeded programs of all public calls of a composite, SGLang's or ours: what `tests.engine.composites.Scheduler` does, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import allocator
from allocator.composites.members import Composite
from tests.engine.composites import Event, Pages, Scheduler

REFUSED = "refused"


def our_composite(
    layout: str,
    page_size: int,
    *,
    lazy: bool,
    strategy: str,
    store: Callable[[Any, str], Any] | None = None,
    layers: tuple[int, int] = (1, 3),
    device: str = "cpu",
    **classes: Any,
) -> Any:
    """The composite of ours for what `tests.engine.composites.composite` makes of SGLang's. ``store`` makes a pool's memory from the buffer
    and the pool's name; by default nothing is kept. ``layers``: of the full and the window pool where there is no other."""

    def tokens(name: str, layers: int, direction: str) -> Any:
        return allocator.MHASubPoolSpec(
            name=name, layer_num=layers, grow_direction=direction, head_num=1, head_dim=16, store_dtype=torch.float16
        )  # fmt: skip

    states = allocator.MambaSubPoolSpec(
        name="mamba", layer_num=1, grow_direction="up", conv_state_shapes=((3, 32),), conv_dtype=torch.float16,
        temporal_state_shape=(4, 32), temporal_dtype=torch.float16,
    )  # fmt: skip
    specs = {
        "full and swa": [tokens("full", layers[0], "down"), tokens("swa", layers[1], "up")],
        "full and mamba": [tokens("full", 1, "down"), states],
        "full, swa and mamba": [tokens("full", 2, "down"), tokens("swa", 3, "float"), states],
    }[layout]
    buffer = allocator.UnifiedKVPool(
        total_bytes=96 * 128 * page_size, sub_pool_specs=specs, device=device, page_size=page_size
    )
    common: dict[str, Any] = {
        "unified_buffer": buffer, "device": device, "page_size": page_size, "lazy_compaction": lazy, "strategy": strategy,
        **classes,
    }  # fmt: skip
    names = {"full_kv_pool": "full", "swa_kv_pool": "swa", "mamba_pool": "mamba"}
    memory = {
        slot: Pages() if store is None else store(buffer, name)
        for slot, name in names.items()
        if name in {spec.name for spec in specs}
    }
    kvcache = SimpleNamespace(**memory)
    if layout == "full and swa":
        return allocator.UnifiedSWATokenToKVPoolAllocator(kvcache=kvcache, **common)
    if layout == "full and mamba":
        return allocator.UnifiedMambaTokenToKVPoolAllocator(kvcache=kvcache, **common)
    return allocator.UnifiedMambaSWATokenToKVPoolAllocator(
        kvcache=kvcache, mamba_kvcache=kvcache.mamba_pool, full_max_total_num_tokens=60 * page_size,
        swa_max_total_num_tokens=40 * page_size, **common,
    )  # fmt: skip


class Program(Scheduler):
    """One composite and what was done to it. Two with the same seed do the same, as long as they are answered the same."""

    def __init__(self, made: Any, seed: int) -> None:
        self.is_ours = isinstance(made, Composite)
        super().__init__(made, seed, allocator.UnifiedMambaSlotAllocator if self.is_ours else None)
        self.disagg_open = True
        if made.lazy_compaction:
            made.set_disagg_move_gate(lambda: self.disagg_open)
        self.has_window = hasattr(made, "swa_attn_allocator")
        self.group_open = False
        self.reserved: torch.Tensor | None = None
        self.counts: dict[str, int] = {}

    def step(self) -> Any:
        # Without a window tokens are small, and the buffer holds many more of them.
        most, finish = (3, 5.0) if self.has_window else (8, 3.0)
        steps: list[tuple[float, Callable[[], Any]]] = [
            (6, lambda: self.prefill(self.chance.randint(1, most))), (4, self.grow), (4, self.decode), (finish, self.finish),
            (1, self.finish_several), (2, self.group), (1.5, self.gates), (3, self.flush), (0.25, self.clear), (1.5, self.refusals),
            (1, self.segments), (1, self.questions),
        ]  # fmt: skip
        if self.has_window:
            steps += [
                (3, self.leave_window),
                (2, self.prefill_tail),
                (1, self.ensure),
                (1.5, self.load_back),
                (1, self.transfer),
            ]
        if self.slots is not None:
            steps += [(2.5, self.state), (0.7, self.state_group), (0.5, self.prepare)]
        weights = [weight for weight, _ in steps]
        (chosen,) = self.chance.choices([step for _, step in steps], weights)
        name = getattr(chosen, "__name__", "")
        self.counts[name] = self.counts.get(name, 0) + 1
        return chosen()

    # -- allocs

    def grow(self) -> Any:
        """Some of the requests go on with a chunk of their prompt."""
        if not self.running:
            return None
        chosen = sorted(
            self.chance.sample(range(len(self.running)), self.chance.randint(1, min(3, len(self.running))))
        )
        added = [self.chance.randint(1, 3 * self.page_size) for _ in chosen]
        if self.page_size == 1:
            tokens = self.made.alloc(sum(added))
        else:
            prefix = torch.tensor([len(self.running[at]) for at in chosen])
            seq = prefix + torch.tensor(added)
            last = torch.stack([self.running[at][-1] for at in chosen])
            tokens = self.made.alloc_extend(prefix, prefix, seq, seq, last, sum(added))
        if tokens is None:
            self.refused += 1
            return None
        for at, new in zip(chosen, tokens.split(added), strict=True):
            self.running[at] = torch.cat([self.running[at], new])
        self.launch(tokens)
        return tokens.tolist()

    def prefill_tail(self) -> Any:
        """A request whose KV comes from elsewhere: only the end of it is inside the window."""
        count = self.chance.randint(1, 6 * self.page_size)
        tail = self.chance.randint(0, count)
        none, seq = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
        tokens = self.made.alloc_extend_swa_tail(none, none, seq, seq, none - 1, count, tail)
        if tokens is None:
            self.refused += 1
            return None
        self.running.append(tokens)
        left = (count - tail) // self.page_size * self.page_size
        self.without_window.append(left if tail else -(-count // self.page_size) * self.page_size)
        return tokens.tolist()

    def decode(self) -> Any:
        # A request that lies outside the window with all of its pages goes on in a page that has no window side: not a thing engines do.
        if any(left > len(tokens) for tokens, left in zip(self.running, self.without_window, strict=True)):
            return None
        return super().decode()

    def ensure(self) -> bool:
        full, swa = (self.chance.randint(0, 12 * self.page_size) for _ in range(2))
        if self.chance.random() < 0.3:
            swa = full
        return bool(self.made.ensure_capacity(full, swa))

    # -- the window

    def load_back(self) -> Any:
        """Window pages come back from the host: places are reserved, perhaps for a while, then bound and the copy is queued; or it is
        called off."""
        swa, page = self.made.swa_attn_allocator, self.page_size
        if self.reserved is None:
            self.reserved = swa.alloc_physical(self.chance.randint(1, 3) * page)
            if self.reserved is None:
                self.refused += 1
                return None
            # An eager pool moves pages at every free: nothing may come between.
            if self.made.lazy_compaction and self.chance.random() < 0.6:
                return self.reserved.tolist()
        places, self.reserved = self.reserved, None
        count = len(places)
        candidates = [
            at for at, left in enumerate(self.without_window) if count <= left <= len(self.running[at])
        ]
        if not candidates or self.chance.random() < 0.3:
            swa.cancel_physical_reservation(places)
            return "called off"
        at = self.chance.choice(candidates)
        end = self.without_window[at] // page * page
        tokens = self.running[at][end - count : end]
        self.made.set_full_to_swa_mapping(tokens, places)
        self.made.clear_full_to_swa_mapping(tokens)
        self.without_window[at] = end - count
        assert self.made.translate_loc_from_full_to_swa(tokens).tolist() == places.tolist()
        self.made.set_hicache_transfer_done_event((at, "load"), Event())
        return places.tolist()

    def transfer(self) -> Any:
        """A cache keeps the ids of one request and takes the window page of another for them, as SGLang's does."""
        swa, page = self.made.swa_attn_allocator, self.page_size
        keepers = [at for at, left in enumerate(self.without_window) if page <= left <= len(self.running[at])]
        givers = [
            at
            for at, left in enumerate(self.without_window)
            if left % page == 0 and left + page <= len(self.running[at])
        ]
        pairs = [(keeper, giver) for keeper in keepers for giver in givers if keeper != giver]
        if self.group_open or not pairs:
            return None
        keeper, giver = self.chance.choice(pairs)
        end, begin = self.without_window[keeper], self.without_window[giver]
        kept = self.running[keeper][end - page : end : page] // page
        incoming = self.running[giver][begin : begin + page : page] // page
        physical = swa.virtual_to_physical[incoming]
        swa.bind(kept, physical)
        if self.is_ours:
            swa.unbind(incoming)
        else:
            swa.virtual_to_physical.index_fill_(0, incoming, -1)
        self.without_window[keeper] -= page
        self.without_window[giver] += page
        return physical.tolist()

    # -- frees

    def finish(self) -> None:
        if not self.running:
            return
        at = self.chance.randrange(len(self.running))
        tokens, left = self.running.pop(at), min(self.without_window.pop(at), 10**9)
        outside, inside = tokens[:left], tokens[left:]
        chance = self.chance.random()
        if left == 0 and chance < 0.4:
            self.made.free_segment(tokens, start_pos=0)
        elif chance < 0.4:
            self.made.free_full_segment(outside, start_pos=0)
            self.made.free_segment(inside, start_pos=left)
        elif chance < 0.6 and self.has_window and left < len(tokens):
            self.made.free_swa(tokens)
            self.made.free_full(tokens)
        else:
            self.made.free(tokens)

    def segments(self) -> None:
        """A request that goes in two pieces of its row."""
        if not self.running:
            return
        at = self.chance.randrange(len(self.running))
        tokens, left = self.running[at], self.without_window[at]
        middle = len(tokens) // 2 // self.page_size * self.page_size
        if left or not middle:
            return
        self.running.pop(at)
        self.without_window.pop(at)
        self.made.free_segments([(tokens[:middle], 0), (tokens[middle:], middle)])

    def finish_several(self) -> None:
        if not self.group_open:
            super().finish_several()

    def group(self) -> Any:
        """A free group opens, stays open while other calls are made, and closes; sometimes twice."""
        if not self.group_open:
            self.made.free_group_begin()
            self.group_open = True
            return None
        if self.slots is not None and self.chance.random() < 0.3:
            self.made.flush_deferred_full_frees()
            return None
        self.made.free_group_end()
        self.group_open = False
        if self.chance.random() < 0.3:
            self.made.free_group_end()
        return None

    def clear(self) -> None:
        self.made.clear()
        self.group_open = False
        self.running, self.without_window, self.states, self.reserved = [], [], [], None

    # -- states

    def state_group(self) -> list[Any]:
        count = self.chance.randint(1, 3)
        taken = []
        self.slots.alloc_group_begin(count)
        for _ in range(self.chance.randint(0, count)):
            slot = self.slots.alloc(1)
            if slot is not None:
                self.states.append(slot)
            taken.append(None if slot is None else slot.tolist())
        self.slots.alloc_group_end()
        return taken

    def prepare(self) -> None:
        self.made.prepare_mamba_allocation(self.chance.randint(1, 4))

    # -- the rest

    def flush(self) -> int:
        for event in self.events[:-1]:
            event.fired = True
        if self.events and self.chance.random() < 0.3:
            self.events[-1].fired = True
        moved = int(self.made.flush_opportunistic())
        self.moved += moved
        return moved

    def gates(self) -> tuple[bool, bool]:
        self.gate_open, self.disagg_open = self.chance.random() < 0.7, self.chance.random() < 0.8
        return self.gate_open, self.disagg_open

    def refusals(self) -> Any:
        """What both refuse: SGLang by an assertion, ours by an error of its own; and both go on as if nothing had been said."""
        kind = self.chance.randrange(5)
        if kind == 0 and self.group_open:
            return self.refused_call(self.made.free_group_begin)
        if kind == 1 and self.page_size > 1 and self.running:
            return self.refused_call(lambda: self.made.free_segment(self.running[0], start_pos=1))
        if kind == 2 and self.page_size > 1 and self.made.available_size() >= self.page_size:
            return self.refused_call(lambda: self.made.alloc(1))
        if kind == 3 and self.has_window:
            none = torch.zeros(1, dtype=torch.int64)
            return self.refused_call(
                lambda: self.made.alloc_extend_swa_tail(none, none, none + 1, none + 1, none - 1, 1, 2)
            )
        if kind == 4 and not self.made.lazy_compaction:
            return self.refused_call(lambda: self.made.set_disagg_move_gate(lambda: True))
        return None

    def refused_call(self, call: Callable[[], Any]) -> str:
        expected = allocator.AllocatorError if self.is_ours else AssertionError
        try:
            call()
        except expected:
            return REFUSED
        raise AssertionError("a wrong call was not refused")

    def questions(self) -> dict[str, Any]:
        """Answers that change nothing."""
        made, page = self.made, self.page_size
        held = torch.cat([*self.running, torch.zeros(1, dtype=torch.int64)])
        found: dict[str, Any] = {
            "transfer": made.translate_kv_indices_for_transfer(held).tolist(),
            "slots": [made.is_slot_allocated(int(token)) for token in held[:4]],
            "size": made.size, "full": made.size_full, "draft": made.draft_virtual_id_space,
            "free pages": None if made.get_all_free_pages() is None else made.get_all_free_pages().tolist(),
            "tables": [made.full_v2p_page_table.tolist(), made.full_p2v_page_table.tolist()],
        }  # fmt: skip
        if self.slots is not None and len(self.states):
            states = torch.cat(self.states)
            found["states"] = [
                self.slots.size, self.slots.available_size(), self.slots.translate(states).tolist(), self.slots.free_slots.tolist(),
                self.slots.is_slot_allocated(int(states[0])),
            ]  # fmt: skip
        if not self.has_window:
            return {**found, "states": made.size_mamba}
        full, swa = (self.chance.randint(-1, 20 * page) for _ in range(2))
        evictable = [self.chance.randint(0, 20 * page) for _ in range(2)]
        tree = SimpleNamespace(
            full_evictable_size=lambda: evictable[0], swa_evictable_size=lambda: evictable[1]
        )
        found |= {
            "swa": made.translate_swa_indices_for_transfer(held).tolist(), "swa table": made.swa_v2p_page_table.tolist(),
            "size swa": made.size_swa, "capacities": made.swa_capacity_and_available(full_capacity=7, swa_capacity=9),
            "current": (made.current_full_capacity, made.current_swa_capacity),
            "reserve": [
                made.can_reserve(full, swa, empty_pool=empty, require_token_slack=slack, full_evictable_tokens=more)
                for empty in (False, True) for slack in (False, True) for more in (0, evictable[0])
            ],
            "prealloc": made.prealloc_fits(
                tree, max(0, full), max(0, swa), full_budget_tokens=max(0, full) + 3, swa_budget_tokens=max(0, swa) + page
            ),
            "ceiling": (made.prealloc_ceiling_fits(full, swa), made.prealloc_fits_assumes_reclaim()),
            "demand": made.get_extend_allocation_demand(
                torch.tensor([3, 0]), torch.tensor([9, 5]), conservative_num_tokens=77, shard_size=self.chance.randint(1, 2)
            ),
        }  # fmt: skip
        if hasattr(made, "reclaim_plan"):
            found["plans"] = [
                made.reclaim_plan(
                    full,
                    swa,
                    full_evictable_tokens=evictable[0],
                    swa_evictable_tokens=evictable[1],
                    prefer_swa=prefer,
                )
                for prefer in (False, True)
            ]
        return found

    def sizes(self) -> dict[str, Any]:
        found = super().sizes()
        if self.reserved is not None:
            # SGLang takes reserved pages of a float for lost ones.
            assert not self.is_ours or found["violations"] == []
            del found["violations"]
        return found

    def places(self) -> dict[str, Any]:
        found = super().places()
        for name in found:
            pool = getattr(
                self.made,
                {"full": "full_attn_allocator", "swa": "swa_attn_allocator", "mamba": "mamba_allocator"}[
                    name
                ],
            )
            # The order counts too: a request that takes all holes takes them as they came.
            found[name]["holes"] = pool._free_phys_pages.tolist()
            found[name]["reserved"] = pool._pending_hicache_load_pages
            found[name]["blocked"] = pool.moves_blocked()
            found[name]["sizes"] = (pool.available_size(), pool.schedulable_available_size())
        return found
