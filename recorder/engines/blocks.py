"""The writer thread's side of engines that hand out blocks: which blocks live, and the events that follow from it.

What a trace needs is lifetimes, what such engines keep is references and a cache of released blocks. A block lives from when it is handed
out until its memory may be handed out again with nothing kept: one that is released into a prefix cache lives on. An engine's thread
therefore reports only what cannot be derived; that a cached block was evicted follows from its being handed out again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from recorder.session import Item, Session, Sink
from recorder.trace import NONE, EventKind, MarkCode, StateRow

MAX_PAGE_SIZE: Final = 256
"""Tokens a page may have in a replay."""


class LiveBlocks:
    """Live blocks of one pool of one file. Only the writer thread touches what it holds.

    Args:
        pool, name: index and name of the pool in the header.
        page_size: tokens of a page; a block is a page.
        state_every: calls between states, 0 for none.
    """

    def __init__(self, pool: int, name: str, page_size: int, state_every: int) -> None:
        self.pool, self.name, self.page_size = pool, name, page_size
        self._state_every = state_every
        self._calls = 0
        # A dict for its order: what a reset gives back is written in the order it was handed out.
        self._live: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def hand_out(self, sink: Sink, time_us: int, blocks: list[int], request: int) -> None:
        """Blocks were handed out. Those that still live were evicted for it (or their release was dropped): they die first."""
        self.give_back(sink, time_us, blocks, request)
        self._live.update(dict.fromkeys(blocks))
        if blocks:
            size = self.page_size
            pages = np.array(blocks, dtype=np.int64)
            tokens = pages[:, None] * size + np.arange(size, dtype=np.int64)
            sink.writer.append(
                EventKind.ALLOC,
                pool=self.pool,
                time_us=time_us,
                value=tokens.size,
                result=tokens.ravel(),
                request=request,
            )
        self._called(sink)

    def give_back(self, sink: Sink, time_us: int, blocks: list[int], request: int) -> None:
        """Of `blocks` those that live die. Others (the null block, one named twice) are not the trace's business."""
        live = self._live
        gone = [block for block in dict.fromkeys(blocks) if block in live]
        if not gone:
            return
        for block in gone:
            del live[block]
        pages = np.array(gone, dtype=np.int64)
        sink.writer.append(
            EventKind.FREE,
            pool=self.pool,
            time_us=time_us,
            list0=pages * self.page_size,
            list1=pages,
            request=request,
        )

    def release(self, sink: Sink, time_us: int, blocks: list[int], request: int) -> None:
        """`give_back` as a call of the engine's."""
        self.give_back(sink, time_us, blocks, request)
        self._called(sink)

    def reset(self, sink: Sink, time_us: int) -> None:
        """Everything was given back at once."""
        sink.writer.append(
            EventKind.MARK, time_us=time_us, value=int(MarkCode.CACHE_RESET), value2=len(self._live)
        )
        self.release(sink, time_us, list(self._live), NONE)

    def _called(self, sink: Sink) -> None:
        self._calls += 1
        if self._state_every and self._calls % self._state_every == 0 and sink.writer.events:
            row = StateRow(sink.writer.events - 1)
            row.pools[self.name] = {"allocated_count": len(self._live) * self.page_size}
            sink.writer.state(row)


def write_hand_out(sink: Sink, item: Item) -> None:
    """`item`: (write_hand_out, time, LiveBlocks, block ids, request)."""
    _, time_ns, live, blocks, request = item
    live.hand_out(sink, time_ns // 1000, blocks, sink.request(request))


def write_release(sink: Sink, item: Item) -> None:
    """`item`: (write_release, time, LiveBlocks, block ids, request)."""
    _, time_ns, live, blocks, request = item
    live.release(sink, time_ns // 1000, blocks, sink.request(request))


def write_reset(sink: Sink, item: Item) -> None:
    """`item`: (write_reset, time, [LiveBlocks])."""
    _, time_ns, pools = item
    for live in pools:
        live.reset(sink, time_ns // 1000)


def write_mark(sink: Sink, item: Item) -> None:
    """`item`: (write_mark, time, code, figure, request)."""
    _, time_ns, code, figure, request = item
    sink.writer.append(
        EventKind.MARK, time_us=time_ns // 1000, value=code, value2=figure, request=sink.request(request)
    )


def put_mark(session: Session, code: MarkCode, figure: int, request: str | None) -> None:
    """Queue a mark, from the engine's thread."""
    if session.has_room():
        session.queue.append((write_mark, session.clock_ns(), int(code), figure, request))


def page_shape(block_tokens: int, block_bytes: int) -> tuple[int, int]:
    """(tokens of a page, bytes of one of them) for a block: the most tokens, at most MAX_PAGE_SIZE, that divide both evenly.

    A block of more tokens (hybrid models have blocks of several hundred) is written as a page of fewer and larger ones.
    """
    fits = [
        count
        for count in range(1, MAX_PAGE_SIZE + 1)
        if block_tokens % count == 0 and block_bytes % count == 0
    ]
    return fits[-1], block_bytes // fits[-1]


def plain(source: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those attributes of an engine's configuration that are plain values: no objects, and no text that could be a path."""
    values = {name: getattr(source, name, None) for name in names}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and "/" not in value)
    }
