"""Rewrites a trace without what could tell users or machines apart; its events and states stay what they are.

What is listed here stays, everything else in the header goes: a list of what goes would not know the next
engine's settings.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .private_text import without_paths, without_people
from .trace import (
    UNSET,
    Chunk,
    DamagedTrace,
    Header,
    PoolHeader,
    Provenance,
    ResultKind,
    TraceReader,
    TraceWriter,
)
from .trace.limits import MAX_CHUNK_EVENTS
from .trace.writer import partial_path

SETTINGS: Final = frozenset(
    (
        # SGLang
        "placement",
        "move_cap",
        "state_every",
        "page_size",
        "mem_fraction_static",
        "max_total_tokens",
        "max_running_requests",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "context_length",
        "schedule_policy",
        "attention_backend",
        "kv_cache_dtype",
        "dtype",
        "swa_full_tokens_ratio",
        "mamba_full_memory_ratio",
        "disable_overlap_schedule",
        "disable_radix_cache",
        "enable_unified_memory",
        "disaggregation_mode",
        "speculative_algorithm",
        "load_format",
        "lazy_compaction",
        # vLLM
        "block_size",
        "cache_dtype",
        "prefix_caching",
        "hash_block_size",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "max_num_seqs",
        "max_num_active_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
        "policy",
        "scheduling_policy",
        "async_scheduling",
        "scheduler_reserve_full_isl",
        "watermark",
        "disable_hybrid_kv_cache_manager",
        "gpu_memory_utilization",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "mamba_cache_mode",
        "kv_sharing_fast_prefill",
        "sliding_window",
        "max_model_len",
        "method",
        "num_speculative_tokens",
        "null_block",
        # transformers
        "num_blocks",
        "max_batch_tokens",
        "max_memory_percent",
        "max_requests_per_batch",
        "max_blocks_per_request",
        "allow_block_sharing",
        "use_async_batching",
        "scheduler_type",
        "cpu_offload_space",
        "num_sectors",
        "bytes_per_sector",
        "use_prefix_sharing",
    )
)
"""Settings that stay."""
RANK: Final = frozenset(f"{name}{end}" for name in ("tp", "pp", "dp", "ep", "cp") for end in ("", "_size"))
LAYOUT: Final = frozenset(
    (
        "head_num",
        "head_dim",
        "v_head_dim",
        "dtype",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "conv_state_shape",
        "conv_state_shapes",
        "conv_dtype",
        "temporal_state_shape",
        "temporal_dtype",
    )
)
EXTRA: Final = {
    "extra": frozenset({"geometry", "entry_bytes", "trash_sectors"}),
    "provenance": frozenset({"log_ended"}),
    "pool": frozenset(
        (
            "layout_note",
            "page_note",
            "shards_under_dcp",
            "need_sort",
            "spec",
            "groups",
            "block_tokens",
            "block_bytes",
            "blocks_per_sector",
            "first_block",
            "head_dim",
            "num_key_value_heads",
            "sliding_window",
            "dtype",
        )
    ),
}
"""Keys beyond those of the format that stay: of the header, of its provenance, of a pool."""
GROUP: Final = frozenset(
    (
        "kind",
        "layers",
        "block_size",
        "page_size_bytes",
        "num_kv_heads",
        "head_size",
        "sliding_window",
        "dtype",
    )
)
"""Keys of the maps that a value that stays may hold: groups of layers."""


LEVEL: Final = 19
"""zstd's level: written once, kept for long."""


@dataclass(frozen=True)
class Anonymized:
    """What became of a trace. `removed`: dotted names of what is gone. `note`: how a cut original ended."""

    path: Path
    size: int
    events: int
    states: int
    request_ids: int
    removed: list[str]
    note: str


def anonymize_trace(
    source: Path,
    output: Path,
    *,
    drop_request_ids: bool = False,
    rebase_times: bool = False,
    keep: Collection[str] = (),
    force: bool = False,
) -> Anonymized:
    """Write `source` to `output` without names of users and machines.

    Names of requests are hashed with a salt that nobody keeps, or dropped. `rebase_times` lets time begin at 0.
    `keep`: names of keys that stay wherever they are in the header. `force` overwrites `output`.

    Raises what TraceReader and TraceWriter raise; nothing is left of the output then. A cut trace is no error:
    its good events are written, and the footer's reason says how it ended.
    """
    salt = secrets.token_bytes(32)
    with TraceReader(source) as reader:
        header, removed = anonymous_header(reader.header, keep)
        try:
            writer = TraceWriter(output, header, chunk_events=MAX_CHUNK_EVENTS, level=LEVEL, force=force)
        except ValueError as problem:
            raise DamagedTrace(f"its header cannot be written ({problem})", path=source) from None
        names = states = 0
        try:
            since: int | None = None
            for item in reader.items():
                if not isinstance(item, Chunk):
                    for row in item:
                        writer.state(row)
                    states += len(item)
                    continue
                writer.flush()  # chunks stay what they are, so that each state stays beside its events
                if since is None:
                    since = int(item.time_us[0]) if rebase_times else 0
                if not drop_request_ids:
                    for number, name in item.request_ids.items():
                        writer.name_request(number, _hashed(salt, name))
                        names += 1
                _copy(item, writer, since)
            writer.flush()
            if reader.footer is not None and reader.footer.dropped_at_end:
                writer.dropped(reader.footer.dropped_at_end)
            reason = "" if reader.footer is None else without_people(reader.footer.reason)
            note = ""
            if reader.recovered is not None:
                lost = reader.recovered
                note = f"the original ends early: {lost.reason}; event {lost.last_seq} is its last one"
                reason = f"{reason}; {note}" if reason else note
            writer.close(reason)
        except BaseException:
            writer.abort()
            partial_path(output).unlink(missing_ok=True)
            raise
    return Anonymized(output, output.stat().st_size, writer.events, states, names, removed, note)


def anonymous_header(header: Header, keep: Collection[str] = ()) -> tuple[Header, list[str]]:
    """(a header with a uuid of its own and nothing that is not known to be harmless, dotted names of what is gone)."""
    removed: list[str] = []

    def kept(values: dict[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
        stays: dict[str, Any] = {}
        for name, value in values.items():
            if name in keep or (name in known and _is_plain(value)):
                stays[name] = _cleaned(value)
            else:
                removed.append(f"{where}{name}")
        return stays

    def pool(old: PoolHeader) -> PoolHeader:
        where = f"pools.{old.name}."
        return replace(
            old,
            layout=kept(old.layout, LAYOUT, f"{where}layout."),
            extra=kept(old.extra, EXTRA["pool"], where),
        )

    origin = header.provenance
    made = Header(
        engine=without_paths(header.engine),
        engine_version=without_paths(header.engine_version),
        producer=without_paths(header.producer),
        allocator=without_paths(header.allocator),
        device=without_paths(header.device),
        model=without_people(header.model),
        total_bytes=header.total_bytes,
        clock_unit=header.clock_unit,
        drop_policy=header.drop_policy,
        level=header.level,
        settings=kept(header.settings, SETTINGS, "settings."),
        rank=kept(header.rank, RANK, "rank."),
        pools=[pool(old) for old in header.pools],
        provenance=Provenance(
            kind=origin.kind,
            how=without_people(origin.how),
            source=without_people(origin.source),
            hardware=without_people(origin.hardware),
            extra={**kept(origin.extra, EXTRA["provenance"], "provenance."), "anonymized": True},
        ),
        extra=kept(header.extra, EXTRA["extra"], ""),
    )
    return made, removed


def _copy(chunk: Chunk, writer: TraceWriter, since: int) -> None:
    """Add the events of `chunk`, `since` microseconds earlier."""
    lists, (queries, answers) = [chunk.lists(slot) for slot in range(4)], chunk.queries
    bounds = queries.offsets.tolist()
    asked = list(zip(queries.values.tolist(), answers.tolist(), strict=True))
    drops: dict[int, int] = {}
    for index, count in chunk.drops.tolist():
        drops[index] = drops.get(index, 0) + count
    columns: Iterable[tuple[int, ...]] = zip(
        *(
            column.tolist()
            for column in (
                chunk.kind, chunk.pool, chunk.time_us, chunk.value, chunk.value2, chunk.depth, chunk.request,
                chunk.result_kind, chunk.result_value,
            )
        ),
        strict=True,
    )  # fmt: skip
    for index, row in enumerate(columns):
        kind, pool, time_us, value, value2, depth, request, result_kind, number = row
        if index in drops:
            writer.dropped(drops[index])
        result: Any = UNSET
        if result_kind != ResultKind.NOT_RECORDED:
            result = {ResultKind.INTEGER: number, ResultKind.IDS: lists[3].get(index)}.get(
                ResultKind(result_kind)
            )
        writer.append(
            kind,
            pool=pool,
            time_us=time_us - since,
            value=value,
            value2=value2,
            list0=lists[0].get(index),
            list1=lists[1].get(index),
            list2=lists[2].get(index),
            result=result,
            depth=depth,
            request=request,
            queries=asked[bounds[index] : bounds[index + 1]],
            trusted=True,
        )
    if len(chunk) in drops:
        writer.dropped(drops[len(chunk)])


def _hashed(salt: bytes, name: str) -> str:
    return hashlib.blake2b(salt + name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _is_plain(value: Any) -> bool:
    """A number, a text, nothing, a group of layers, or lists of those: not any map, which could hold anything."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return value.keys() <= GROUP and not any(isinstance(item, (dict, list)) for item in value.values())
    return value is None or isinstance(value, (bool, int, float, str))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return without_people(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return value
