"""SGLang's composite allocators over small pools of one buffer, and seeded calls on them as a scheduler makes them."""

from __future__ import annotations

import importlib
import random
from typing import Any

import torch

from replayer.targets_sglang import POOL_MODULE
from replayer.targets_sglang_composite import join_sglang_pools, sglang_slots

LAYOUTS = ("full and swa", "full and mamba", "full, swa and mamba")


class Event:
    """The end of a forward: a stream's wait for it tells the host nothing."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired

    def wait(self) -> None: ...


class Pages:
    """Memory of a pool of which nothing is kept: which page goes where is what is compared."""

    def move_physical_pages(self, dst: torch.Tensor, src: torch.Tensor, page_size: int) -> None: ...


def composite(layout: str, page_size: int, *, lazy: bool, layers: tuple[int, int] = (1, 3)) -> Any:
    """SGLang's composite for a layout of `LAYOUTS`, of whichever classes stand in its modules now."""
    memory = importlib.import_module(POOL_MODULE)

    def tokens(name: str, layers: int, direction: str) -> Any:
        return memory.MHASubPoolSpec(
            name=name, layer_num=layers, grow_direction=direction, head_num=1, head_dim=16, store_dtype=torch.float16
        )  # fmt: skip

    states = memory.MambaSubPoolSpec(
        name="mamba", layer_num=1, grow_direction="up", conv_state_shapes=((3, 32),), conv_dtype=torch.float16,
        temporal_state_shape=(4, 32), temporal_dtype=torch.float16,
    )  # fmt: skip
    specs = {
        "full and swa": [tokens("full", layers[0], "down"), tokens("swa", layers[1], "up")],
        "full and mamba": [tokens("full", 1, "down"), states],
        "full, swa and mamba": [tokens("full", 2, "down"), tokens("swa", 3, "float"), states],
    }[layout]
    buffer = memory.UnifiedKVPool(
        total_bytes=96 * 128 * page_size, sub_pool_specs=specs, device="cpu", enable_memory_saver=False,
        page_size=page_size,
    )  # fmt: skip
    most = {"full_max_total_num_tokens": 60 * page_size, "swa_max_total_num_tokens": 40 * page_size}
    return join_sglang_pools(
        buffer, {spec.name: Pages() for spec in specs}, page_size=page_size, lazy_compaction=lazy,
        **(most if layout == "full, swa and mamba" else {}),
    )  # fmt: skip


def pools(made: Any) -> dict[str, Any]:
    names = {"full": "full_attn_allocator", "swa": "swa_attn_allocator", "mamba": "mamba_allocator"}
    return {name: getattr(made, slot) for name, slot in names.items() if hasattr(made, slot)}


class Scheduler:
    """Makes calls on one composite. Two with the same seed make the same ones, as long as they are answered the same."""

    def __init__(self, made: Any, seed: int, slot_class: Any = None) -> None:
        self.made, self.chance = made, random.Random(seed)
        self.page_size = made.page_size
        states = getattr(made, "mamba_allocator", None)
        if states is None or slot_class is None:
            self.slots = sglang_slots(made, 12)
        else:
            self.slots = slot_class(states, 12, "cpu")
        self.running: list[torch.Tensor] = []
        self.states: list[torch.Tensor] = []
        self.without_window: list[int] = []
        self.events: list[Event] = []
        self.gate_open = True
        self.refused = self.moved = 0
        if made.lazy_compaction:
            made.set_host_transfer_move_gate(lambda: self.gate_open)

    def step(self) -> Any:
        """One call or a few that belong together; what was answered."""
        chance = self.chance.random()
        if chance < 0.30:
            return self.prefill(self.chance.randint(1, 3))
        if chance < 0.50:
            return self.decode()
        if chance < 0.70:
            return self.finish()
        if chance < 0.75:
            return self.finish_several()
        if chance < 0.85:
            return self.leave_window() if hasattr(self.made, "free_swa") else self.state()
        if chance < 0.90:
            return self.state()
        if chance < 0.93:
            self.gate_open = not self.gate_open
            return self.gate_open
        for event in self.events[:-1]:
            event.fired = True
        moved = int(self.made.flush_opportunistic())
        self.moved += moved
        return moved

    def prefill(self, count: int) -> Any:
        lens = [self.chance.randint(1, 6 * self.page_size) for _ in range(count)]
        seq = torch.tensor(lens)
        none = torch.zeros(count, dtype=torch.int64)
        if self.page_size == 1:
            tokens = self.made.alloc(sum(lens))
        else:
            tokens = self.made.alloc_extend(none, none, seq, seq, none - 1, sum(lens))
        if tokens is None:
            self.refused += 1
            return None
        self.running += list(tokens.split(lens))
        self.without_window += [0] * count
        self.launch(tokens)
        return tokens.tolist()

    def decode(self) -> Any:
        if not self.running:
            return None
        seq = torch.tensor([len(tokens) + 1 for tokens in self.running])
        last = torch.stack([tokens[-1] for tokens in self.running])
        # SGLang's count of the pages that a decode step needs is for pages of several tokens, and for others it calls `alloc`.
        if self.page_size == 1:
            tokens = self.made.alloc(len(self.running))
        else:
            tokens = self.made.alloc_decode(seq, seq, last)
        if tokens is None:
            self.refused += 1
            return None
        self.running = [torch.cat([old, new[None]]) for old, new in zip(self.running, tokens, strict=True)]
        self.launch(tokens)
        return tokens.tolist()

    def launch(self, written: torch.Tensor) -> None:
        """A forward; the one before is done half of the time."""
        if self.events and self.chance.random() < 0.5:
            self.events[-1].fired = True
        self.events.append(Event())
        self.made.set_latest_forward_done_event(self.events[-1])
        self.made.set_inflight_forward(self.events[-1], written)

    def finish(self) -> None:
        if not self.running:
            return
        at = self.chance.randrange(len(self.running))
        tokens, left = self.running.pop(at), self.without_window.pop(at)
        if left == 0 and self.chance.random() < 0.5:
            self.made.free_segment(tokens, start_pos=0)
        elif left and self.chance.random() < 0.5:
            self.made.free_full_segment(tokens[:left], start_pos=0)
            self.made.free_segment(tokens[left:], start_pos=left)
        else:
            self.made.free(tokens)

    def finish_several(self) -> None:
        self.made.free_group_begin()
        for _ in range(2):
            self.finish()
        self.made.free_group_end()

    def leave_window(self) -> None:
        """The oldest pages of a request leave the sliding window."""
        if not self.running:
            return
        at = self.chance.randrange(len(self.running))
        tokens, left = self.running[at], self.without_window[at]
        end = (left + len(tokens)) // 2 // self.page_size * self.page_size
        if end <= left:
            return
        if self.chance.random() < 0.5:
            self.made.free_swa(tokens[left:end])
        else:
            self.made.free_swa_segment(tokens[left:end], start_pos=left)
        self.without_window[at] = end

    def state(self) -> Any:
        if self.slots is None:
            return None
        if self.states and self.chance.random() < 0.5:
            self.slots.free(self.states.pop(self.chance.randrange(len(self.states))))
            return None
        self.made.prepare_mamba_allocation(1)
        slot = self.slots.alloc(1)
        if slot is None:
            self.refused += 1
            return None
        self.states.append(slot)
        return slot.tolist()

    def sizes(self) -> dict[str, Any]:
        """What the composite and the slot allocator say about themselves."""
        made = self.made
        found = {name: int(getattr(made, name)()) for name in SIZES if hasattr(made, name)}
        if self.slots is not None:
            found |= {
                "slots": int(self.slots.schedulable_available_size()), "free slots": len(self.slots.free_slots),
                "full tokens first": made.full_tokens_before_mamba_recheck(8),
            }  # fmt: skip
        if hasattr(made, "can_reserve"):
            found["can reserve"] = [
                made.can_reserve(n * self.page_size, n * self.page_size) for n in (1, 4, 16)
            ]
        return {**found, "violations": made.verify_byte_accounting(), "text": made.debug_print()}

    def places(self) -> dict[str, Any]:
        """Where everything is, pool by pool."""
        held = torch.cat([*self.running, torch.zeros(1, dtype=torch.int64)])
        found: dict[str, Any] = {}
        for name, pool in pools(self.made).items():
            ids = pool.free_virtual_ids
            found[name] = {
                "v2p": pool.virtual_to_physical.tolist(), "p2v": pool.physical_to_virtual.tolist(),
                "free ids": None if ids is None else ids.tolist(), "holes": sorted(pool._free_phys_pages.tolist()),
                "pending": sorted(pool._pending_reuse_pages_cpu), "by event": len(pool._pending_reuse),
                "live": pool.allocated_count(), "watermark": pool.watermark_physical,
                "span": (getattr(pool, "low_wm_page", None), getattr(pool, "high_wm_page", None)),
                "translated": pool.translate_kv_loc(held).tolist(),
                "written": pool.translate_write_loc(held, out=held.clone().new_empty(len(held) + 3), out_width=len(held) + 3)
                .tolist(),
            }  # fmt: skip
        return found


SIZES = (
    "available_size", "full_available_size", "swa_available_size", "schedulable_full_available_size",
    "schedulable_swa_available_size", "conserve_full_available_size", "conserve_swa_available_size",
    "mamba_slot_full_token_cost",
)  # fmt: skip
