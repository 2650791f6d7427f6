"""Logs of vLLM's block pool and request events to trace events.

vLLM counts references; an allocator trace needs lifetimes. A block is live from `alloc` until it is *released
unhashed* (`free`: in `released`, not in `cached`) or *evicted*: a block released with its hash stays live,
because a later `touch` may take it back. `evict` comes just before the `alloc` that hands the block out
again; a `reset` of the prefix cache evicts every cached block that nobody holds. Block 0 is vLLM's null block
and never an allocation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ..trace import NONE, EventKind, Header, MarkCode, PoolHeader, Provenance, TraceWriter
from .fields import Line

NOMINAL_ENTRY_BYTES: Final = 1024
"""Bytes per token written into the header: the log does not say; only byte figures depend on it."""
_IGNORED: Final = frozenset({"cache_full", "alloc_slots"})


def vllm_header(line: Line, origin: str, ended: str) -> Header:
    """Trace header of the log's `pool_init` line. `origin`: its file name; `ended`: "clean" or "cut"."""
    num_blocks = line.integer("num_blocks")
    page_size = line.integer("hash_block_size")
    if num_blocks < 2 or page_size < 1:
        raise line.error("a pool needs at least 2 blocks (one is the null block) of at least 1 token")
    entry = line.integer("entry_bytes") if line.has("entry_bytes") else NOMINAL_ENTRY_BYTES
    nominal = not line.has("entry_bytes")
    note = {"entry_bytes": f"nominal: the log does not say how many bytes a token takes; {entry} was put in"}
    return Header(
        engine="vllm",
        engine_version=str(line.data.get("engine_version", "")),
        allocator="BlockPool",
        settings={"placement": "free"},
        pools=[
            PoolHeader(
                name="blocks",
                kind="tokens",
                grow_direction="down",
                page_size=page_size,
                entry_bytes=entry,
                layer_num=1,
                num_pages=num_blocks,
                min_page_index=1,
                num_virtual_ids=num_blocks,
            )
        ],
        total_bytes=num_blocks * page_size * entry,
        device=str(line.data.get("device", "")),
        model=str(line.data.get("model", "")),
        provenance=Provenance(
            kind="recorded",
            how="vLLM's block pool and scheduler, logged call by call; a block lives until it is released "
            "unhashed or evicted",
            extra={"log": origin, "log_ended": ended},
        ),
        extra=note if nominal else {},
    )


class VllmBlocks:
    """Turns log lines into events of `writer`, following which blocks are held, cached or free."""

    def __init__(self, writer: TraceWriter, null_block: int) -> None:
        self._writer = writer
        self._page_size = writer.header.pools[0].page_size
        self._num_blocks = writer.header.pools[0].num_pages
        self._null = null_block
        self._held: set[int] = set()
        self._cached: dict[int, None] = {}
        self._requests: dict[str, int] = {}
        self.skipped = 0

    def line(self, line: Line) -> None:
        """Add one line. Raises LogError."""
        kind = line.text("kind")
        if kind in _IGNORED:
            self.skipped += 1
            return
        handlers = {
            "alloc": self._alloc,
            "free": self._free,
            "touch": self._touch,
            "evict": self._evict,
            "reset": self._reset,
        }
        if kind in handlers:
            handlers[kind](line)
            return
        marks = {
            "step": (MarkCode.STEP, "reqs"),
            "arrive": (MarkCode.REQUEST_ARRIVE, "prompt"),
            "req_free": (MarkCode.REQUEST_FINISH, "ntok"),
            "preempt": (MarkCode.PREEMPT, "computed"),
            "alloc_fail": (MarkCode.ALLOC_FAIL, "n"),
        }
        if kind not in marks:
            raise line.error(f"unknown kind {kind[:60]!r}")
        code, figure = marks[kind]
        if kind == "req_free" and line.data.get("status") == "RUNNING":
            # A preempted request gives its blocks back and stays in the queue: the preempt line says so.
            self.skipped += 1
            return
        self._mark(line, code, line.integer(figure))

    def _alloc(self, line: Line) -> None:
        blocks = self._blocks(line, "ids")
        for block in blocks:
            if block in self._held or block in self._cached:
                raise line.error(f"alloc hands out block {block}, which is in use")
        self._held.update(blocks)
        if blocks:
            self._event(
                line,
                EventKind.ALLOC,
                value=len(blocks) * self._page_size,
                result=self._tokens(blocks).ravel(),
            )

    def _free(self, line: Line) -> None:
        released, cached = self._blocks(line, "released"), self._blocks(line, "cached")
        if not set(cached) <= set(released):
            raise line.error("a block is cached and was not released")
        for block in released:
            if block not in self._held:
                raise line.error(f"free releases block {block}, which nobody holds")
            self._held.discard(block)
        self._cached.update(dict.fromkeys(cached))
        keep = set(cached)
        self._give_back(line, [block for block in released if block not in keep])

    def _touch(self, line: Line) -> None:
        for block in self._blocks(line, "revived"):
            if block not in self._cached:
                raise line.error(f"touch revives block {block}, which is not in the cache")
            del self._cached[block]
            self._held.add(block)

    def _evict(self, line: Line) -> None:
        gone = []
        for block in self._blocks(line, "ids"):
            if block in self._cached:
                del self._cached[block]
                gone.append(block)
            elif block not in self._held:
                raise line.error(f"evict of block {block}, which is neither in the cache nor held")
        self._give_back(line, gone)

    def _reset(self, line: Line) -> None:
        if not line.flag("ok"):
            return
        gone = list(self._cached)
        self._cached.clear()
        self._mark(line, MarkCode.CACHE_RESET, len(gone))
        self._give_back(line, gone)

    def _give_back(self, line: Line, blocks: list[int]) -> None:
        if blocks:
            pages = np.array(blocks, dtype=np.int64)
            self._event(line, EventKind.FREE, list0=pages * self._page_size, list1=pages)

    def _tokens(self, blocks: list[int]) -> Any:
        pages = np.array(blocks, dtype=np.int64)
        return pages[:, None] * self._page_size + np.arange(self._page_size, dtype=np.int64)

    def _blocks(self, line: Line, name: str) -> list[int]:
        blocks = [block for block in line.integers(name) if block != self._null]
        for block in blocks:
            if not 0 <= block < self._num_blocks:
                raise line.error(f"block {block} in a pool of {self._num_blocks}")
        if len(set(blocks)) != len(blocks):
            raise line.error(f"a block is twice in {name!r}")
        return blocks

    def _mark(self, line: Line, code: MarkCode, figure: int) -> None:
        self._event(line, EventKind.MARK, pool=NONE, value=int(code), value2=figure)

    def _event(self, line: Line, kind: EventKind, *, pool: int = 0, **fields: Any) -> None:
        self._writer.append(
            kind, pool=pool, time_us=line.integer("t") // 1000, request=self._request(line), **fields
        )

    def _request(self, line: Line) -> int:
        if not line.has("req"):
            return NONE
        return self._requests.setdefault(line.text("req"), len(self._requests))


def convert_vllm(lines: Iterable[Line], writer: TraceWriter, null_block: int) -> dict[str, int]:
    """Add every line of `lines` (after the pool_init line) to `writer`; counts for the report."""
    blocks = VllmBlocks(writer, null_block)
    for line in lines:
        blocks.line(line)
    return {"lines_without_event": blocks.skipped}
