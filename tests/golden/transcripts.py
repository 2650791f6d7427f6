"""Plays a golden transcript (calls made to SGLang 0.5.23's own classes, see data/README.md) on our classes."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zstandard

from allocator import (
    FloatMultiEndedAllocator,
    MambaSubPoolSpec,
    MHASubPoolSpec,
    MLASubPoolSpec,
    MultiEndedAllocator,
    SubPoolSpec,
    UnifiedKVPool,
    kv_store_for,
)

DATA = Path(__file__).parent / "data"


class TranscriptEvent:
    """A forward-done event as the transcripts mean it: true once `forward_done` was seen; a stream wait does not make it true."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def wait(self) -> None: ...


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        for line in io.TextIOWrapper(plain, encoding="utf-8"):
            yield json.loads(line)


def spec_of(pool: dict[str, Any]) -> SubPoolSpec:
    common = {"name": pool["name"], "layer_num": pool["layer_num"], "grow_direction": pool["grow_direction"]}
    if pool["kind"] == "mha":
        return MHASubPoolSpec(head_num=2, head_dim=8, store_dtype=torch.float16, **common)
    if pool["kind"] == "mla":
        return MLASubPoolSpec(kv_lora_rank=16, qk_rope_head_dim=8, store_dtype=torch.bfloat16, **common)
    return MambaSubPoolSpec(
        conv_state_shapes=((4, 4),),
        conv_dtype=torch.float32,
        temporal_state_shape=(2, 4, 4),
        temporal_dtype=torch.float32,
        **common,
    )


class Player:
    """Our allocators, wired as the transcript's header says."""

    device = "cpu"

    def __init__(
        self,
        header: dict[str, Any],
        strategy: str,
        end_class: type[MultiEndedAllocator] = MultiEndedAllocator,
        float_class: type[FloatMultiEndedAllocator] = FloatMultiEndedAllocator,
        device: str = "cpu",
    ) -> None:
        pools = header["pools"]
        self.device = device
        page_size = max(pool["page_size"] for pool in pools)
        buffer = UnifiedKVPool(
            total_bytes=header["total_bytes"],
            sub_pool_specs=[spec_of(p) for p in pools],
            device=device,
            page_size=page_size,
        )
        self.allocators: dict[str, MultiEndedAllocator] = {}
        self.header_facts: dict[str, tuple[Any, ...]] = {}
        self.gate_of_floats = "is_id_owner" in pools[0]
        self.gate_open = True
        for pool in pools:
            is_float = pool["grow_direction"] == "float"
            owner = pool.get("is_id_owner", True)
            made = (float_class if is_float else end_class)(
                kvcache=kv_store_for(buffer, pool["name"]),
                unified_buffer=buffer,
                sub_pool_name=pool["name"],
                device=device,
                is_id_owner=owner,
                virtual_num_pages=None if owner else pool["num_virtual_ids"],
                page_size=pool["page_size"],
                lazy_compaction=header["lazy_compaction"] and not is_float,
                strategy=strategy,
            )
            made._lazy_max_moves_per_call = header["move_cap"]
            self.allocators[pool["name"]] = made
        chain = [self.allocators[spec.name] for spec in buffer.sub_pool_specs]
        for low, high in itertools.pairwise(chain):
            low.bind_high_peer(high)
            high.bind_low_peer(low)
        self.events: dict[int, TranscriptEvent] = {}

    def call(self, line: dict[str, Any]) -> Any:
        op = line["op"]
        if op == "forward_begin":
            event = self.events[line["event"]] = TranscriptEvent()
            for name, ids in line["write_sets"].items():
                self.allocators[name].set_latest_forward_done_event(event)
                self.allocators[name].set_inflight_forward(event, None if ids is None else self.ids(ids))
            return None
        if op == "forward_done":
            self.events[line["event"]].done = True
            return None
        if op == "move_gate":
            self.gate_open = line["open"]
            for made in self.allocators.values():
                if self.gate_of_floats or made.grow_direction != "float":
                    made.disagg_move_gate = lambda: self.gate_open
            return None
        target = self.allocators[line["pool"]]
        if op == "alloc":
            result = target.alloc(line["need_size"])
        elif op == "alloc_extend":
            prefix, seq = torch.tensor(line["prefix_lens"]), torch.tensor(line["seq_lens"])
            result = target.alloc_extend(
                prefix.to(self.device),
                prefix,
                seq.to(self.device),
                seq,
                self.ids(line["last_loc"]),
                line["extend_num_tokens"],
            )
        elif op == "alloc_decode":
            seq = torch.tensor(line["seq_lens"])
            result = target.alloc_decode(seq.to(self.device), seq, self.ids(line["last_loc"]))
        elif op == "flush":
            if isinstance(target, FloatMultiEndedAllocator):
                return target.flush_opportunistic()
            return target._flush(urgent=line["urgent"])
        elif op == "make_room":
            return target.make_room(side=line["side"], min_bytes=line["min_bytes"])
        elif op == "compact_holes":
            return target.compact_holes(retreat_side=line["retreat_side"])
        else:
            arguments = {
                "alloc_with_virtual": lambda: target.alloc_with_virtual(self.ids(line["pages"])),
                "free": lambda: target.free(self.ids(line["ids"])),
                "free_segment": lambda: target.free_segment(
                    self.ids(line["ids"]), start_pos=line["start_pos"]
                ),
                "free_group_begin": target.free_group_begin,
                "free_group_end": target.free_group_end,
            }
            arguments[op]()
            return None
        if result is None:
            return None
        if isinstance(line["result"], dict):
            return {"count": result.numel(), "blake2b": digest(result)}
        return result.tolist()

    def ids(self, ids: list[int] | dict[str, Any]) -> torch.Tensor:
        """int64 ``[n]`` on the allocators' device."""
        return torch.tensor(ids["ids"] if isinstance(ids, dict) else ids, dtype=torch.int64).to(self.device)

    def state(self, name: str, keys: Any) -> dict[str, Any]:
        made = self.allocators[name]
        table = made.virtual_to_physical[:-1]
        read = {
            "watermark": lambda: made.watermark_physical,
            "low_watermark": lambda: made.low_wm_page,  # type: ignore[attr-defined]
            "high_watermark": lambda: made.high_wm_page,  # type: ignore[attr-defined]
            "allocated_count": made.allocated_count,
            "available_size": made.available_size,
            "schedulable_available_size": made.schedulable_available_size,
            "holes": lambda: made._free_phys_pages.numel(),
            "pending": lambda: len(made._pending_reuse_pages_cpu),
            "virtual_to_physical": table.tolist,
            "free_virtual_ids": lambda: made.free_virtual_ids.tolist(),  # type: ignore[union-attr]
            "free_physical_pages": lambda: sorted(made._free_phys_pages.tolist()),
            "virtual_to_physical_blake2b": lambda: digest(table),
            "free_virtual_ids_blake2b": lambda: digest(made.free_virtual_ids),  # type: ignore[arg-type]
        }
        return {key: read[key]() for key in keys}


def digest(ids: torch.Tensor) -> str:
    return hashlib.blake2b(ids.contiguous().cpu().numpy().tobytes(), digest_size=12).hexdigest()
